"""The nodes of a group of workers: where each process runs, which devices it sees there, and whether all nodes have the same."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import platform
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from verl_memopt.distributed.file_records import digest_of
from verl_memopt.errors import ConfigError

logger = logging.getLogger(__name__)

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The GPUs that a process sees, by index or UUID. CUDA reads it when it starts."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The network interface whose address gloo listens at."""

NO_GPU = {VISIBLE_DEVICES: ""}
"""Hides all GPUs from a worker of a CPU run. Ray hides none from a process that requested none."""


@dataclass(frozen=True)
class Home:
    """Where a member runs.

    ``address`` is that of the node in the cluster, and ``interface`` the network interface that has it, empty where none has.
    ``port`` was free there when the member started. ``gpus`` are the GPUs that Ray assigned, by the names of the node; empty on a
    CPU.
    """

    pid: int
    node: str
    address: str
    interface: str
    port: int
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return process id and address."""
        return f"pid {self.pid} on {self.address}"

    def network(self) -> dict[str, str]:
        """Return the variables that tell gloo and vLLM which address others reach this process at.

        Gloo would listen at the address of the host's name, which on Debian and Ubuntu is a loopback address (127.0.1.1).
        """
        return {"VLLM_HOST_IP": self.address} | ({GLOO_INTERFACE: self.interface} if self.interface else {})


def free_port(address: str) -> int:
    """Return a port that is free on this node at this moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def interface_of(address: str) -> str:
    """Return the name of this node's network interface that has an address; empty if none has."""
    import psutil

    return next((name for name, known in psutil.net_if_addrs().items() if any(one.address == address for one in known)), "")


def visible_devices(homes: Sequence[Home], rank: int, device: str) -> dict[str, str]:
    """Return the variable that shows a member the GPUs of its group on its node, in the order of their local ranks.

    It shows none to workers that compute on a CPU. Empty where Ray gave no GPU to any.

    Raises:
        ConfigError: Ray assigned more or fewer GPUs than one to a member of the node.
    """
    if device == "cpu":
        return NO_GPU
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


def threads_per_worker(workers_per_node: int) -> int:
    """Return ``OMP_NUM_THREADS`` where it is set, else an equal share of this machine's cores."""
    variable = os.environ.get("OMP_NUM_THREADS", "")
    if variable.isdigit() and int(variable):
        return int(variable)
    return max(1, (os.cpu_count() or 1) // workers_per_node)


def site(paths: Mapping[str, str], probe: str) -> dict[str, str]:
    """Return what this node has: versions of the software, the text of a file, and checksums of paths.

    The keys are the names that errors use for them.

    Args:
        paths: setting -> file or folder.
        probe: a file that the driver wrote.
    """
    import verl_memopt

    code = Path(verl_memopt.__file__).parent
    found = {"Python": platform.python_version(), "the code of verl_memopt": _digest_of_code(code)}
    for name in ("torch", "transformers", "vllm", "flash-attn"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with suppress(OSError):
        found[RUN_FOLDER] = Path(probe).read_text()
    for key, path in paths.items():
        with suppress(OSError):
            found[f"{key}={path}"] = digest_of(Path(path))
    return found


RUN_FOLDER = "trainer.default_local_dir"


def compare_nodes(
    homes: Sequence[Home],
    paths: Mapping[str, str],
    run_dir: Path,
    here: str,
    ask: Callable[[Sequence[int], str], Sequence[Mapping[str, str]]],
) -> None:
    """Check that all nodes have the software, the run folder and the files that this machine has, and log who is where.

    Does nothing where all workers are on this machine.

    Args:
        homes: of each rank.
        paths: setting -> file or folder that workers read.
        run_dir: the run's folder.
        here: this machine's node.
        ask: gets some ranks and the path of a file that the driver wrote, and returns the :func:`site` of each rank.

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


def _digest_of_code(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
