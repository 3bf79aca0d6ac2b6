"""The Ray cluster a group of workers runs on: connected to or started, and room reserved on it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_memopt.errors import ConfigError, WorkerError

OBJECT_STORE_BYTES = 256 * 2**20
"""Shared memory of a cluster started here; batches without padding are small, and Ray spills to disk beyond it."""

CONNECT_SECONDS = 10.0
"""How long a cluster may take to accept a connection."""

LOCAL_CLUSTER: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
"""Arguments of ray.init where it starts a cluster; ``ray_kwargs.ray_init`` wins over each."""


@dataclass(frozen=True)
class Request:
    """What a group asks of the cluster: one CPU per device, and one GPU where the device is one."""

    nnodes: int
    devices_per_node: int
    gpu: bool

    @property
    def bundle(self) -> dict[str, float]:
        """Gives the resources of one member."""
        return {"CPU": 1.0, "GPU": 1.0} if self.gpu else {"CPU": 1.0}

    def __str__(self) -> str:
        node = " and ".join(f"{self.devices_per_node} {name}" for name in self.bundle)
        return f"trainer.nnodes={self.nnodes}, trainer.n_gpus_per_node={self.devices_per_node} asks for {node} on each node"


class Connection:
    """This process's connection to Ray, made where there was none; :meth:`close` undoes what was made.

    Errors: ConfigError when Ray refuses ``ray_init`` or its address, or several nodes are asked for without an address.
    """

    def __init__(self, ray_init: Mapping[str, Any], request: Request) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        self._guardian: subprocess.Popen[bytes] | None = None
        self._owned = not ray.is_initialized()
        if self._owned:
            self._connect({name: value for name, value in ray_init.items() if value is not None}, request)

    def close(self) -> None:
        """Disconnects, and stops the cluster that was started here; may be called again."""
        import ray

        if self._owned:
            ray.shutdown()
        if self._guardian is not None:
            self._guardian.kill()
            self._guardian.communicate()
        self._owned, self._guardian = False, None

    def _connect(self, given: dict[str, Any], request: Request) -> None:
        """Joins the cluster of ``address`` or RAY_ADDRESS, else starts one on this machine."""
        import psutil
        import ray

        joins = given.get("address") not in (None, "local") or "RAY_ADDRESS" in os.environ
        if request.nnodes > 1 and not joins:
            raise ConfigError(
                f"trainer.nnodes={request.nnodes}: a cluster started here has one node. "
                "Start Ray on the nodes and give ray_kwargs.ray_init.address, or set trainer.nnodes=1."
            )
        if joins:
            _check_answers(str(given.get("address") or os.environ["RAY_ADDRESS"]))
        num_cpus = max(request.nnodes * request.devices_per_node, os.cpu_count() or 1)
        defaults = {} if joins else {**LOCAL_CLUSTER, "num_cpus": num_cpus}
        driver, on_terminate = psutil.Process(), signal.getsignal(signal.SIGTERM)
        before = set(driver.children())
        try:
            ray.init(**{"logging_level": logging.ERROR, **defaults, **given})
        except (ConnectionError, TypeError, ValueError, RuntimeError) as error:
            ray.shutdown()
            raise ConfigError(
                f"ray_kwargs.ray_init={given}: Ray could not start: {error}. Correct or remove the argument."
            ) from error
        if callable(on_terminate) and signal.getsignal(signal.SIGTERM) is not on_terminate:
            # Ray would exit on the spot; what SIGTERM means for the run is for whoever handled it before to decide.
            signal.signal(signal.SIGTERM, on_terminate)
        started = [child for child in driver.children() if child not in before]
        if started:
            self._guardian = _guard([child.pid for parent in started for child in (parent, *parent.children())])


def _check_answers(address: str) -> None:
    """Raises ConfigError when nothing listens at a ``host:port``. Ray itself would try again for a quarter of an hour."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"ray_kwargs.ray_init.address={address}: nothing answers there ({error}). Start Ray there (ray start --head), "
            "or remove the key (and the variable RAY_ADDRESS) to start a cluster on this machine."
        ) from error


def _guard(pids: list[int]) -> subprocess.Popen[bytes]:
    """Starts a shell that kills ``pids`` once this process is gone, however it ended.

    Ray's own processes follow a killed driver, but its node's two agents outlive it by a minute. The shell waits for the
    end of a pipe that only this process holds, in a session of its own, where no Ctrl-C reaches it.
    """
    script = 'read _; kill -9 "$@" 2> /dev/null'
    command = ["sh", "-c", script, "guardian", *map(str, pids)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def reserve(request: Request, timeout_seconds: float) -> list[Any]:
    """Gives one placement group per node, each with one bundle per device, all placed.

    Errors: ConfigError at once when the cluster could never hold the request; WorkerError when it could, but has had no room
    for ``timeout_seconds``.
    """
    import ray
    from ray.util.placement_group import placement_group

    _check_possible(request)
    bundles = [request.bundle] * request.devices_per_node
    groups = [placement_group(bundles, strategy="STRICT_PACK") for _ in range(request.nnodes)]
    placed, waiting = ray.wait([group.ready() for group in groups], num_returns=len(groups), timeout=timeout_seconds)
    if waiting:
        release(groups)
        free = _resources(ray.available_resources())
        raise WorkerError(
            f"trainer.ray_wait_register_center_timeout={timeout_seconds}: {request}; only {len(placed)} of {len(groups)} nodes "
            f"had room in that time, free now: {free} of {_resources(ray.cluster_resources())}. "
            "Wait for other jobs to end, raise the timeout, or lower trainer.n_gpus_per_node."
        )
    return groups


def release(groups: list[Any]) -> None:
    """Gives the reserved room back."""
    from ray.util.placement_group import remove_placement_group

    for group in groups:
        remove_placement_group(group)


def _check_possible(request: Request) -> None:
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    wide = [
        node
        for node in nodes
        if all(node.get(name, 0) >= request.devices_per_node * each for name, each in request.bundle.items())
    ]
    if len(wide) < request.nnodes:
        have = "; ".join(_resources(node) for node in nodes)
        raise ConfigError(
            f"{request}, and the cluster's nodes have: {have}. Lower trainer.n_gpus_per_node or trainer.nnodes, "
            "raise ray_kwargs.ray_init.num_cpus if CPUs are short, or join a larger cluster with ray_kwargs.ray_init.address."
        )


def _resources(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
