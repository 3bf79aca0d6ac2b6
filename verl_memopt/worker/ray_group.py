"""The workers of a run as Ray processes: one actor per device, on one or more nodes, in one or more pools.

If a member fails, the members of all pools are killed, because others may wait for it in a collective.

Each member sees all GPUs that Ray gave to its pool on its node, in the order of the local ranks. Its local rank is the index of
its own GPU, as under torchrun. The reason is in docs/decisions/workers_and_engine.md.
"""

from __future__ import annotations

import atexit
import gc
import logging
import math
import os
import pkgutil
import re
import signal
import sys
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_memopt.distributed.threads import THREADS, threads_for
from verl_memopt.errors import ConfigError, DeviceMemoryError, HostMemoryError, UserError, WorkerError
from verl_memopt.memory.critic_rules import own_pools
from verl_memopt.memory.knob import pool_of
from verl_memopt.run.process_tree import STOP_SIGNALS
from verl_memopt.run.processes import full_shared_memory, uncollected
from verl_memopt.worker.group import LOOPBACK, Pending, Placement, WorkerFactory, process_environment
from verl_memopt.worker.nodes import Home, compare_nodes, held_port, log_places, network_of, site, visible_devices
from verl_memopt.worker.ray_cluster import Connection, Request, release, reserve

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

logger = logging.getLogger(__name__)

SLOW_SECONDS, SLOW_TIMES = 5.0, 2.0
"""A worker is slow if the others have waited for it longer than SLOW_SECONDS, and SLOW_TIMES times as long as they needed
themselves. If a pool needs SLOW_TIMES times as long as its longest call so far, all its members without a result are slow."""

SETTLE_SECONDS = 1.0
"""Wait after a first failure for further ones: a broken connection is often reported before the death that caused it."""

SLICE_SECONDS = 1.0
"""Time between two checks that Ray itself is still alive, while calls run."""

KILL_SECONDS = 10.0
"""Longest wait for the end of killed members."""

START = "start"
"""Name, in messages, of the calls that start and build workers."""


