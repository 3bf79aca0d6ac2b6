"""The Ray cluster of a run's workers: joined or started, with room reserved on it."""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import signal
import socket
import stat
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_memopt.errors import ConfigError, WorkerError
from verl_memopt.run.process_tree import STOP_SIGNALS
from verl_memopt.run.processes import Guardian, descendants, is_alive, kill, kill_processes, remove_segments
from verl_memopt.worker.nodes import Home

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""Longest time in which a cluster must accept a connection."""

LOOK_SECONDS = 5.0
"""Time between two checks that a joined cluster still answers, and that no process is stopped."""

SILENT_SECONDS = 15.0
"""Time for which a node of a joined cluster may be silent."""

KEPT_SECONDS = 86_400
"""Age in seconds from which a session's folder is removed."""

HEADS = {"gcs_server": "head process (gcs_server)", "raylet": "node process (raylet)"}
"""Processes without which Ray cannot carry a run, by their process names."""

SOCKET_BYTES = 107
"""Longest path of a socket in bytes."""

ROOM = SOCKET_BYTES - len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.1")
"""Longest path of Ray's folder in bytes that leaves room for its sockets' names."""

LOCAL = "local"
"""Ray's name for a cluster that is started here, whatever RAY_ADDRESS says."""

LOCAL_CLUSTER: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 256 * 2**20}
"""Arguments of ray.init where it starts a cluster, unless ``ray_kwargs.ray_init`` sets them. Batches without padding are small,
so little shared memory is enough; beyond it Ray spills to disk."""


@dataclass(frozen=True)
class Request:
    """The room of some roles on the cluster: per device one CPU, and one GPU if the device is a GPU."""

    nnodes: int
    devices_per_node: int
    gpu: bool
    section: str = "trainer"
    """Section of the settings that asks for it."""

    @property
    def bundle(self) -> dict[str, float]:
        return {"CPU": 1.0, "GPU": 1.0} if self.gpu else {"CPU": 1.0}

    def __str__(self) -> str:
        node = " and ".join(f"{self.devices_per_node} {name}" for name in self.bundle)
        keys = f"{self.section}.nnodes={self.nnodes}, {self.section}.n_gpus_per_node={self.devices_per_node}"
        return f"{keys} needs {node} on each node"


