"""Groups of workers: their interface, a group of one worker in this process, and a group that times its calls.

Every group returns results in rank order, wherever its members run. The groups of Ray processes are in
:mod:`verl_memopt.worker.ray_group`.
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
    """Rank of the member on its node. It is also the index of its device among the devices that its process sees."""
    master_addr: str
    """Address of rank 0's node, to which all ranks of a process group connect."""
    master_port: int
    """A port of that node. It was free when the group started."""
    device: str
    """Kind of device, as :func:`verl_memopt.distributed.device.resolve_device` names it."""


WorkerFactory = Callable[[Placement], Any]
"""Builds a worker inside the process that will hold it. Must be picklable."""


class Pending(Generic[Result]):
    """A result that another process may still compute. ``wait`` blocks until the result exists, and is called only once."""

    def __init__(self, wait: Callable[[], Result]) -> None:
        self._wait = wait

    @classmethod
    def done(cls, result: Result) -> Pending[Result]:
        """Wrap a result that exists already."""
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
        """Apply ``use`` to the result: now if the result exists, otherwise in the first call of :meth:`result`."""
        if "_result" in vars(self):
            return Pending.done(use(self._result))
        return Pending(lambda: use(self.result()))


class WorkerGroup(Protocol):
    """Calls a method by its name on all members, and waits for all results. Calls run one after another."""

    @property
    def world_size(self) -> int:
        """Number of members."""

    def all(self, method: str, *args: Any) -> list[Any]:
        """Make the same call on each member and return the results in rank order.

        After an error the group cannot be used any more.

        Raises:
            UserError: A member raised this error.
            WorkerError: A member raised another error. The message has its traceback. :class:`LocalGroup` raises the member's
                own error instead.
        """

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call each member with ``arguments[rank]`` and return the results in rank order. Errors are as in :meth:`all`."""

    def shutdown(self) -> None:
        """End the members and everything that was started for them. A second call does nothing."""


class PoolGroup(WorkerGroup, Protocol):
    """A group with its own devices. It computes at the same time as other groups."""

    def begin(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Pending[list[Any]]:
        """Call each member with ``arguments[rank]``, and return without waiting for the results."""


def process_environment(placement: Placement, local_world_size: int) -> dict[str, str]:
    """Return the environment variables from which torch.distributed and vLLM read the member's ranks and addresses."""
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
    """One worker in the driver's process. Its environment variables stay set until :meth:`shutdown`.

    Errors of the worker are raised unchanged, so a debugger stops at their cause.
    """

    world_size = 1

    def __init__(self, factory: WorkerFactory, device: str) -> None:
        # A single member connects only to itself. Nobody can reach a loopback address from outside.
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


# The group that the driver uses: each call is a timed phase, and the memory of the phase is recorded.


GEN_WAITING = "gen_waiting"
"""Seconds that a worker waits in the phase ``gen`` for the slowest worker, averaged over workers."""

OWN_PHASES = ("values", "update_critic", "reward")
"""Phases that only one role has. Other phases of a role's own group, such as ``init``, get the role's name as a suffix."""


class TimedGroup:
    """A worker group that times each call as a phase. It also holds the groups of the roles that have their own devices.

    Attributes:
        role: The role of a group with its own devices. None = this group has all other roles.
        track: Count live bytes on a CPU in the next calls.
        figures: Peak bytes, memory budget and out-of-memory retries of the last call.
        busy_seconds: Seconds spent in calls since the last step. Counted only for a group with its own devices.
    """

    def __init__(
        self,
        group: WorkerGroup,
        clock: PhaseClock,
        in_process: bool,
        pools: Mapping[str, PoolGroup] = MappingProxyType({}),
        role: str | None = None,
    ) -> None:
        """Record the memory that the workers measured at their start.

        Args:
            group: The workers.
            clock: Measures the phases.
            in_process: The worker runs in this process, so its figures include the driver's resident memory.
            pools: Role -> the group with this role's own devices.
            role: The attribute ``role``.
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
        """The groups of the roles that have their own devices."""
        return tuple(self._pools.values())

    def of(self, role: str) -> TimedGroup:
        """Return the group that computes ``role``: the role's own group if there is one, otherwise this group."""
        return self._pools.get(role, self)

    @property
    def is_apart(self) -> bool:
        """Whether the group has its own devices. If so, it computes at the same time as the policy's group."""
        return self.role is not None

    def all(self, phase: str, method: Callable[Concatenate[Any, P], Result], *args: P.args, **options: P.kwargs) -> list[Result]:
        """Call a method on each worker with the same arguments, and return the results in rank order.

        ``method`` is a function of the worker's class, such as ``Worker.generate``. All arguments must be positional.
        """
        assert not options, f"{method.__name__}: give {', '.join(options)} by position"
        return self.each(phase, method, [args] * self.world_size)

    def each(self, phase: str, method: Callable[..., Result], arguments: Sequence[tuple[Any, ...]]) -> list[Result]:
        """Call a method on each worker, with one tuple of arguments per rank, and return the results in rank order.

        If there are fewer tuples than ranks, each tuple goes to several neighbouring ranks. These ranks share the work and give
        equal results, so only the result of the first of them is returned.
        """
        return self.begin(phase, method, arguments).result()

    def begin(self, phase: str, method: Callable[..., Result], arguments: Sequence[tuple[Any, ...]]) -> Pending[list[Result]]:
        """Call a method as :meth:`each` does. A group with its own devices does not wait for the results here.

        Roles that share devices compute one after another, so their results exist when this returns.
        """
        name, sharing = method.__name__, self.world_size // len(arguments)
        assert sharing * len(arguments) == self.world_size, (self.world_size, len(arguments))
        calls = [(phase, self.track, name, *args) for args in arguments for _ in range(sharing)]
        if self.role is not None:
            return self._begin_apart(phase, calls).then(lambda replies: [reply.value for reply in replies[::sharing]])
        with self.clock.phase(phase):
            replies = self.group.each("call", calls)
            if phase == "gen" and len(replies) > 1:
                # In all other phases workers wait for each other in collectives, so only here their own speeds differ.
                seconds = [reply.memory.seconds for reply in replies]
                self.clock.add(GEN_WAITING, max(seconds) - sum(seconds) / len(seconds))
        self._note(phase, replies)
        return Pending.done([reply.value for reply in replies[::sharing]])

    def _begin_apart(self, phase: str, calls: Sequence[tuple[Any, ...]]) -> Pending[list[Any]]:
        """Begin calls on the group's own devices. The clock also records how long the driver waits for their results."""
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
        """Record how long each role's own devices were idle during a step that took ``step_seconds``."""
        for pool in self.pools:
            self.clock.add(f"idle_{pool.role}", max(step_seconds - pool.busy_seconds, 0.0))
            pool.busy_seconds = 0.0

    def take_memories(self) -> list[PhaseMemory]:
        """Return the memory of each phase since this method was last called, in the order of their first results.

        The phases of this group come first. The phases of groups with their own devices follow.
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
    # Not imported at the top, because it imports torch, which reads its threads and devices from environment variables. Ray
    # imports this file in each worker process before these variables are set.
    from verl_memopt.observe.phase import combine, host_rss_bytes

    return combine(memories, host_rss_bytes() if with_driver else 0)


def _over_calls(calls: Sequence[PhaseMemory]) -> PhaseMemory:
    """Combine the calls of a phase: largest peaks, summed times, and live bytes before the first and after the last call."""
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
