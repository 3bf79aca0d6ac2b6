"""The Ray cluster of a group of workers: joined or started, with room reserved on it; and its nodes, compared."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import platform
import secrets
import shutil
import signal
import socket
import stat
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_memopt.distributed.file_records import digest_of
from verl_memopt.errors import ConfigError, WorkerError
from verl_memopt.run.processes import Guardian, descendants, is_alive, kill, wait_until_gone

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""Longest time in which a cluster must accept a connection."""

LOOK_SECONDS = 5.0
"""Time between two checks that a joined cluster still answers, and that no process is stopped."""

SILENT_SECONDS = 15.0
"""Time for which a node of a joined cluster may be silent."""

GONE_SECONDS = 5.0
"""Longest time in which killed processes must be gone."""

KEPT_SECONDS = 86_400
"""Age in seconds from which a session's folder is removed."""

HEADS = {"gcs_server": "head process (gcs_server)", "raylet": "node process (raylet)"}
"""Processes without which Ray cannot carry a run, by their process names."""

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

SOCKET_BYTES = 107
"""Longest path of a socket in bytes."""

ROOM = SOCKET_BYTES - len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.1")
"""Longest path of Ray's folder in bytes, below which Ray puts its sockets."""

LOCAL_CLUSTER: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 256 * 2**20}
"""Arguments of ray.init where it starts a cluster; ``ray_kwargs.ray_init`` wins over each. Beyond the shared memory for objects
Ray spills to disk; batches without padding are small."""


