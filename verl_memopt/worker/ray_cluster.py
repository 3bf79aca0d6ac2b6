"""The Ray cluster of a run: join or start it, and reserve room on it for the workers."""

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
"""Longest time for which a node of a joined cluster may stay silent."""

KEPT_SECONDS = 86_400
"""Age in seconds after which the folder of an old Ray session is removed."""

HEADS = {"gcs_server": "head process (gcs_server)", "raylet": "node process (raylet)"}
"""Processes of Ray that a run needs: process name -> name in messages."""

SOCKET_BYTES = 107
"""Longest path of a socket in bytes."""

ROOM = SOCKET_BYTES - len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.1")
"""Longest path of Ray's folder, in bytes, that leaves room for the names of the sockets in it."""

LOCAL = "local"
"""Ray's address for a cluster that is started here, even if RAY_ADDRESS is set."""

LOCAL_CLUSTER: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 256 * 2**20}
"""Arguments of ray.init when it starts a cluster, unless ``ray_kwargs.ray_init`` sets them. Batches have no padding, so little
shared memory is enough. When it is full, Ray spills to disk."""


@dataclass(frozen=True)
class Request:
    """What some roles need of the cluster: per device one CPU, and also one GPU if ``gpu``."""

    nnodes: int
    devices_per_node: int
    gpu: bool
    section: str = "trainer"
    """Section of the settings that has these numbers."""

    @property
    def bundle(self) -> dict[str, float]:
        return {"CPU": 1.0, "GPU": 1.0} if self.gpu else {"CPU": 1.0}

    def __str__(self) -> str:
        node = " and ".join(f"{self.devices_per_node} {name}" for name in self.bundle)
        keys = f"{self.section}.nnodes={self.nnodes}, {self.section}.n_gpus_per_node={self.devices_per_node}"
        return f"{keys} needs {node} on each node"


class Connection:
    """This process's connection to Ray. :meth:`close` ends it only if it did not exist before.

    Raises:
        ConfigError: Ray rejects ``ray_init`` or its address, or several nodes are requested without an address.
    """

    def __init__(self, ray_init: Mapping[str, Any], *requests: Request, patience_seconds: float = math.inf) -> None:
        """Connect to Ray, or start it, unless this process is connected already.

        ``patience_seconds`` is the longest wait for a process that a signal has stopped.
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
        """Process that a signal has stopped -> number of checks in a row that found it stopped. It counts checks and not seconds,
        because a run that is stopped as a whole makes no checks."""
        self._heads: dict[int, str] = {}
        self._joined: str | None = None
        self._looked_at = time.monotonic()
        self._nodes: dict[str, int] = {}  # address -> port
        self._own_node = ""
        self._ports: list[int] = []  # held by watched processes on this node
        self._silent_since: float | None = None
        self.is_lost = False
        self._owned = not ray.is_initialized()
        if self._owned:
            self._connect({name: value for name, value in ray_init.items() if value is not None}, requests)

    def close(self) -> None:
        if self._owned:
            if self.is_lost:
                # Ray's other processes and this process would try to reach the dead process for a minute.
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
            if isinstance(reason, TimeoutError):  # busy or stopped by a signal, and may recover
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
                # A process that a signal stops would make the run wait without any message.
                with suppress(psutil.NoSuchProcess):  # the call that it does not answer reports its end
                    self._members.add(psutil.Process(home.pid))
        ports = {node["NodeID"]: node["NodeManagerPort"] for node in ray.nodes()}
        self._nodes = {home.address: ports[home.node] for home in homes}
        self._own_node = next(f"{node['NodeManagerAddress']}:{ports[here]}" for node in ray.nodes() if node["NodeID"] == here)

    def kill_watched(self) -> None:
        # A cluster without its head process kills its workers only after a minute.
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
        # Without this warning nothing would say why the run waits.
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
            # Remember descendants while their parents live, because orphans can no longer be found.
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
            # Ray would send SIGTERM to each process and wait a second for it. But the processes of the run block SIGTERM.
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
                    f"ray_kwargs.ray_init.address={address}: the server there does not take this run in ({error}). Give the "
                    "address that ray start --head printed there, and the token of that cluster (RAY_AUTH_MODE=token with "
                    "RAY_AUTH_TOKEN_PATH), or remove the key (and the variable RAY_ADDRESS) to start a cluster on this machine."
                ) from error
            raise ConfigError(
                f"ray_kwargs.ray_init={arguments}: Ray could not start: {error}. Correct or remove the argument."
            ) from error
        except Exception as error:  # Ray raises a plain Exception if its own processes do not start in time or are killed
            self.close()
            why = str(error).rstrip(".")
            raise WorkerError(f"Ray could not start: {why}. Start the command again; a run goes on from its records.") from error
        self._joined = ray.get_runtime_context().gcs_address if joins else None
        self._started = [child.pid for child in psutil.Process().children() if child not in before]
        self._heads = {pid: name for pid in self._started if (name := HEADS.get(psutil.Process(pid).name()))}
        self._remember_started()
        # From now on the guardian finds new processes only by their parents. It leaves processes of other programs alone.
        if self._guardian is not None:
            self._guardian.all_started()


class _Fixed(list[str]):
    """A list of folders that Ray cannot extend."""

    def extend(self, more: Iterable[str]) -> None: ...


def _job_config() -> Any:
    """Return a job config that keeps the driver's working directory and script folder out of the workers' ``sys.path``.

    Ray would put both before the standard library, where a file ``secrets.py`` would replace Python's module. The class
    ``Member`` appends the working directory at the end of ``sys.path`` instead.
    """
    from ray.job_config import JobConfig

    package = str(Path(__file__).parents[2])
    return JobConfig(_py_driver_sys_path=_Fixed([] if package == sysconfig.get_path("purelib") else [package]))


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block the signals that stop a run in this thread. Threads and processes that it starts inherit this.

    A scheduler sends SIGTERM to every process of a job. Without this Ray's processes would end before the run has saved. At the
    end the signal handlers of this process are restored, because Ray sets its own.
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
        # Only after the handlers are restored, so that a pending signal reaches the run's handler and not Ray's.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _one_node() -> Iterator[None]:
    # Ray replaces 127.0.0.1 by the node's address, unless clusters of several nodes are disabled.
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

    Its name is ``verl_memopt_<user id>``. It is in RAY_TMPDIR if this is set, otherwise in the system's temporary folder, or in
    /tmp if the path of that folder is too long for sockets.

    Raises:
        ConfigError: RAY_TMPDIR is too long for a socket, or the folder belongs to another user or cannot be created.
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
            f"{name}={parent}: the path is {too_long} bytes too long. Ray creates sockets in it, and the path of a socket "
            f"has at most {SOCKET_BYTES} bytes. Set RAY_TMPDIR to a shorter folder, for example RAY_TMPDIR=/tmp."
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"{name}={parent}: {folder} cannot be created ({error.strerror}). Set RAY_TMPDIR to a folder of yours."
        ) from error
    # lstat, not stat: a link from another user must not redirect to another folder.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{name}={parent}: {folder} is not a folder of yours. Set RAY_TMPDIR to a folder of yours.")
    folder.chmod(0o700)
    return folder


HTTP2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The first bytes of an HTTP/2 client: the preface and an empty SETTINGS frame. Ray uses gRPC, which uses HTTP/2."""

