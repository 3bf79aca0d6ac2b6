"""The workers as the driver calls them: each call is a timed phase, and its memory is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from verl_memopt.memory.batching.learned_budget import PassFigures
from verl_memopt.observe.phase import PhaseMemory, combine, host_rss_bytes
from verl_memopt.observe.timing import PhaseClock
from verl_memopt.workers.group import WorkerGroup

P = ParamSpec("P")
Result = TypeVar("Result")


class TimedGroup:
    """A worker group with a clock.

    Attributes:
        track: Count live bytes on a CPU in the calls that follow.
        figures: What the last call took of the devices.
    """

    def __init__(self, group: WorkerGroup, clock: PhaseClock, in_process: bool) -> None:
        """Record the memory of the start.

        Args:
            group: The workers.
            clock: Times each call as a phase.
            in_process: The worker runs in this process, so its figures include the driver's resident memory.
        """
        self.group = group
        self.clock = clock
        self.in_process = in_process
        self.track = False
        self.figures = PassFigures()
        init = combine(group.all("started"), 0 if in_process else host_rss_bytes())
        self._memories: dict[str, list[PhaseMemory]] = {"init": [init]}

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.group.world_size

    def all(self, phase: str, method: Callable[Concatenate[Any, P], Result], *args: P.args, **options: P.kwargs) -> list[Result]:
        """Call a method on each worker with the same arguments, and return the results in rank order.

        Args:
            phase: Name of the phase.
            method: A method of the worker's class, such as ``Worker.generate``.
            *args: Its arguments.
            **options: None: arguments travel by position.
        """
        assert not options, f"{method.__name__}: give {', '.join(options)} by position"
        return self.each(phase, method, [args] * self.world_size)

    def each(self, phase: str, method: Callable[..., Result], arguments: Sequence[tuple[Any, ...]]) -> list[Result]:
        """Call a method on each worker, with one tuple of arguments per rank, and return the results in rank order.

        Args:
            phase: Name of the phase.
            method: A method of the worker's class.
            arguments: The arguments of each rank.
        """
        name = method.__name__
        with self.clock.phase(phase):
            replies = self.group.each("call", [(phase, self.track, name, *args) for args in arguments])
        driver = 0 if self.in_process else host_rss_bytes()
        self._memories.setdefault(phase, []).append(combine([reply.memory for reply in replies], driver))
        self.figures = _figures(replies)
        return [reply.value for reply in replies]

    def take_memories(self) -> list[PhaseMemory]:
        """Return the memory of each phase since the last call of this method, in the order in which the phases began."""
        memories = [_over_calls(calls) for calls in self._memories.values()]
        self._memories = {}
        return memories


def _figures(replies: Sequence[Any]) -> PassFigures:
    """Return the figures of one call over all ranks."""
    peaks = [reply.memory.peak_allocated_bytes for reply in replies]
    budgets = [reply.budget_bytes for reply in replies]
    caps = [reply.cap_after_error for reply in replies if reply.cap_after_error is not None]
    return PassFigures(
        peak_bytes=None if None in peaks else max(peaks),
        budget_bytes=None if None in budgets else min(budgets),
        cap_after_error=min(caps, default=None),
        retries=sum(reply.retries for reply in replies),
    )


def _over_calls(calls: Sequence[PhaseMemory]) -> PhaseMemory:
    """Return the figures of a phase over its successive calls: the largest peaks, and the live bytes at both ends."""
    return replace(
        combine(calls),
        seconds=sum(call.seconds for call in calls),
        allocated_bytes=calls[-1].allocated_bytes,
        entered_bytes=calls[0].entered_bytes,
        host_rss_bytes=max(call.host_rss_bytes for call in calls),
        host_buffer_bytes=max(call.host_buffer_bytes for call in calls),
    )
