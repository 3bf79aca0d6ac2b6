"""The workers as the loop sees them: every call is a timed phase, and what it held in memory is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl_memopt.observe.phase import PhaseMemory, combine, host_rss_bytes
from verl_memopt.observe.timing import PhaseClock
from verl_memopt.workers.group import WorkerGroup


class TimedGroup:
    """A worker group with a clock.

    Args:
        group: the workers.
        clock: times each call as a phase.
        in_process: the workers live in this process, so the driver's resident memory is already counted.

    Attributes:
        track: count live bytes on a CPU in the calls that follow.
    """

    def __init__(self, group: WorkerGroup, clock: PhaseClock, in_process: bool) -> None:
        self.group = group
        self.clock = clock
        self.in_process = in_process
        self.track = False
        init = combine(group.all("started"), 0 if in_process else host_rss_bytes())
        self._memories: dict[str, list[PhaseMemory]] = {"init": [init]}

    @property
    def world_size(self) -> int:
        return self.group.world_size

    def all(self, phase: str, method: str, *args: Any) -> list[Any]:
        """Make the same call on each worker and return their answers in rank order."""
        return self.each(phase, method, [args] * self.world_size)

    def each(self, phase: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Make a call on each worker with arguments of its own and return their answers in rank order."""
        with self.clock.phase(phase):
            replies = self.group.each("call", [(phase, self.track, method, *own) for own in arguments])
        driver = 0 if self.in_process else host_rss_bytes()
        self._memories.setdefault(phase, []).append(combine([reply.memory for reply in replies], driver))
        return [reply.value for reply in replies]

    def take_memories(self) -> list[PhaseMemory]:
        """Return each phase's memory since the last take, over all its calls, in the order the phases began."""
        memories = [_over_calls(calls) for calls in self._memories.values()]
        self._memories = {}
        return memories


def _over_calls(calls: Sequence[PhaseMemory]) -> PhaseMemory:
    """Return a phase's figures over calls made one after another: peaks are the largest, what is live is the last call's."""
    return replace(
        combine(calls),
        seconds=sum(call.seconds for call in calls),
        allocated_bytes=calls[-1].allocated_bytes,
        host_rss_bytes=max(call.host_rss_bytes for call in calls),
        host_buffer_bytes=max(call.host_buffer_bytes for call in calls),
    )
