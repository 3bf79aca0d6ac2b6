"""Seconds of each phase of a step, and when it began, on the driver."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from codetiming import Timer


@dataclass(frozen=True)
class Span:
    """One stretch of a phase: its name, when it began (seconds since 1970) and how long it took."""

    name: str
    started: float
    seconds: float


class PhaseClock:
    """Times phases by name. A phase that runs twice in a step is summed. Phases may be nested."""

    def __init__(self) -> None:
        """Start without spans."""
        self.spans: list[Span] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body. A body that raises is not recorded."""
        started = time.time()
        with Timer(logger=None) as timer:
            yield
        self.spans.append(Span(name, started, timer.last))

    def timings(self) -> dict[str, float]:
        """Return ``timing_s/<phase>`` of the spans since the last :meth:`take`."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            seconds[f"timing_s/{span.name}"] = seconds.get(f"timing_s/{span.name}", 0.0) + span.seconds
        return seconds

    def take(self) -> list[Span]:
        """Return the spans in the order in which they ended, and begin a new step."""
        spans, self.spans = self.spans, []
        return spans
