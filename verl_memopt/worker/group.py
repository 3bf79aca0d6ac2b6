"""Groups of workers: what they answer, the one in this process (``LocalGroup``), and calls timed by ``TimedGroup``.

A group answers calls in rank order, wherever its members live. Those of Ray are in :mod:`verl_memopt.worker.ray_group`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from verl_memopt.memory.token_budget import PassFigures
from verl_memopt.worker.nodes import free_port
from verl_memopt.worker.ray_cluster import environment_set

if TYPE_CHECKING:
    from verl_memopt.observe.phase import PhaseClock, PhaseMemory

P = ParamSpec("P")
Result = TypeVar("Result")
Other = TypeVar("Other")


@dataclass(frozen=True)
class Placement:
    """The place of a member in its group."""

    rank: int
    world_size: int
    local_rank: int
    """Rank of the member on its node, and the index of its device among the devices that its process sees."""
    master_addr: str
    """Address of rank 0's node, where process groups meet."""
    master_port: int
    """A port that was free there when the group started."""
    device: str
    """Kind of device, as :func:`verl_memopt.distributed.device.resolve_device` names it."""


WorkerFactory = Callable[[Placement], Any]
"""Builds a worker inside the process that will hold it. Must be picklable."""


class Pending(Generic[Result]):
    """A result that may still be computed elsewhere. ``wait`` returns it once it is there, and is called once."""

    def __init__(self, wait: Callable[[], Result]) -> None:
        self._wait = wait

    @classmethod
    def done(cls, result: Result) -> Pending[Result]:
        """Wrap a result that exists."""
        pending = cls(lambda: result)
        pending.result()
        return pending

    def result(self) -> Result:
        """Wait for the result and return it."""
        return self._result

    @cached_property
    def _result(self) -> Result:
        return self._wait()

    def then(self, use: Callable[[Result], Other]) -> Pending[Other]:
        """Apply a function to the result: at once if it exists, else when it is asked for."""
        if "_result" in vars(self):
            return Pending.done(use(self._result))
        return Pending(lambda: use(self.result()))


class WorkerGroup(Protocol):
    """Members that are called by method name, one call at a time, and that answer together."""

    @property
    def world_size(self) -> int:
        """Number of members."""

    def all(self, method: str, *args: Any) -> list[Any]:
        """Make the same call on each member and return the results in rank order.

        After an error the group is gone.

        Raises:
            UserError: As a member raised it.
            WorkerError: A member raised any other error. The message carries its traceback. A group in this process raises the
                error itself.
        """

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call member ``rank`` with ``arguments[rank]`` and return the results in rank order. Errors are as in :meth:`all`."""

    def shutdown(self) -> None:
        """End the members and all that was started for them. May be called again."""


class PoolGroup(WorkerGroup, Protocol):
    """A group on devices of its own, which computes while other groups do."""

    def begin(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Pending[list[Any]]:
        """Call member ``rank`` with ``arguments[rank]``, and return without waiting for the results."""


def process_environment(placement: Placement, local_world_size: int) -> dict[str, str]:
    """Return the environment variables from which torch.distributed and vLLM read their place."""
    return {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(placement.master_port),
    }


# A group of one member in this process: for a debugger, and for machines without Ray.


LOOPBACK = "127.0.0.1"


class LocalGroup:
    """One worker in the driver's process. Its environment variables are set for as long as the group lives.

    The worker's errors come through unchanged, so a debugger stops at their cause.
    """

    world_size = 1

    def __init__(self, factory: WorkerFactory, device: str) -> None:
        # Nobody can connect from outside, and a single member needs no other address.
        port = free_port(LOOPBACK)
        placement = Placement(rank=0, world_size=1, local_rank=0, master_addr=LOOPBACK, master_port=port, device=device)
        with ExitStack() as environment:
            environment.enter_context(environment_set(process_environment(placement, local_world_size=1)))
            self._worker: Any = factory(placement)
            self._environment = environment.pop_all()

    def all(self, method: str, *args: Any) -> list[Any]:
        """Call the worker and return its result as a list of one."""
        assert self._worker is not None, "the group was shut down"
        return [getattr(self._worker, method)(*args)]

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the worker with the only tuple of ``arguments``."""
        (only_arguments,) = arguments
        return self.all(method, *only_arguments)

    def shutdown(self) -> None:
        """Close the worker, if it has a ``close``, and drop it."""
        worker, self._worker = self._worker, None
        with self._environment:
            if hasattr(worker, "close"):
                worker.close()