FRAME_BYTES, FRAME_TYPE, FRAME_SETTINGS = 9, 3, 4
"""HTTP/2 (RFC 9113): length of a frame header, offset of the type in it, and the type of a server's first frame."""


def _does_not_answer(address: str) -> OSError | None:
    """Return the error if no process of Ray answers at ``host:port``, otherwise None.

    An open port is not enough, because the kernel accepts connections for a stopped process too. With TLS only the connection
    is tested. The result is None for an address of another form.
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
                    return ConnectionResetError("the process there closes the connection")
                header += part
    except OSError as error:
        return error
    return None if header[FRAME_TYPE] == FRAME_SETTINGS else OSError("it is something else than Ray")


def reserve(requests: Sequence[Request], timeout_seconds: float) -> list[list[Any]]:
    """Reserve room for each request. Return its placement groups: one per node, with one bundle per device.

    Raises:
        ConfigError: The cluster is too small for the requests.
        WorkerError: The cluster is large enough, but had no free room within ``timeout_seconds``.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    _check_possible(*requests)
    # The largest requests first, because smaller ones may fit beside them.
    wanted = sorted(
        (request for request in requests for _ in range(request.nnodes)), key=lambda request: -request.devices_per_node
    )
    sizes = [request.devices_per_node for request in wanted]
    # STRICT_PACK keeps the devices of a group on one node.
    groups = [placement_group([request.bundle] * request.devices_per_node, strategy="STRICT_PACK") for request in wanted]
    placed, waiting = ray.wait([group.ready() for group in groups], num_returns=len(groups), timeout=timeout_seconds)
    if waiting:
        # Placed groups keep their room until they are removed, so remove them before raising.
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

    # Rank 0 of the first request reads and writes files for all ranks, so it gets room on this machine if there is any. A
    # placement group serves any request of its size.
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
    """Check that the cluster is large enough for all requests at once. All nodes of one request must be different nodes.

    Raises:
        ConfigError: The cluster is too small. The message names the keys of each request.
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
        # Use the fullest nodes that fit, so that empty nodes are left for later requests.
        for node in sorted(fitting, key=lambda node: [node.get(name, 0) for name in needed])[: request.nnodes]:
            for name, number in needed.items():
                node[name] -= number


def _resources(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
