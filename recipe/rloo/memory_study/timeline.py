"""Live and reserved bytes over time: what a meter keeps of them, and a byte tracker that notes each change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from verl_memopt.observe.byte_tracker import ByteTracker

Point = tuple[float, int, int | None]
"""Seconds since the phase began, live bytes, reserved bytes."""
LEAST_SHARE = 0.005
"""A change smaller than this share of the highest level is not kept."""


def thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points that a chart needs: the first, the last, and each that differs from the one kept before it.

    Differences below LEAST_SHARE of the highest level do not count. The highest live and the highest reserved level always stay:
    no peak is lost.
    """
    if not points:
        return ()
    live, reserved = [point[1] for point in points], [point[2] or 0 for point in points]
    least = LEAST_SHARE * max(*live, *reserved)
    keep = {0, len(points) - 1, live.index(max(live)), reserved.index(max(reserved))}
    last = 0
    for place in range(1, len(points)):
        if max(abs(live[place] - live[last]), abs(reserved[place] - reserved[last])) > least:
            keep.add(place)
            last = place
    return tuple(points[place] for place in sorted(keep))


class TimelineTracker(ByteTracker):
    """A byte tracker that notes the live bytes of the device after each operation that changed them. Takes a tracker's arguments.

    Attributes:
        changes: (``time.perf_counter()``, live bytes) after each change.
    """

    def __init__(self, **options: Any) -> None:
        """Start without changes."""
        super().__init__(**options)
        self.changes: list[tuple[float, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run and count an operation, and note the bytes if they are not those of the last note."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        live = self.total()
        if not self.changes or self.changes[-1][1] != live:
            self.changes.append((time.perf_counter(), live))
        return result
