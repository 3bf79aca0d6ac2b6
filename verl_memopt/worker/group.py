"""Groups of workers: in this process (``LocalGroup``) or in Ray's (``RayGroup``), with calls timed by ``TimedGroup``.

A group answers calls in rank order, wherever its members live.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import pkgutil
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from verl_memopt.errors import ConfigError, UserError, WorkerError
from verl_memopt.memory.token_budget import PassFigures
from verl_memopt.run.processes import uncollected
from verl_memopt.worker.ray_cluster import (
    STOP_SIGNALS,
    Connection,
    Home,
    Request,
    compare_nodes,
    environment_set,
    free_port,
    network_of,
    release,
    reserve,
    site,
    visible_devices,
)

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings
    from verl_memopt.observe.phase import PhaseClock, PhaseMemory

logger = logging.getLogger(__name__)


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


class WorkerGroup(Protocol):
    """Members that are called by method name, one call at a time, and that answer together."""

    world_size: int

    def all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
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
        """Set the environment variables and build the worker."""
        port = free_port(LOOPBACK)
        placement = Placement(rank=0, world_size=1, local_rank=0, master_addr=LOOPBACK, master_port=port, device=device)
        with ExitStack() as environment:
            environment.enter_context(environment_set(process_environment(placement, local_world_size=1)))
            self._worker: Any = factory(placement)
            self._environment = environment.pop_all()

    def all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the worker and return its result as a list of one."""
        assert self._worker is not None, "the group was shut down"
        return [getattr(self._worker, method)(*args, **kwargs)]

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
"""Time that workers wait in the phase ``gen`` for the slowest of them, on average."""

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

        ``in_process`` says that the worker runs in this process, so that its figures include the driver's resident memory.
        """
        self.group = group
        self.clock = clock
        self.in_process = in_process
        self.track = False
        self.figures = PassFigures()
        self._memories: dict[str, list[PhaseMemory]] = {"init": [_combined(group.all("started"), not in_process)]}

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.group.world_size

    def all(self, phase: str, method: Callable[Concatenate[Any, P], Result], *args: P.args, **options: P.kwargs) -> list[Result]:
        """Call a method on each worker with the same arguments, and return the results in rank order.

        ``method`` is one of the worker's class, such as ``Worker.generate``. Arguments travel by position.
        """
        assert not options, f"{method.__name__}: give {', '.join(options)} by position"
        return self.each(phase, method, [args] * self.world_size)

    def each(self, phase: str, method: Callable[..., Result], arguments: Sequence[tuple[Any, ...]]) -> list[Result]:
        """Call a method on each worker, with one tuple of arguments per rank, and return the results in rank order.

        With fewer tuples each one goes to as many neighbouring ranks, which share its work and answer alike. The answer of the
        first of them is returned.
        """
        name, each = method.__name__, self.world_size // len(arguments)
        assert each * len(arguments) == self.world_size, (self.world_size, len(arguments))
        with self.clock.phase(phase):
            replies = self.group.each("call", [(phase, self.track, name, *args) for args in arguments for _ in range(each)])
            if phase == "gen" and len(replies) > 1:
                # Only here do workers not meet in collectives, so only here does each show its own speed.
                seconds = [reply.memory.seconds for reply in replies]
                self.clock.add(GEN_WAITING, max(seconds) - sum(seconds) / len(seconds))
        memory = _combined([reply.memory for reply in replies], not self.in_process)
        self._memories.setdefault(phase, []).append(memory)
        self.figures = _figures(replies)
        return [reply.value for reply in replies[::each]]

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


def _combined(memories: Sequence[PhaseMemory], with_driver: bool = False) -> PhaseMemory:
    # Imported here, as it brings torch: Ray imports this file in each worker process before the environment is set, from which
    # torch takes its threads and devices.
    from verl_memopt.observe.phase import combine, host_rss_bytes

    return combine(memories, host_rss_bytes() if with_driver else 0)


def _over_calls(calls: Sequence[PhaseMemory]) -> PhaseMemory:
    """Return the figures of a phase over its successive calls: the largest peaks, sums, and the live bytes at both ends."""
    from verl_memopt.observe.phase import COMPILE_FIGURES, sum_of_known

    sums: dict[str, Any] = {name: sum_of_known(calls, name) for name in COMPILE_FIGURES}
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


# A group of one Ray actor per device, on one node or many.
#
# A member that fails ends the group: other members may wait for it in a collective, so they are killed.
#
# Each member sees all GPUs that Ray gave to its group on its node, in the order of the local ranks. Its own GPU is the one of its
# local rank, as under torchrun. Why: docs/decisions/visible_devices.md.

SLOW_SECONDS, SLOW_TIMES = 5.0, 2.0
"""Workers are named as slow once the others have waited for them so long, and so many times what they took themselves."""

SETTLE_SECONDS = 1.0
"""Wait for further failures after the first: a broken connection is often reported before the death that caused it."""

SLICE_SECONDS = 1.0
"""Time between two checks that Ray itself is still alive, while calls run."""

KILL_SECONDS = 10.0
"""Longest time in which killed members must be gone."""


class Member:
    """The process of one worker. It starts empty, so that its environment is set before anything heavy is imported."""

    def __init__(self, rank: int) -> None:
        """Ignore the signals that stop a run, and look for modules in the working directory last."""
        # Last, so that a file there never stands for a module of Python; see _job_config in ray_cluster.py.
        sys.path.append(os.getcwd())
        # The driver decides what a signal to all processes of a run means, and this process ends with the driver. A handler,
        # not SIG_IGN: programs that this process starts then have the default actions.
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._rank = rank
        self._worker: Any = None

    def __repr__(self) -> str:
        """Return the name that Ray prints before each line that the worker logs."""
        return f"worker {self._rank}"

    def home(self) -> Home:
        """Return where this process runs."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        # Asked of the cluster. Ray's get_node_ip_address guesses in a worker's process, by a route to the internet.
        (address,) = (node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
        gpus = tuple(map(str, ray.get_gpu_ids()))
        for name, value in network_of(address).items():
            # What was set on a node before Ray started there is the wish of who knows its network.
            os.environ.setdefault(name, value)
        return Home(os.getpid(), here, address, free_port(""), gpus)

    def site(self, paths: Mapping[str, str], probe: str) -> dict[str, str]:
        """Return what this node has, as :func:`~verl_memopt.worker.ray_cluster.site` says."""
        return site(paths, probe)

    def prepare(self, environment: dict[str, str], ahead: Sequence[str]) -> None:
        """Set the environment variables, and call the function of this dotted name with these arguments."""
        os.environ.update(environment)
        if ahead:
            with uncollected():
                pkgutil.resolve_name(ahead[0])(*ahead[1:])
            gc.freeze()  # nothing of it ever goes, so no later collection needs to look through it

    def build(self, pickled_factory: bytes, placement: Placement) -> None:
        """Build the worker.

        The factory comes pickled, because unpickling it imports modules that read the environment.
        """
        from ray import cloudpickle

        self._worker = cloudpickle.loads(pickled_factory)(placement)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*args, **kwargs)