class Member:
    """The process of one worker. It starts without heavy imports, so that they see the environment variables set later."""

    def __init__(self, name: str) -> None:
        # At the end, so that a file there never replaces a module of Python. See _job_config in ray_cluster.py.
        sys.path.append(os.getcwd())
        # Ignore signals that stop a run: the driver acts on them, and this process ends with the driver. A handler and not
        # SIG_IGN, because programs that this process starts would inherit SIG_IGN.
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._name = name
        self._worker: Any = None

    def __repr__(self) -> str:
        # Ray prints it before each line that the worker logs.
        return self._name

    def home(self) -> Home:
        import ray

        here = ray.get_runtime_context().get_node_id()
        # Ask the cluster. In a worker's process Ray's get_node_ip_address guesses from the route to the internet.
        (address,) = (node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
        gpus = tuple(map(str, ray.get_gpu_ids()))
        for name, value in network_of(address).items():
            # Keep variables that the user set before starting Ray on this node: the user knows its network.
            os.environ.setdefault(name, value)
        return Home(os.getpid(), here, address, held_port(address), gpus)

    def site(self, paths: Mapping[str, str], probe: str) -> dict[str, str]:
        return site(paths, probe)

    def prepare(self, environment: dict[str, str], ahead: Sequence[str]) -> None:
        """Set the environment variables, then call the function named ``ahead[0]`` with the rest of ``ahead`` as arguments."""
        os.environ.update(environment)
        if ahead:
            with uncollected():
                pkgutil.resolve_name(ahead[0])(*ahead[1:])
            gc.freeze()  # imported modules stay for ever, so later collections need not search them

    def build(self, pickled_factory: bytes, placement: Placement) -> None:
        from ray import cloudpickle

        # Unpickled here and not by Ray, because this imports modules that read the environment variables.
        self._worker = cloudpickle.loads(pickled_factory)(placement)

    def call(self, method: str, *args: Any) -> Any:
        if method == "close":
            # The process is killed next, which frees its memory. Skip vLLM's garbage collections, which take 1.5 seconds.
            vars(gc)["collect"] = lambda generation=2: 0
        return getattr(self._worker, method)(*args)


def start_ray_group(
    requests: Request | Sequence[Request],
    device: str,
    timeout_seconds: float,
    ray_init: Mapping[str, Any],
    num_threads: int,
    ahead: Sequence[str] = (),
    patience_seconds: float = math.inf,
) -> RayGroup:
    """Start the requested processes, with ranks in the order of the nodes. :meth:`RayGroup.build` builds the workers in them.

    After an error everything that this function started is ended.

    Args:
        requests: First the request for the policy's pool, then one per role with its own devices.
        device: Kind of device, as :func:`verl_memopt.distributed.device.resolve_device` names it.
        timeout_seconds: Longest wait for placement, and then for the start of the processes.
        ray_init: Arguments of ray.init. Used if this process is not connected to Ray yet.
        num_threads: OMP_NUM_THREADS of each worker.
        ahead: A function that each process of the policy calls before its worker is built, such as slow imports:
            ``module:function`` and its arguments.
        patience_seconds: Longest wait for a process of this machine that a signal has stopped.

    Raises:
        ConfigError: The cluster is too small for the group, or Ray rejects ``ray_init``.
        WorkerError: The cluster had no free room in time.
    """
    wanted = [requests] if isinstance(requests, Request) else list(requests)
    group = RayGroup(Connection(ray_init, *wanted, patience_seconds=patience_seconds), device)
    try:
        group.start(wanted, timeout_seconds)
        # Does not wait: the imports run while the driver reads its data.
        group.prepare(num_threads, ahead)
    except BaseException:
        group.shutdown()
        raise
    return group


def group_of(settings: Settings, device: str, ahead: Sequence[str] = (), pools: Sequence[str] | None = None) -> RayGroup:
    """Start the processes of a run as the settings say. ``ahead`` and errors are as in :func:`start_ray_group`.

    ``pools`` names the roles with their own devices. None = the settings name them.
    """
    trainer, ray, gpu = settings.trainer, settings.ray_kwargs, device != "cpu"
    requests = [Request(trainer.nnodes, trainer.n_gpus_per_node, gpu)]
    for name in own_pools(settings) if pools is None else pools:
        section = pool_of(settings, name)
        requests.append(Request(section.nnodes, section.n_gpus_per_node, gpu, name))
    num_threads = threads_for(sum(request.devices_per_node for request in requests))
    patience = settings.actor_rollout_ref.nccl_timeout
    return start_ray_group(requests, device, trainer.ray_wait_register_center_timeout, ray.ray_init, num_threads, ahead, patience)


@dataclass(eq=False)
class Calls:
    """Running calls of one pool, one per member. ``pending`` maps a call to its rank, ``results`` a rank to its result."""

    pool: Pool
    pending: dict[Any, int]
    name: str
    """Name in messages: the phase, or the method outside of phases."""
    results: dict[int, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    """When the last result arrived."""
    told: bool = False

    def ended(self) -> list[Any]:
        return [self.results[rank] for rank in range(len(self.results))]


@dataclass(eq=False)
class Pool:
    group: RayGroup
    request: Request
    members: list[Any] = field(default_factory=list)
    homes: list[Home] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    longest: dict[str, float] = field(default_factory=dict)
    """Name of calls -> seconds of the longest one so far."""

    @property
    def world_size(self) -> int:
        return self.request.nnodes * self.request.devices_per_node

    @property
    def is_own(self) -> bool:
        return self.request.section != "trainer"

    def name(self, rank: int) -> str:
        return f"{self.request.section} worker {rank}" if self.is_own else f"worker {rank}"

    def where(self, rank: int) -> str:
        return f"{self.name(rank)} ({self.homes[rank]})" if self.homes else self.name(rank)

    def all(self, method: str, *args: Any) -> list[Any]:
        return self.group.wait(self.group.begin(self, [member.call.remote(method, *args) for member in self.members], method))

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self.begin(method, arguments).result()

    def begin(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Pending[list[Any]]:
        pairs = zip(self.members, arguments, strict=True)
        made = [member.call.remote(method, *own) for member, own in pairs]
        calls = self.group.begin(self, made, str(arguments[0][0]) if method == "call" else method)
        return Pending(lambda: self.group.wait(calls))

    def shutdown(self) -> None:
        self.group.shutdown()


class RayGroup:
    """All pools of a run. :func:`start_ray_group` creates it. Its own calls go to the first pool, which is the policy's."""

    def __init__(self, connection: Connection, device: str) -> None:
        self._device = device
        self._connection = connection
        self._all: list[Pool] = []
        self._under_way: list[Calls] = []
        self._preparing: list[Calls] = []
        self._room: list[Any] = []
        atexit.register(self.shutdown)

    @property
    def world_size(self) -> int:
        return self._all[0].world_size

    @property
    def homes(self) -> list[Home]:
        return [home for pool in self._all for home in pool.homes]

    @property
    def pools(self) -> dict[str, Pool]:
        return {pool.request.section: pool for pool in self._all if pool.is_own}

    def start(self, requests: Sequence[Request], timeout_seconds: float) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        rooms = reserve(requests, timeout_seconds)
        self._room = [room for own in rooms for room in own]
        self._all = [Pool(self, request) for request in requests]
        for pool, own in zip(self._all, rooms, strict=True):
            for room in own:
                for bundle in range(pool.request.devices_per_node):
                    options = ray.remote(Member).options(
                        num_cpus=1,
                        num_gpus=1 if pool.request.gpu else 0,
                        # Workers meet in collectives, so each must run its calls one at a time and in order.
                        max_concurrency=1,
                        scheduling_strategy=PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=bundle),
                    )
                    pool.members.append(options.remote(pool.name(len(pool.members))))
        asked = [self.begin(pool, [member.home.remote() for member in pool.members], START) for pool in self._all]
        for pool, calls in zip(self._all, asked, strict=True):
            pool.homes = self.wait(calls, timeout_seconds)
        # From now on :meth:`wait` also notices a stopped process and a silent node.
        self._connection.watch(self.homes)

    def prepare(self, num_threads: int, ahead: Sequence[str]) -> None:
        for pool in self._all:
            made, nodes = [], [home.node for home in pool.homes]
            # On one node use the loopback address: no firewall blocks it, and nobody can connect from outside.
            address = LOOPBACK if len(set(nodes)) == 1 else pool.homes[0].address
            for rank, member in enumerate(pool.members):
                local_rank = nodes[:rank].count(nodes[rank])
                placement = Placement(rank, pool.world_size, local_rank, address, pool.homes[0].port, self._device)
                environment = process_environment(placement, nodes.count(nodes[rank]))
                environment |= {THREADS: str(num_threads)}
                environment |= visible_devices(pool.homes, rank, self._device)
                pool.placements.append(placement)
                made.append(member.prepare.remote(environment, () if pool.is_own else ahead))
            self._preparing.append(self.begin(pool, made, START))

    def check_nodes(self, paths: Mapping[str, str], run_dir: Path) -> None:
        import ray

        first, here = self._all[0], ray.get_runtime_context().get_node_id()
        members = [member for pool in self._all for member in pool.members]

        def ask(places: Sequence[int], probe: str) -> list[dict[str, str]]:
            return self.wait(self.begin(first, [members[place].site.remote(paths, probe) for place in places], START))

        log_places({pool.request.section if pool.is_own else "policy": pool.homes for pool in self._all}, here)
        compare_nodes(self.homes, paths, run_dir, here, ask)

    def build(self, factory: WorkerFactory, pool_factories: Mapping[str, WorkerFactory] | None = None) -> RayGroup:
        """Build the worker of each process, and return the group. Workers may run collectives while they are built.

        ``pool_factories`` maps the section of a pool to the factory of its workers.

        Raises:
            WorkerError: A worker failed while it was built. After any error the group is shut down.
            UserError: The factory raised this error.
        """
        from ray import cloudpickle

        try:
            for calls in self._preparing:
                self.wait(calls)
            building = []
            for pool in self._all:
                pickled = cloudpickle.dumps((pool_factories or {})[pool.request.section] if pool.is_own else factory)
                places = zip(pool.members, pool.placements, strict=True)
                building.append(self.begin(pool, [member.build.remote(pickled, place) for member, place in places], START))
            for calls in building:
                self.wait(calls)
        except BaseException:
            self.shutdown()
            raise
        return self

    def all(self, method: str, *args: Any) -> list[Any]:
        return self._all[0].all(method, *args)

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._all[0].each(method, arguments)

    def write_timeline(self, path: str) -> None:
        import ray

        try:
            ray.timeline(filename=path)
        except OSError as error:
            raise ConfigError(
                f"ray_kwargs.timeline_json_file={path}: cannot be written ({error.strerror}). Set another path."
            ) from error

    def shutdown(self) -> None:
        import ray

        # The exit hook would keep the group, and all that it holds, alive.
        atexit.unregister(self.shutdown)
        if ray.is_initialized() and not self._connection.is_lost:
            self._kill_members()
            release(self._room)
        self._drop_members()
        self._room = []
        self._connection.close()

    def begin(self, pool: Pool, made: Sequence[Any], name: str) -> Calls:
        assert made, "the group was shut down, or ended with an earlier error"
        calls = Calls(pool, {call: rank for rank, call in enumerate(made)}, name)
        self._under_way.append(calls)
        return calls

    def wait(self, calls: Calls, timeout_seconds: float | None = None) -> list[Any]:
        """Wait for ``calls``, or for the first failure in any pool. A failure kills all members and is then raised."""
        import ray

        failures: dict[tuple[Calls, int], ray.exceptions.RayError] = {}
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while calls.pending or failures:
            # Wait for the calls of all pools, because any failure ends the run.
            pending = {call: batch for batch in self._under_way for call in batch.pending}
            if not pending:
                break
            done, _ = ray.wait(list(pending), timeout=SETTLE_SECONDS if failures else SLICE_SECONDS)
            lost = self._connection.lost()
            if lost is not None:
                raise self._lost(lost)
            stopped = self._stopped(self._connection.stopped_for_long())
            if stopped is not None and not failures:
                self._kill_members()
                raise WorkerError(stopped)
            for batch in self._under_way:
                _name_slow(batch)
            if not done and not failures and (deadline is None or time.monotonic() < deadline):
                continue
            if not done:
                break
            batch = pending[done[0]]
            rank, batch.heard = batch.pending.pop(done[0]), time.monotonic()
            try:
                batch.results[rank] = ray.get(done[0])
            except ray.exceptions.RayError as failure:
                failures[batch, rank] = failure
            if not batch.pending:
                self._under_way.remove(batch)
                batch.pool.longest[batch.name] = max(batch.heard - batch.begun, batch.pool.longest.get(batch.name, 0.0))
        if not failures and not calls.pending:
            return calls.ended()
        cause = self._cause(failures) if failures else None
        self._kill_members()
        if cause is None:
            raise WorkerError(
                f"trainer.ray_wait_register_center_timeout={timeout_seconds}: {calls.pool.request.section}'s workers "
                f"{sorted(calls.pending.values())} did not start in that time. Raise it, or see Ray's logs in "
                f"{self._connection.logs()}."
            )
        raise cause

    def _cause(self, failures: dict[tuple[Calls, int], Any]) -> UserError:
        """Choose the error to raise for several failures.

        The order is: a lost node, a dead member, a member that a signal has stopped, an error for the user. The first three
        explain broken connections and timeouts of other members.
        """
        import ray

        silent = self._connection.silent_node()
        if silent is not None:
            return self._lost(silent)
        deaths = [member for member, failure in failures.items() if not isinstance(failure, ray.exceptions.RayTaskError)]
        user_errors = [
            (member, failure.cause)
            for member, failure in failures.items()
            if member not in deaths and isinstance(failure.cause, UserError)
        ]
        calls, rank = (deaths + list(failures))[0]
        pool, text = calls.pool, str(failures[calls, rank])
        if deaths:
            return WorkerError(
                f"{pool.where(rank)} died in {calls.name}: {_reason(text)} {DEATH_HINT} {self._connection.logs()}. "
                f"{full_shared_memory()}".rstrip()
            )
        stopped = self._stopped(self._connection.stopped_now())
        if stopped is not None:
            return WorkerError(f"{stopped} {pool.name(rank)} said: {_plain(text).splitlines()[-1]}")
        if user_errors:
            (calls, rank), error = user_errors[0]
            pool = calls.pool
            # Name the worker that ran out of memory, because each pool has its own settings.
            if isinstance(error, DeviceMemoryError | HostMemoryError) and pool.is_own:
                error.args = (f"{pool.where(rank)}: {error.args[0]}", *error.args[1:])
            return error
        return WorkerError(f"{pool.where(rank)} raised an error in {calls.name}. Its traceback:\n{_plain(text)}")

    def _stopped(self, pids: Container[int]) -> str | None:
        for calls in self._under_way:
            for rank in calls.pending.values():
                if calls.pool.homes and calls.pool.homes[rank].pid in pids:
                    return (
                        f"{calls.pool.where(rank)} was stopped by a signal in {calls.name}, and the others wait no longer than "
                        "actor_rollout_ref.nccl_timeout seconds for it. The same command resumes from the last checkpoint. Next "
                        "time, send the process kill -CONT before that time is over, or raise the key."
                    )
        return None

    def _lost(self, reason: str) -> WorkerError:
        self._connection.kill_watched()
        self._drop_members()
        return WorkerError(
            f"{reason}, and the run cannot go on without it. The same command resumes from the last checkpoint. "
            f"See Ray's logs in {self._connection.logs()}."
        )

    def _kill_members(self) -> None:
        import ray

        # A call to a killed actor fails once the actor is gone, so waiting for the call means waiting for the process to end.
        members = [member for pool in self._all for member in pool.members]
        last_calls = [member.home.remote() for member in members]
        for member in members:
            ray.kill(member)
        if last_calls:
            ray.wait(last_calls, num_returns=len(last_calls), timeout=KILL_SECONDS)
        self._drop_members()

    def _drop_members(self) -> None:
        self._under_way = []
        for pool in self._all:
            pool.members = []


def _name_slow(calls: Calls) -> None:
    """Warn once about slow calls: of members that the others of the pool wait for, or of a pool that is slower than before."""
    waited, took, pool = time.monotonic() - calls.heard, calls.heard - calls.begun, calls.pool
    if calls.told or not pool.homes or not calls.pending or waited <= SLOW_SECONDS:
        return
    # The message has node and pid of the members, so that the user can look there.
    slow = ", ".join(map(pool.where, calls.pending.values()))
    if calls.results and waited > SLOW_TIMES * took:
        calls.told = True
        logger.warning("the other workers ended after %.1f seconds, and now wait for %s", took, slow)
        return
    before = pool.longest.get(calls.name, 0.0)
    if pool.is_own and calls.name != START and before and waited > SLOW_TIMES * before:
        calls.told = True
        logger.warning("%s took %.1f seconds at most so far, and has not ended after %.1f: %s", calls.name, before, waited, slow)


DEATH_HINT = (
    "A process that ends without a traceback was usually killed for its memory use: compare the host memory of the run with the "
    "machine's, lower the size of micro-batches or of the KV cache, and see Ray's logs in"
)


def _reason(text: str) -> str:
    match = re.search(r"Worker exit type: .*?(?= Some common causes|$)", _plain(text), re.DOTALL)
    # Keep the facts in Ray's text, and drop its general advice.
    return match.group() if match else _plain(text)


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).strip()