@dataclass(frozen=True)
class Request:
    """The room of a group: one CPU per device, and one GPU if the device is a GPU."""

    nnodes: int
    devices_per_node: int
    gpu: bool

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one member."""
        return {"CPU": 1.0, "GPU": 1.0} if self.gpu else {"CPU": 1.0}

    def __str__(self) -> str:
        """Return the settings behind the request and what they ask for."""
        node = " and ".join(f"{self.devices_per_node} {name}" for name in self.bundle)
        return f"trainer.nnodes={self.nnodes}, trainer.n_gpus_per_node={self.devices_per_node} needs {node} on each node"


class Connection:
    """This process's connection to Ray. It connects where there is no connection yet, and :meth:`close` undoes that.

    Raises:
        ConfigError: Ray refuses ``ray_init`` or its address, or several nodes are requested without an address.
    """

    def __init__(self, ray_init: Mapping[str, Any], request: Request) -> None:
        """Connect to Ray, or start it, unless this process is connected already."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        self._guardian: Guardian | None = None
        self._started: list[int] = []
        self._known: set[Any] = set()
        self._members: set[Any] = set()
        self._stopped: set[int] = set()
        self._heads: dict[int, str] = {}
        self._joined: str | None = None
        self._looked_at = time.monotonic()
        self._nodes: dict[str, int] = {}  # address -> port
        self._silent_since: float | None = None
        self.is_lost = False
        self._owned = not ray.is_initialized()
        if self._owned:
            self._connect({name: value for name, value in ray_init.items() if value is not None}, request)

    def close(self) -> None:
        """Disconnect, and stop the cluster if it was started here. May be called again."""
        if self._owned:
            if self.is_lost:
                # Its other processes would try to reach the dead one for a minute, and so would this process.
                self._kill_started()
                # Ray needs five seconds to notice that no process is left. Its own exit hook waits for this thread.
                threading.Thread(target=self._shutdown, name="ray-shutdown", daemon=True).start()
            else:
                self._shutdown()
        if self._guardian is not None:
            self._guardian.dismiss()
        self._owned, self._guardian = False, None

    def lost(self) -> str | None:
        """Return, in words, why Ray can no longer carry a run, or None while it can."""
        self._remember_started()
        for pid, name in self._heads.items():
            if not is_alive(pid):
                self.is_lost = True
                return f"Ray's {name} (pid {pid}) died"
        if time.monotonic() - self._looked_at <= LOOK_SECONDS:
            return None
        self._name_stopped()
        silent = None
        if self._joined is not None:
            reason = _does_not_answer(self._joined)
            if reason is not None:
                self.is_lost = True
                return f"nothing answers any more at ray_kwargs.ray_init.address={self._joined} ({reason})"
            silent = self._silent_for_long()
        self._looked_at = time.monotonic()
        return silent

    def watch(self, homes: Sequence[Home]) -> None:
        """Have :meth:`lost` see too whether a signal stops one of these processes here, and whether their nodes answer."""
        import psutil
        import ray

        here = ray.get_runtime_context().get_node_id()
        for home in homes:
            if home.node == here:
                with suppress(psutil.NoSuchProcess):  # its end is seen by the call that it does not answer
                    self._members.add(psutil.Process(home.pid))
        ports = {node["NodeID"]: node["NodeManagerPort"] for node in ray.nodes()}
        self._nodes = {home.address: ports[home.node] for home in homes}

    def silent_node(self) -> str | None:
        """Return, in words, which watched node does not answer now; None if all do."""
        for address, port in self._nodes.items():
            reason = _does_not_answer(f"{address}:{port}")
            if reason is not None:
                return f"node {address} does not answer ({reason})"
        return None

    def _silent_for_long(self) -> str | None:
        """Return which node has been silent for too long, and warn while it has not. Ray itself waits three times as long."""
        silent, now = self.silent_node(), time.monotonic()
        if silent is None:
            self._silent_since = None
            return None
        logger.warning(silent)
        self._silent_since = self._silent_since or now
        return silent if now - self._silent_since > SILENT_SECONDS else None

    def _name_stopped(self) -> None:
        """Log once each process that a signal has stopped: nothing else would tell why the run waits."""
        import psutil

        stopped = set()
        for process in self._known | self._members:
            with suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    stopped.add(process.pid)
        for pid in sorted(stopped - self._stopped):
            logger.warning("process %d of this run is stopped by a signal, and the run waits for it: kill -CONT %d", pid, pid)
        self._stopped = stopped

    def logs(self) -> str:
        """Return the folder of Ray's logs, or where to find it."""
        import ray

        node = ray._private.worker._global_node
        return "the folder session_latest/logs of Ray" if node is None else node.get_logs_dir_path()

    def _remember_started(self) -> None:
        """Record Ray's processes and their descendants while they can be found: an orphan cannot."""
        import psutil

        for parent in self._started:
            for pid in (parent, *descendants(parent)):
                with suppress(psutil.NoSuchProcess):
                    self._known.add(psutil.Process(pid))

    def _kill_started(self) -> None:
        """Kill Ray's processes that were started here, and their descendants. A process with a reused id is spared."""
        self._remember_started()
        running = [process.pid for process in self._known if process.is_running()]
        kill(running)
        wait_until_gone(running, GONE_SECONDS)

    def _shutdown(self) -> None:
        """Disconnect, and kill the cluster's processes if they were started here."""
        import ray

        self._remember_started()
        node = ray._private.worker._global_node
        if self._started and node is not None:
            # Ray would send SIGTERM, which every process of the run is started with blocked, and wait a second for each.
            node.kill_all_processes = lambda **_: self._kill_started()
        ray.shutdown()
        self._kill_started()

    def _connect(self, arguments: dict[str, Any], request: Request) -> None:
        """Join the cluster of ``address`` or RAY_ADDRESS, else start one on this machine."""
        import psutil
        import ray

        joins = arguments.get("address") not in (None, "local") or "RAY_ADDRESS" in os.environ
        if request.nnodes > 1 and not joins:
            raise ConfigError(
                f"trainer.nnodes={request.nnodes}: a cluster started here has one node. "
                "Start Ray on the nodes and set ray_kwargs.ray_init.address, or set trainer.nnodes=1."
            )
        if joins:
            address = str(arguments.get("address") or os.environ["RAY_ADDRESS"])
            # Ray itself would retry for a quarter of an hour.
            reason = _does_not_answer(address)
            if reason is not None:
                raise ConfigError(
                    f"ray_kwargs.ray_init.address={address}: nothing answers there ({reason}). Start Ray there "
                    "(ray start --head), or remove the key (and the variable RAY_ADDRESS) to start a cluster on this machine."
                )
        num_cpus = max(request.nnodes * request.devices_per_node, os.cpu_count() or 1)
        folder = arguments.get("_temp_dir") or ("" if joins else str(own_folder() / "ray"))
        defaults = {} if joins else {**LOCAL_CLUSTER, "num_cpus": num_cpus, "_temp_dir": folder}
        if folder:
            remove_old_sessions(Path(folder))
        self._guardian = None if joins else Guardian()
        before = set(psutil.Process().children())
        try:
            with stop_signals_blocked(), nullcontext() if joins else _one_node():
                ray.init(**{"logging_level": logging.ERROR, "job_config": _job_config(), **defaults, **arguments})
        except (ConnectionError, TypeError, ValueError, RuntimeError, OSError, ray.exceptions.RayError) as error:
            self.close()
            raise ConfigError(
                f"ray_kwargs.ray_init={arguments}: Ray could not start: {error}. Correct or remove the argument."
            ) from error
        self._joined = ray.get_runtime_context().gcs_address if joins else None
        self._started = [child.pid for child in psutil.Process().children() if child not in before]
        self._heads = {pid: name for pid in self._started if (name := HEADS.get(psutil.Process(pid).name()))}
        self._remember_started()
        # From here on the guardian follows parents only, so processes that others start later are left alone.
        if self._guardian is not None:
            self._guardian.all_started()