def start_ray_group(
    request: Request,
    device: str,
    timeout_seconds: float,
    ray_init: Mapping[str, Any],
    num_threads: int,
    ahead: Sequence[str] = (),
) -> RayGroup:
    """Return a group of the requested processes, with ranks in the order of the nodes. :meth:`RayGroup.build` makes the workers.

    If it fails, nothing that it started is left behind.

    Args:
        request: The processes.
        device: Kind of device, as :func:`verl_memopt.distributed.device.resolve_device` names it.
        timeout_seconds: Longest wait for placement, and again for the start of the processes.
        ray_init: Arguments of ray.init, where this process is not connected yet.
        num_threads: OMP_NUM_THREADS of each worker.
        ahead: What each process calls until its worker is built, such as its imports: ``module:function`` and arguments.

    Raises:
        ConfigError: The cluster is too small for the group, or Ray refuses ``ray_init``.
        WorkerError: The cluster had no room in time.
    """
    group = RayGroup(Connection(ray_init, request), device)
    try:
        group.start(request, timeout_seconds)
        group.prepare(num_threads, ahead)
    except BaseException:
        group.shutdown()
        raise
    return group


def group_of(settings: Settings, device: str, ahead: Sequence[str] = ()) -> RayGroup:
    """Return the group that the settings of a run ask for, without its workers. As :func:`start_ray_group`."""
    trainer, ray = settings.trainer, settings.ray_kwargs
    request = Request(trainer.nnodes, trainer.n_gpus_per_node, gpu=device != "cpu")
    wished = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, (os.cpu_count() or 1) // trainer.n_gpus_per_node)
    num_threads = int(wished) if wished.isdigit() and int(wished) else share
    return start_ray_group(request, device, trainer.ray_wait_register_center_timeout, ray.ray_init, num_threads, ahead)