# The workers as the driver calls them: each call is a timed phase, and its memory is recorded.


GEN_WAITING = "gen_waiting"
"""Seconds that workers wait for the slowest of them in the phase ``gen``, on average."""

OWN_PHASES = ("values", "update_critic", "reward")
"""Phases of a single role. Any other phase of its group, such as the start, gets the name of the role as a suffix."""


class TimedGroup:
    """A worker group whose calls are timed phases, together with the groups of roles that have devices of their own.

    Attributes:
        role: The only role of the group. None = it has every role without a group of its own.
        track: Count live bytes on a CPU in the calls that follow.
        figures: Peak bytes, budget and retries of the last call.
        busy_seconds: Seconds in calls since the last step, for a group on devices of its own.
    """

    def __init__(
        self,
        group: WorkerGroup,
        clock: PhaseClock,
        in_process: bool,
        pools: Mapping[str, PoolGroup] = MappingProxyType({}),
        role: str | None = None,
    ) -> None:
        """Record the memory of the start.

        Args:
            group: The workers.
            clock: Measures the phases.
            in_process: The worker runs in this process, so its figures include the driver's resident memory.
            pools: Role -> its own group.
            role: As the attribute.
        """
        self.group = group
        self.clock = clock
        self.in_process = in_process
        self.role = role
        self.track = False
        self.figures = PassFigures()
        self.busy_seconds = 0.0
        started = self._combined(group.all("started"), "init")
        self._memories: dict[str, list[PhaseMemory]] = {started.name: [started]}
        if role is not None:
            self._add_span(started)
        self._pools = {name: TimedGroup(pool, clock, False, role=name) for name, pool in pools.items()}

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.group.world_size

    @property
    def pools(self) -> Sequence[TimedGroup]:
        """The groups of the roles that have devices of their own."""
        return tuple(self._pools.values())

    def of(self, role: str) -> TimedGroup:
        """Return the group that computes a role: its own, or this one."""
        return self._pools.get(role, self)

    @property
    def is_apart(self) -> bool:
        """Whether the group has devices of its own, and so computes while the policy's group does."""
        return self.role is not None

    def all(self, phase: str, method: Callable[Concatenate[Any, P], Result], *args: P.args, **options: P.kwargs) -> list[Result]:
        """Call a method on each worker with the same arguments, and return the results in rank order.

        ``method`` is one of the worker's class, such as ``Worker.generate``. Arguments travel by position.
        """
        assert not options, f"{method.__name__}: give {', '.join(options)} by position"
        return self.each(phase, method, [args] * self.world_size)

    def each(self, phase: str, method: Callable[..., Result], arguments: Sequence[tuple[Any, ...]]) -> list[Result]:
        """Call a method on each worker, with one tuple of arguments per rank, and return the results in rank order.

        With fewer tuples each one goes to several neighbouring ranks, which share its work and give equal results. The result of
        the first of them is returned.
        """
        return self.begin(phase, method, arguments).result()

    def begin(self, phase: str, method: Callable[..., Result], arguments: Sequence[tuple[Any, ...]]) -> Pending[list[Result]]:
        """Call a method as :meth:`each` does. A group with devices of its own computes until the result is asked for.

        Roles on shared devices compute one after another, so their results exist when this returns.
        """
        name, sharing = method.__name__, self.world_size // len(arguments)
        assert sharing * len(arguments) == self.world_size, (self.world_size, len(arguments))
        calls = [(phase, self.track, name, *args) for args in arguments for _ in range(sharing)]
        if self.role is not None:
            return self._begin_apart(phase, calls).then(lambda replies: [reply.value for reply in replies[::sharing]])
        with self.clock.phase(phase):
            replies = self.group.each("call", calls)
            if phase == "gen" and len(replies) > 1:
                # Only here do workers not meet in collectives, so only here does each show its own speed.
                seconds = [reply.memory.seconds for reply in replies]
                self.clock.add(GEN_WAITING, max(seconds) - sum(seconds) / len(seconds))
        self._note(phase, replies)
        return Pending.done([reply.value for reply in replies[::sharing]])

    def _begin_apart(self, phase: str, calls: Sequence[tuple[Any, ...]]) -> Pending[list[Any]]:
        """Begin calls on devices of the group's own. The clock also measures how long the driver waits for them in the end."""
        from verl_memopt.observe.phase import wall_time

        pool: Any = self.group
        began, pending = wall_time(), pool.begin("call", calls)

        def wait() -> list[Any]:
            waits_from = time.monotonic()
            replies = pending.result()
            self.clock.add(f"waiting_for_{self.role}", time.monotonic() - waits_from)
            memory = self._note(phase, replies)
            self.clock.add_span(memory.name, began, memory.seconds)
            self.busy_seconds += memory.seconds
            return replies

        return Pending(wait)

    def _add_span(self, ended: PhaseMemory) -> None:
        from verl_memopt.observe.phase import wall_time

        self.clock.add_span(ended.name, wall_time() - ended.seconds, ended.seconds)

    def _note(self, phase: str, replies: Sequence[Any]) -> PhaseMemory:
        memory = self._combined([reply.memory for reply in replies], phase)
        self._memories.setdefault(memory.name, []).append(memory)
        self.figures = _figures(replies)
        return memory

    def _combined(self, memories: Sequence[PhaseMemory], phase: str) -> PhaseMemory:
        own = self.role is None or phase in OWN_PHASES
        memory = _combined(memories, with_driver=self.role is None and not self.in_process)
        return memory if own else replace(memory, name=f"{phase}_{self.role}")

    def note_idle(self, step_seconds: float) -> None:
        """Record how long the devices of single roles were idle in a step of so many seconds."""
        for pool in self.pools:
            self.clock.add(f"idle_{pool.role}", max(step_seconds - pool.busy_seconds, 0.0))
            pool.busy_seconds = 0.0

    def take_memories(self) -> list[PhaseMemory]:
        """Return the memory of each phase since the last call, in the order in which the phases began.

        Phases of the groups of single roles follow those of this one.
        """
        memories = [_over_calls(calls) for calls in self._memories.values()]
        self._memories = {}
        return memories + [memory for pool in self.pools for memory in pool.take_memories()]