class _Fixed(list[str]):
    """Folders to which Ray adds none."""

    def extend(self, more: Iterable[str]) -> None: ...


def _job_config() -> Any:
    """Return a job whose workers do not look for modules in the driver's working directory and script folder first.

    Ray puts both in front of the standard library, where a file ``secrets.py`` would run. A worker appends its own directory.
    """
    from ray.job_config import JobConfig

    package = str(Path(__file__).parents[2])
    return JobConfig(_py_driver_sys_path=_Fixed([] if package == sysconfig.get_path("purelib") else [package]))


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block the signals that stop a run, in this thread and in the threads and processes that it starts, which inherit the mask.

    A scheduler sends SIGTERM to every process of a job, and Ray's would end before the run has saved. At the end the handlers of
    this process are restored, because Ray sets some.
    """
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        # Python allows signal.signal() in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
        # After the handlers are in place again, so that a signal that waits reaches the run's handler and not Ray's.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _one_node() -> Iterator[None]:
    """Restrict a cluster that starts in the body to this node: its loopback address and its own token.

    Ray turns 127.0.0.1 into the node's address, unless it is configured for a machine without clusters.
    """
    from ray._private import ray_constants

    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    could, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        with environment_set({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = could


@contextmanager
def environment_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in the body."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def remove_old_sessions(folder: Path) -> None:
    """Remove the sessions of Ray whose process has ended and that are older than a day. Until then, logs may be asked for."""
    for session in folder.glob("session_*_*"):
        pid = session.name.rpartition("_")[2]
        with suppress(OSError):
            is_old = time.time() - session.lstat().st_mtime > KEPT_SECONDS
            if is_old and pid.isdecimal() and not is_alive(int(pid)) and not session.is_symlink():
                shutil.rmtree(session, ignore_errors=True)


def own_folder() -> Path:
    """Return this user's own folder for Ray's sessions: sockets, logs and spilled objects. Its mode is 0700.

    It is ``verl_memopt_<user id>`` below RAY_TMPDIR, else below the system's folder for temporary files, else below /tmp if that
    folder's path is too long for sockets.

    Raises:
        ConfigError: RAY_TMPDIR is too long for a socket, or the folder belongs to someone else, or it cannot be created.
    """
    ray_tmpdir = os.environ.get("RAY_TMPDIR")
    name, parent = ("RAY_TMPDIR", Path(ray_tmpdir)) if ray_tmpdir else ("TMPDIR", Path(tempfile.gettempdir()))
    own = f"verl_memopt_{os.getuid()}"
    if not ray_tmpdir and len(os.fsencode(parent / own)) > ROOM:
        parent = Path("/tmp")
    folder = parent / own
    too_long = len(os.fsencode(folder)) - ROOM
    if too_long > 0:
        raise ConfigError(
            f"{name}={parent}: the path is {too_long} bytes too long. Ray puts sockets below it, whose paths have at most "
            f"{SOCKET_BYTES} bytes. Set RAY_TMPDIR to a shorter folder, for example RAY_TMPDIR=/tmp."
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"{name}={parent}: {folder} cannot be created ({error.strerror}). Set RAY_TMPDIR to a folder of yours."
        ) from error
    # lstat and not stat: a link that another user has put there must not lead elsewhere.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{name}={parent}: {folder} is not a folder of yours. Set RAY_TMPDIR to a folder of yours.")
    folder.chmod(0o700)
    return folder


def _does_not_answer(address: str) -> str | None:
    """Return why nothing can be reached at a ``host:port``. None if something answers, or for another form."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return str(error)
    return None