class Connection:
    """This process's connection to Ray, made here unless one exists. :meth:`close` undoes only what was made here.

    Raises:
        ConfigError: Ray refuses ``ray_init`` or its address, or several nodes are requested without an address.
    """

    def __init__(self, ray_init: Mapping[str, Any], *requests: Request, patience_seconds: float = math.inf) -> None:
        """Connect to Ray, or start it, unless this process is connected already.

        ``patience_seconds``: longest wait for a process that a signal has stopped.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        self._guardian: Guardian | None = None
        self._started: list[int] = []
        self._known: set[Any] = set()
        self._members: set[Any] = set()
        self._patience_seconds = patience_seconds
        self._stopped: dict[int, int] = {}
        """Process that a signal has stopped -> in how many looks. Looks and not seconds: where the whole run is stopped, nobody
        looks."""
        self._heads: dict[int, str] = {}
        self._joined: str | None = None
        self._looked_at = time.monotonic()
        self._nodes: dict[str, int] = {}  # address -> port
        self._own_node = ""
        self._ports: list[int] = []  # of watched processes here
        self._silent_since: float | None = None
        self.is_lost = False
        self._owned = not ray.is_initialized()
        if self._owned:
            self._connect({name: value for name, value in ray_init.items() if value is not None}, requests)

    def close(self) -> None:
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
        for port in self._ports:
            remove_segments(port)

    def lost(self) -> str | None:
        self._remember_started()
        for pid, name in self._heads.items():
            if not is_alive(pid):
                self.is_lost = True
                return f"Ray's {name} (pid {pid}) died"
        if time.monotonic() - self._looked_at <= LOOK_SECONDS:
            return None
        self._name_stopped()
        for pid in self._heads.keys() & self.stopped_for_long():
            self.is_lost = True
            return f"Ray's {self._heads[pid]} (pid {pid}) was stopped by a signal for longer than actor_rollout_ref.nccl_timeout"
        reason = None if self._joined is None else self._joined_lost(self._joined)
        self._looked_at = time.monotonic()
        return reason

    def _joined_lost(self, address: str) -> str | None:
        reason = _does_not_answer(address)
        if reason is None:
            lost = self._silent_for_long(self.silent_node())
        else:
            lost = f"nothing answers any more at ray_kwargs.ray_init.address={address} ({reason})"
            if isinstance(reason, TimeoutError):  # busy or stopped, and it may go on
                lost = self._silent_for_long(lost)
        # Without the head, or the node process of this machine, Ray's own calls would wait for ever.
        self.is_lost = lost is not None and (reason is not None or _does_not_answer(self._own_node) is not None)
        return lost

    def watch(self, homes: Sequence[Home]) -> None:
        import psutil
        import ray

        here = ray.get_runtime_context().get_node_id()
        for home in homes:
            if home.node == here:
                self._ports.append(home.port)
                # A process that a signal stops would make the run wait without a word.
                with suppress(psutil.NoSuchProcess):  # its end is seen by the call that it does not answer
                    self._members.add(psutil.Process(home.pid))
        ports = {node["NodeID"]: node["NodeManagerPort"] for node in ray.nodes()}
        self._nodes = {home.address: ports[home.node] for home in homes}
        self._own_node = next(f"{node['NodeManagerAddress']}:{ports[here]}" for node in ray.nodes() if node["NodeID"] == here)

    def kill_watched(self) -> None:
        # Without its head, a cluster would do so only after a minute.
        kill([process.pid for process in self._members if process.is_running()])

    def silent_node(self) -> str | None:
        for address, port in self._nodes.items():
            reason = _does_not_answer(f"{address}:{port}")
            if reason is not None:
                return f"node {address} does not answer ({reason})"
        return None

    def _silent_for_long(self, silent: str | None) -> str | None:
        now = time.monotonic()
        if silent is None:
            self._silent_since = None
            return None
        logger.warning(silent)
        self._silent_since = self._silent_since or now
        # Ray itself waits three times as long.
        return silent if now - self._silent_since > SILENT_SECONDS else None

    def stopped_now(self) -> set[int]:
        import psutil

        stopped = set()
        for process in self._known | self._members:
            with suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    stopped.add(process.pid)
        return stopped

    def stopped_for_long(self) -> set[int]:
        return {pid for pid, looks in self._stopped.items() if looks * LOOK_SECONDS > self._patience_seconds}

    def _name_stopped(self) -> None:
        # Nothing else would tell why the run waits.
        stopped = self.stopped_now()
        for pid in sorted(stopped - self._stopped.keys()):
            logger.warning("process %d of this run is stopped by a signal, and the run waits for it: kill -CONT %d", pid, pid)
        self._stopped = {pid: self._stopped.get(pid, 0) + 1 for pid in stopped}

    def logs(self) -> str:
        import ray

        node = ray._private.worker._global_node
        return "the folder session_latest/logs of Ray" if node is None else node.get_logs_dir_path()

    def _remember_started(self) -> None:
        import psutil

        for parent in self._started:
            # Noted while they can be found: once its parent has ended, an orphan belongs to nobody.
            for pid in (parent, *descendants(parent)):
                with suppress(psutil.NoSuchProcess):
                    self._known.add(psutil.Process(pid))

    def _kill_started(self) -> None:
        self._remember_started()
        kill_processes(self._known)

    def _shutdown(self) -> None:
        import ray

        self._remember_started()
        node = ray._private.worker._global_node
        if self._started and node is not None:
            # Ray would send SIGTERM, which every process of the run is started with blocked, and wait a second for each.
            node.kill_all_processes = lambda **_: self._kill_started()
        ray.shutdown()
        self._kill_started()

    def _connect(self, arguments: dict[str, Any], requests: Sequence[Request]) -> None:
        import psutil
        import ray
        from ray._private.services import canonicalize_bootstrap_address

        address = str(arguments.get("address") or os.environ.get("RAY_ADDRESS") or LOCAL)
        joins = address != LOCAL
        for request in requests:
            if request.nnodes > 1 and not joins:
                raise ConfigError(
                    f"{request.section}.nnodes={request.nnodes}: a cluster started here has one node. "
                    f"Start Ray on the nodes and set ray_kwargs.ray_init.address, or set {request.section}.nnodes=1."
                )
        if address == "auto":
            address = canonicalize_bootstrap_address(address, arguments.get("_temp_dir")) or address
        if joins:
            # Ray itself would retry for a quarter of an hour.
            reason = _does_not_answer(address)
            if reason is not None:
                raise ConfigError(
                    f"ray_kwargs.ray_init.address={address}: nothing answers there ({reason}). Start Ray there "
                    "(ray start --head), or remove the key (and the variable RAY_ADDRESS) to start a cluster on this machine."
                )
        num_cpus = max(sum(request.nnodes * request.devices_per_node for request in requests), os.cpu_count() or 1)
        folder = arguments.get("_temp_dir") or ("" if joins else str(own_folder() / "ray"))
        # A cluster that is joined keeps its own settings.
        defaults = {} if joins else {**LOCAL_CLUSTER, "num_cpus": num_cpus, "_temp_dir": folder}
        if folder:
            remove_old_sessions(Path(folder))
        self._guardian = None if joins else Guardian()
        before = set(psutil.Process().children())
        try:
            with stop_signals_blocked(), nullcontext() if joins else _one_node():
                own = {"logging_level": logging.ERROR, "job_config": _job_config()}
                ray.init(**{**own, **defaults, **arguments, "address": address})
        except (ConnectionError, TypeError, ValueError, RuntimeError, OSError, ray.exceptions.RayError) as error:
            self.close()
            if isinstance(error, ConnectionError) and joins:
                raise ConfigError(
                    f"ray_kwargs.ray_init.address={address}: what answers there does not take this run in ({error}). Give the "
                    "address that ray start --head printed there, and the token of that cluster (RAY_AUTH_MODE=token with "
                    "RAY_AUTH_TOKEN_PATH), or remove the key (and the variable RAY_ADDRESS) to start a cluster on this machine."
                ) from error
            raise ConfigError(
                f"ray_kwargs.ray_init={arguments}: Ray could not start: {error}. Correct or remove the argument."
            ) from error
        except Exception as error:  # Ray raises a plain one where its own processes do not start in time, or are killed meanwhile
            self.close()
            why = str(error).rstrip(".")
            raise WorkerError(f"Ray could not start: {why}. Start the command again; a run goes on from its record.") from error
        self._joined = ray.get_runtime_context().gcs_address if joins else None
        self._started = [child.pid for child in psutil.Process().children() if child not in before]
        self._heads = {pid: name for pid in self._started if (name := HEADS.get(psutil.Process(pid).name()))}
        self._remember_started()
        # From here on the guardian follows parents only, so processes that others start later are left alone.
        if self._guardian is not None:
            self._guardian.all_started()


class _Fixed(list[str]):
    """A list of folders that Ray cannot extend."""

    def extend(self, more: Iterable[str]) -> None: ...


def _job_config() -> Any:
    """Return a job whose workers do not look for modules in the driver's working directory and script folder first.

    Ray puts both in front of the standard library, where a file ``secrets.py`` would replace Python's. A worker appends its own
    directory.
    """
    from ray.job_config import JobConfig

    package = str(Path(__file__).parents[2])
    return JobConfig(_py_driver_sys_path=_Fixed([] if package == sysconfig.get_path("purelib") else [package]))


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block the signals that stop a run, in this thread and in the threads and processes that it starts, which inherit the mask.

    A scheduler sends SIGTERM to every process of a job, and Ray's processes would end before the run has saved. At the end the
    handlers of this process are restored, because Ray sets some.
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
    # Ray turns 127.0.0.1 into the node's address, unless it is configured for a machine without clusters.
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
    for session in folder.glob("session_*_*"):
        pid = session.name.rpartition("_")[2]
        with suppress(OSError):
            # Logs of younger sessions may still be needed.
            is_old = time.time() - session.lstat().st_mtime > KEPT_SECONDS
            if is_old and pid.isdecimal() and not is_alive(int(pid)) and not session.is_symlink():
                shutil.rmtree(session, ignore_errors=True)


def own_folder() -> Path:
    """Return this user's folder for Ray's sessions (sockets, logs and spilled objects), with mode 0700.

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