def _figures(replies: Sequence[Any]) -> PassFigures:
    peaks = [reply.memory.peak_allocated_bytes for reply in replies]
    budgets = [reply.budget_bytes for reply in replies]
    caps = [reply.cap_after_error for reply in replies if reply.cap_after_error is not None]
    return PassFigures(
        peak_bytes=None if None in peaks else max(peaks),
        budget_bytes=None if None in budgets else min(budgets),
        cap_after_error=min(caps, default=None),
        retries=sum(reply.retries for reply in replies),
    )


def _combined(memories: Sequence[PhaseMemory], with_driver: bool = False) -> PhaseMemory:
    # Imported here, as it brings torch: Ray imports this file in each worker process before the environment is set, from which
    # torch takes its threads and devices.
    from verl_memopt.observe.phase import combine, host_rss_bytes

    return combine(memories, host_rss_bytes() if with_driver else 0)


def _over_calls(calls: Sequence[PhaseMemory]) -> PhaseMemory:
    """Summarise successive calls of a phase: the largest peaks, summed times, and the live bytes at both ends."""
    from verl_memopt.observe.phase import COMPILE_FIGURES, sum_of_counted

    sums: dict[str, Any] = {name: sum_of_counted(calls, name) for name in COMPILE_FIGURES}
    fullest = max(calls, key=lambda call: call.peak_allocated_bytes or 0)
    return replace(
        _combined(calls),
        mean_peak_bytes=fullest.mean_peak_bytes,
        worst_rank=fullest.worst_rank,
        seconds=sum(call.seconds for call in calls),
        allocated_bytes=calls[-1].allocated_bytes,
        entered_bytes=calls[0].entered_bytes,
        host_rss_bytes=max(call.host_rss_bytes for call in calls),
        host_buffer_bytes=max(call.host_buffer_bytes for call in calls),
        **sums,
    )