def reserve(request: Request, timeout_seconds: float) -> list[Any]:
    """Return one placement group per node, each with one bundle per device, all placed.

    Raises:
        ConfigError: The cluster is too small for the request.
        WorkerError: The cluster is large enough, but had no room for ``timeout_seconds``.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    _check_possible(request)
    bundles = [request.bundle] * request.devices_per_node
    groups = [placement_group(bundles, strategy="STRICT_PACK") for _ in range(request.nnodes)]
    placed, waiting = ray.wait([group.ready() for group in groups], num_returns=len(groups), timeout=timeout_seconds)
    if waiting:
        # Groups that were placed hold their room until they are removed, and the error would leave them behind.
        release(groups)
        free = _resources(ray.available_resources())
        raise WorkerError(
            f"trainer.ray_wait_register_center_timeout={timeout_seconds}: {request}; only {len(placed)} of {len(groups)} nodes "
            f"had room in that time, free now: {free} of {_resources(ray.cluster_resources())}. "
            "Wait for other jobs to end, raise the timeout, or lower trainer.n_gpus_per_node."
        )
    nodes, here = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}, ray.get_runtime_context().get_node_id()

    def place(group: Any) -> tuple[bool, str]:
        node = next(iter(placement_group_table(group)["bundles_to_node_id"].values()))
        return node != here, nodes[node]

    # Rank 0 reads and writes for all ranks, so it is on this machine where there is room.
    return sorted(groups, key=place)


def release(groups: list[Any]) -> None:
    """Release the reserved room."""
    from ray.util.placement_group import remove_placement_group

    for group in groups:
        remove_placement_group(group)


def _check_possible(request: Request) -> None:
    import ray

    nodes, count = [node["Resources"] for node in ray.nodes() if node["Alive"]], request.devices_per_node
    fits = [all(node.get(name, 0) >= count * each for name, each in request.bundle.items()) for node in nodes]
    if sum(fits) < request.nnodes:
        available = "; ".join(_resources(node) for node in nodes)
        raise ConfigError(
            f"{request}, but the cluster's nodes have: {available}. Lower trainer.n_gpus_per_node or trainer.nnodes, "
            "raise ray_kwargs.ray_init.num_cpus if CPUs are short, or join a larger cluster with ray_kwargs.ray_init.address."
        )


def _resources(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


# The nodes of a group: where each process runs, which devices it sees there, and whether all nodes have the same.


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The GPUs that a process sees, by index or UUID. CUDA reads it when it starts."""

RUN_FOLDER = "trainer.default_local_dir"


@dataclass(frozen=True)
class Home:
    """Where a member runs."""

    pid: int
    node: str
    address: str
    """Address of the node in the cluster."""
    port: int
    """A port that was free there when the member started."""
    gpus: tuple[str, ...] = ()
    """The GPUs that Ray assigned, by the names of the node; empty on a CPU."""

    def __str__(self) -> str:
        """Return where it is, for a message."""
        return f"pid {self.pid} on {self.address}"