HTTP2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What a client of HTTP/2, which gRPC and so Ray speaks, says first: its preface and an empty frame of settings."""

FRAME_BYTES, FRAME_TYPE, FRAME_SETTINGS = 9, 3, 4
"""Length of a frame's header in HTTP/2, the place of its type there, and the type that a server sends first. RFC 9113."""


def _does_not_answer(address: str) -> OSError | None:
    """Return why nothing can be reached at a ``host:port``. None if something answers as Ray would, or for another form.

    That a process listens is not enough: the kernel accepts connections to one that is stopped.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return None
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return None
            connection.sendall(HTTP2_START)
            header = b""
            while len(header) < FRAME_BYTES:
                part = connection.recv(FRAME_BYTES - len(header))
                if not part:
                    return ConnectionResetError("it closes the connection")
                header += part
    except OSError as error:
        return error
    return None if header[FRAME_TYPE] == FRAME_SETTINGS else OSError("it is something else than Ray")


def reserve(requests: Sequence[Request], timeout_seconds: float) -> list[list[Any]]:
    """Return placement groups for each request, one per node with one bundle per device, all placed.

    Raises:
        ConfigError: The cluster is too small for the requests.
        WorkerError: The cluster is large enough, but had no room for ``timeout_seconds``.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    _check_possible(*requests)
    # The largest first, as what is smaller may fit beside it.
    wanted = sorted(
        (request for request in requests for _ in range(request.nnodes)), key=lambda request: -request.devices_per_node
    )
    sizes = [request.devices_per_node for request in wanted]
    # STRICT_PACK keeps the devices of a group on one node.
    groups = [placement_group([request.bundle] * request.devices_per_node, strategy="STRICT_PACK") for request in wanted]
    placed, waiting = ray.wait([group.ready() for group in groups], num_returns=len(groups), timeout=timeout_seconds)
    if waiting:
        # Groups that were placed hold their room until they are removed, and the error would leave them behind.
        release(groups)
        free = _resources(ray.available_resources())
        keys = " or ".join(f"{request.section}.n_gpus_per_node" for request in requests)
        raise WorkerError(
            f"trainer.ray_wait_register_center_timeout={timeout_seconds}: {'; '.join(map(str, requests))}; only {len(placed)} of "
            f"{len(groups)} nodes had room in that time, free now: {free} of {_resources(ray.cluster_resources())}. "
            f"Wait for other jobs to end, raise the timeout, or lower {keys}."
        )
    nodes, here = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}, ray.get_runtime_context().get_node_id()

    def place(index: int) -> tuple[bool, str]:
        node = next(iter(placement_group_table(groups[index])["bundles_to_node_id"].values()))
        return node != here, nodes[node]

    # Rank 0 of the first request reads and writes for all ranks, so it is on this machine where there is room. Room of one size
    # serves any request of that size.
    order = sorted(range(len(groups)), key=place)
    found = []
    for request in requests:
        own = [index for index in order if sizes[index] == request.devices_per_node][: request.nnodes]
        order = [index for index in order if index not in own]
        found.append([groups[index] for index in own])
    return found