class RayGroup:
    """One actor per device. Created by :func:`start_ray_group`."""

    def __init__(self, connection: Connection, device: str) -> None:
        """Start without members."""
        self.world_size = 0
        self._device = device
        self.homes: list[Home] = []
        self._connection = connection
        self._members: list[Any] = []
        self._placements: list[Placement] = []
        self._preparing: list[Any] = []
        self._room: list[Any] = []
        atexit.register(self.shutdown)

    def start(self, request: Request, timeout_seconds: float) -> None:
        """Reserve room, and start an empty process in each bundle."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._room = reserve(request, timeout_seconds)
        for room in self._room:
            for bundle in range(request.devices_per_node):
                options = ray.remote(Member).options(
                    num_cpus=1,
                    num_gpus=1 if request.gpu else 0,
                    # A worker meets others in collectives, so its calls must run one at a time and in their order.
                    max_concurrency=1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=bundle),
                )
                self._members.append(options.remote(len(self._members)))
        self.world_size = len(self._members)
        self.homes = self._gather([member.home.remote() for member in self._members], timeout_seconds)
        self._connection.watch(self.homes)

    def prepare(self, num_threads: int, ahead: Sequence[str]) -> None:
        """Tell each process its place and what to call ahead of its worker. Does not wait for that call; :meth:`build` does."""
        nodes = [home.node for home in self.homes]
        # On one node the loopback address needs no firewall to be open, and nobody else can connect.
        address = LOOPBACK if len(set(nodes)) == 1 else self.homes[0].address
        for rank, member in enumerate(self._members):
            local_rank = nodes[:rank].count(nodes[rank])
            placement = Placement(rank, self.world_size, local_rank, address, self.homes[0].port, self._device)
            environment = process_environment(placement, nodes.count(nodes[rank]))
            environment |= {"OMP_NUM_THREADS": str(num_threads)}
            environment |= visible_devices(self.homes, rank, self._device)
            self._placements.append(placement)
            self._preparing.append(member.prepare.remote(environment, ahead))

    def check_nodes(self, paths: Mapping[str, str], run_dir: Path) -> None:
        """Check that all nodes have what this machine has, as :func:`~verl_memopt.worker.ray_cluster.compare_nodes` says."""
        import ray

        def ask(ranks: Sequence[int], probe: str) -> list[dict[str, str]]:
            return self._gather([self._members[rank].site.remote(paths, probe) for rank in ranks])

        compare_nodes(self.homes, paths, run_dir, ray.get_runtime_context().get_node_id(), ask)

    def build(self, factory: WorkerFactory) -> RayGroup:
        """Build the worker of each process, and return the group. Workers may meet in collectives meanwhile.

        Raises:
            WorkerError: A worker failed while it was built. The group is gone then, as after any error.
            UserError: As the factory raised it.
        """
        from ray import cloudpickle

        pickled = cloudpickle.dumps(factory)
        try:
            self._gather(self._preparing)
            places = zip(self._members, self._placements, strict=True)
            self._gather([member.build.remote(pickled, place) for member, place in places])
        except BaseException:
            self.shutdown()
            raise
        return self

    def all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Make the same call on each member and return the results in rank order. As :meth:`WorkerGroup.all`."""
        return self._gather([member.call.remote(method, args, kwargs) for member in self._members])

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call member ``rank`` with ``arguments[rank]``. As :meth:`WorkerGroup.each`."""
        calls = zip(self._members, arguments, strict=True)
        return self._gather([member.call.remote(method, tuple(own), {}) for member, own in calls])

    def write_timeline(self, path: str) -> None:
        """Write Ray's record of its tasks as a Chrome trace.

        Raises:
            ConfigError: The file cannot be written.
        """
        import ray

        try:
            ray.timeline(filename=path)
        except OSError as error:
            raise ConfigError(
                f"ray_kwargs.timeline_json_file={path}: cannot be written ({error.strerror}). Set another path."
            ) from error

    def shutdown(self) -> None:
        """Kill the members, release their room, and stop Ray if this group started it. May be called again."""
        import ray

        atexit.unregister(self.shutdown)
        if ray.is_initialized() and not self._connection.is_lost:
            self._kill_members()
            release(self._room)
        self._members, self._room = [], []
        self._connection.close()

    def _gather(self, calls: list[Any], timeout_seconds: float | None = None) -> list[Any]:
        """Wait for all calls, or for the first that fails. Then kill every member and raise its error."""
        import ray

        assert calls, "the group was shut down, or ended with an earlier error"
        results: dict[int, Any] = {}
        failures: dict[int, ray.exceptions.RayError] = {}
        pending = {call: rank for rank, call in enumerate(calls)}
        begun = heard = time.monotonic()
        deadline = None if timeout_seconds is None else begun + timeout_seconds
        told = False
        while pending:
            done, _ = ray.wait(list(pending), timeout=SETTLE_SECONDS if failures else SLICE_SECONDS)
            lost = self._connection.lost()
            if lost is not None:
                raise self._lost(lost)
            if done:
                heard = time.monotonic()
            waited, took = time.monotonic() - heard, heard - begun
            if self.homes and results and not told and waited > max(SLOW_SECONDS, SLOW_TIMES * took):
                told = True
                slow = ", ".join(f"worker {rank} ({self.homes[rank]})" for rank in pending.values())
                logger.warning("the others were done after %.1f seconds, and wait for %s", took, slow)
            if not done and not failures and (deadline is None or time.monotonic() < deadline):
                continue
            if not done:
                break
            rank = pending.pop(done[0])
            try:
                results[rank] = ray.get(done[0])
            except ray.exceptions.RayError as failure:
                failures[rank] = failure
        if len(results) == len(calls):
            return [results[rank] for rank in range(len(calls))]
        self._kill_members()
        if not failures:
            raise WorkerError(
                f"trainer.ray_wait_register_center_timeout={timeout_seconds}: workers {sorted(pending.values())} did not start "
                f"in that time. Raise it, or see Ray's logs in {self._connection.logs()}."
            )
        raise self._cause(failures)

    def _cause(self, failures: dict[int, Any]) -> UserError:
        """Return the error to raise for several failures.

        A node that is gone comes first, and then a death: they explain the broken connections of its peers; then an error
        for the user.
        """
        import ray

        silent = self._connection.silent_node()
        if silent is not None:
            return self._lost(silent)
        deaths = [rank for rank, failure in failures.items() if not isinstance(failure, ray.exceptions.RayTaskError)]
        user_errors = [
            failure.cause for rank, failure in failures.items() if rank not in deaths and isinstance(failure.cause, UserError)
        ]
        if user_errors and not deaths:
            return user_errors[0]
        rank = (deaths + list(failures))[0]
        where = f"worker {rank} ({self.homes[rank]})" if self.homes else f"worker {rank}"
        if deaths:
            return WorkerError(f"{where} died: {_reason(str(failures[rank]))} {DEATH_HINT} {self._connection.logs()}.")
        return WorkerError(f"{where} raised an error. Its traceback:\n{_plain(str(failures[rank]))}")

    def _lost(self, reason: str) -> WorkerError:
        """Drop the members, which end with the connection, and return the error to raise."""
        self._members = []
        return WorkerError(
            f"{reason}, and the run cannot go on without it. The same command resumes from the last checkpoint. "
            f"See Ray's logs in {self._connection.logs()}."
        )

    def _kill_members(self) -> None:
        import ray

        # A call to a killed actor fails once the actor is gone, so waiting for the call means waiting for the process to end.
        last_calls = [member.home.remote() for member in self._members]
        for member in self._members:
            ray.kill(member)
        if last_calls:
            ray.wait(last_calls, num_returns=len(last_calls), timeout=KILL_SECONDS)
        self._members = []


DEATH_HINT = (
    "A process that ends without a traceback was usually killed for its memory use: compare the host memory of the run with the "
    "machine's, lower the micro-batch or the KV cache, and see Ray's logs in"
)


def _reason(text: str) -> str:
    """Return Ray's facts about a death, without its general advice."""
    match = re.search(r"Worker exit type: .*?(?= Some common causes|$)", _plain(text), re.DOTALL)
    return match.group() if match else _plain(text)


def _plain(text: str) -> str:
    """Remove terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text).strip()
