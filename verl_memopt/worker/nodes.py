"""The nodes of a run: where each process runs, which devices it sees there, and whether all nodes have the same."""

from __future__ import annotations

import hashlib
import importlib.metadata
import ipaddress
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
"""Environment variable with the GPUs that a process sees, by index or UUID. CUDA reads it when it starts."""

RUN_FOLDER = "trainer.default_local_dir"


@dataclass(frozen=True)
class Home:
    pid: int
    node: str
    address: str
    """Address of the node in the cluster."""
    port: int
    """A port that the member holds there."""
    gpus: tuple[str, ...] = ()
    """The GPUs that Ray assigned, by the names of the node; empty on a CPU."""

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.address}"


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


_held: dict[int, socket.socket] = {}


def held_port(address: str) -> int:
    """Return a port of this node on which this process listens from now on, so that no other takes it before it is needed.

    On a node whose own address is a loopback address nobody else can connect.
    """
    alone = ipaddress.ip_address(address).is_loopback
    dual = not alone and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in address else socket.AF_INET
    listener = socket.create_server((address if alone else "", 0), family=family, dualstack_ipv6=dual)
    port = int(listener.getsockname()[1])
    _held[port] = listener
    return port


def take_listener(port: int) -> int | None:
    """Return the file descriptor that listens on a :func:`held_port` of this process, for the caller to close, or None.

    Other ports that this process holds are free from then on.
    """
    listener = _held.pop(port, None)
    while _held:
        _held.popitem()[1].close()
    return None if listener is None else listener.detach()


def network_of(address: str) -> dict[str, str]:
    """Return the variables that tell gloo and vLLM at which address of this node other processes reach this one.

    Gloo would listen at the address of the host's name, which on Debian and Ubuntu is a loopback address (127.0.1.1).
    """
    import psutil

    interfaces = [name for name, found in psutil.net_if_addrs().items() if any(entry.address == address for entry in found)]
    return {"VLLM_HOST_IP": address} | ({"GLOO_SOCKET_IFNAME": interfaces[0]} if interfaces else {})


def visible_devices(homes: Sequence[Home], rank: int, device: str) -> dict[str, str]:
    """Return the variable that shows a member the GPUs of its group on its node, in the order of local ranks.

    On a CPU it shows none. Empty if Ray assigned no GPU to any member.

    Raises:
        ConfigError: Ray assigned a member of the node no GPU or more than one.
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
    """Return the versions of this node's software, the text of the file ``probe``, and checksums of ``paths``.

    The keys are the names that errors use. The arguments are as in :func:`compare_nodes`.
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


def log_places(pools: Mapping[str, Sequence[Home]], here: str) -> None:
    if len(pools) == 1 and {home.node for homes in pools.values() for home in homes} == {here}:
        return
    for roles, homes in pools.items():
        nodes = [home.node for home in homes]
        for rank, node in enumerate(nodes):
            if nodes.index(node) < rank:
                continue
            last = rank + nodes.count(node) - 1
            ranks = f"ranks {rank} to {last}" if last > rank else f"rank {rank}"
            gpus = [gpu for home in homes if home.node == node for gpu in home.gpus]
            logger.info(
                "%s%s: %s%s%s",
                f"{roles}, " if len(pools) > 1 else "",
                ranks,
                homes[rank].address,
                " (this machine)" if node == here else "",
                f", GPUs {', '.join(gpus)}" if gpus else "",
            )


def compare_nodes(
    homes: Sequence[Home],
    paths: Mapping[str, str],
    run_dir: Path,
    here: str,
    ask: Callable[[Sequence[int], str], Sequence[Mapping[str, str]]],
) -> None:
    """Check that all nodes have the software, the run folder and the files that this machine has.

    Args:
        homes: Where the workers run. Nothing is checked if all are on this machine.
        paths: Setting -> file or folder that workers read.
        run_dir: The run folder. A file is written there for a moment, which all nodes must see.
        here: This machine's node.
        ask: Takes the places of some homes and the path of that file. Returns the :func:`site` of each.

    Raises:
        ConfigError: A node has something else. The message names it and each difference.
    """
    nodes = [home.node for home in homes]
    elsewhere = [place for place, node in enumerate(nodes) if node != here and nodes.index(node) == place]
    if not elsewhere:
        return
    probe = run_dir / f".seen_by_all_nodes_{os.getpid()}"
    try:
        probe.write_text(secrets.token_hex(16))
        found, mine = ask(elsewhere, str(probe)), site(paths, str(probe))
    finally:
        probe.unlink(missing_ok=True)
    pairs = zip(elsewhere, found, strict=True)
    problems = [differences(mine, theirs, homes[place].address, run_dir) for place, theirs in pairs]
    if any(problems):
        raise ConfigError(". ".join(filter(None, problems)) + ".")


def differences(mine: Mapping[str, str], theirs: Mapping[str, str], address: str, run_dir: Path) -> str:
    problems = []
    for name in {**mine, **theirs}:
        own, other = mine.get(name), theirs.get(name)
        if own == other:
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
                f"it has {name} {other or 'not at all'}, and this machine {own or 'not at all'}; install the same on all nodes"
            )
    return f"node {address} differs from this machine: {'; '.join(problems)}" if problems else ""