def release(groups: list[Any]) -> None:
    from ray.util.placement_group import remove_placement_group

    for group in groups:
        remove_placement_group(group)


def _check_possible(*requests: Request) -> None:
    """Check that the cluster has room for all requests at once, each of their nodes on a node of its own.

    Raises:
        ConfigError: It has not. The message names the keys of each request.
    """
    import ray

    nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    available = "; ".join(map(_resources, nodes))
    for request in sorted(requests, key=lambda request: -request.devices_per_node):
        needed = {name: amount * request.devices_per_node for name, amount in request.bundle.items()}
        fitting = [node for node in nodes if all(node.get(name, 0) >= number for name, number in needed.items())]
        if len(fitting) < request.nnodes:
            keys = ", ".join(f"{other.section}.n_gpus_per_node or {other.section}.nnodes" for other in requests)
            at_once = ", all at once" if len(requests) > 1 else ""
            raise ConfigError(
                f"{'; '.join(map(str, requests))}{at_once}, but the cluster's nodes have: {available}. Lower {keys}, "
                "raise ray_kwargs.ray_init.num_cpus if CPUs are short, or join a larger cluster with ray_kwargs.ray_init.address."
            )
        # The fullest that fit, so that a later request finds a node that is empty.
        for node in sorted(fitting, key=lambda node: [node.get(name, 0) for name in needed])[: request.nnodes]:
            for name, number in needed.items():
                node[name] -= number


def _resources(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