def free_port(address: str) -> int:
    """Return a port that is free on this node now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def network_of(address: str) -> dict[str, str]:
    """Return the variables that tell gloo and vLLM which address of this node others reach this process at.

    Gloo would listen at the address of the host's name, which on Debian and Ubuntu is a loopback address (127.0.1.1).
    """
    import psutil

    interfaces = [name for name, known in psutil.net_if_addrs().items() if any(one.address == address for one in known)]
    return {"VLLM_HOST_IP": address} | ({"GLOO_SOCKET_IFNAME": interfaces[0]} if interfaces else {})


def visible_devices(homes: Sequence[Home], rank: int, device: str) -> dict[str, str]:
    """Return the variable that shows a member the GPUs of its group on its node, in the order of their local ranks.

    It shows none to workers that compute on a CPU. Empty where Ray gave no GPU to any.

    Raises:
        ConfigError: Ray assigned more or fewer GPUs than one to a member of the node.
    """
    if device == "cpu":  # Ray hides none from a process that requested none
        return {VISIBLE_DEVICES: ""}
    neighbours = [home.gpus for home in homes if home.node == homes[rank].node]
    if not any(neighbours):
        return {}
    if any(len(gpus) != 1 for gpus in neighbours):
        raise ConfigError(
            f"ray_kwargs.ray_init: Ray gave worker {rank} on {homes[rank].address} the GPUs {sorted(homes[rank].gpus)} instead "
            f"of one. Remove {VISIBLE_DEVICES} from its runtime_env. To use a part of a node's GPUs, set {VISIBLE_DEVICES} "
            "before Ray starts on that node."
        )
    return {VISIBLE_DEVICES: ",".join(gpu for (gpu,) in neighbours)}


def site(paths: Mapping[str, str], probe: str) -> dict[str, str]:
    """Return what this node has: versions of the software, the text of a file, and checksums of paths.

    The keys are the names that errors use for them. ``paths`` and ``probe`` are as in :func:`compare_nodes`.
    """
    import verl_memopt

    code = hashlib.sha256()
    for file in sorted(Path(verl_memopt.__file__).parent.rglob("*.py")):
        code.update(file.read_bytes())
    found = {"Python": platform.python_version(), "the code of verl_memopt": code.hexdigest()}
    for name in ("torch", "transformers", "vllm", "flash-attn"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with suppress(OSError):
        found[RUN_FOLDER] = Path(probe).read_text()
    for key, path in paths.items():
        with suppress(OSError):
            found[f"{key}={path}"] = digest_of(Path(path))
    return found


def compare_nodes(
    homes: Sequence[Home],
    paths: Mapping[str, str],
    run_dir: Path,
    here: str,
    ask: Callable[[Sequence[int], str], Sequence[Mapping[str, str]]],
) -> None:
    """Check that all nodes have the software, the run folder and the files that this machine has, and log who is where.

    Does nothing where all workers are on this machine, whose node is ``here``. ``paths``: setting -> file or folder that workers
    read. ``ask`` gets some ranks and the path of a file that the driver wrote, and returns the :func:`site` of each rank.

    Raises:
        ConfigError: A node has something else. The message names it and each difference.
    """
    nodes = [home.node for home in homes]
    if set(nodes) == {here}:
        return
    firsts = [rank for rank, node in enumerate(nodes) if nodes.index(node) == rank]
    for rank in firsts:
        machine = " (this machine)" if nodes[rank] == here else ""
        last = rank + nodes.count(nodes[rank]) - 1
        logger.info("%s: %s%s", f"ranks {rank} to {last}" if last > rank else f"rank {rank}", homes[rank].address, machine)
    elsewhere = [rank for rank in firsts if nodes[rank] != here]
    probe = run_dir / f".seen_by_all_nodes_{os.getpid()}"
    try:
        probe.write_text(secrets.token_hex(16))
        found, mine = ask(elsewhere, str(probe)), site(paths, str(probe))
    finally:
        probe.unlink(missing_ok=True)
    problems = [differences(mine, theirs, homes[rank].address, run_dir) for rank, theirs in zip(elsewhere, found, strict=True)]
    if any(problems):
        raise ConfigError(". ".join(filter(None, problems)) + ".")


def differences(mine: Mapping[str, str], theirs: Mapping[str, str], address: str, run_dir: Path) -> str:
    """Return what another node has that differs from this one, each with the way out; empty if nothing does."""
    problems = []
    for name in {**mine, **theirs}:
        one, other = mine.get(name), theirs.get(name)
        if one == other:
            continue
        if name == RUN_FOLDER:
            problems.append(f"it does not see {name}={run_dir}; set it to a folder that all nodes share, on NFS for example")
        elif "=" in name:
            state = "there is no such path" if other is None else "its contents are others"
            problems.append(f"{name}: {state}; give all nodes the same files at this path")
        elif name.startswith("the code"):
            problems.append(f"{name} is another; install the same version on all nodes")
        else:
            problems.append(
                f"it has {name} {other or 'not at all'}, and this machine {one or 'not at all'}; install the same on all nodes"
            )
    return f"node {address} differs from this machine: {'; '.join(problems)}" if problems else ""
