"""The nodes of a run: where each process runs, which devices it sees there, and whether all nodes have the same files."""

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
    """A port of the node that the member keeps open."""
    gpus: tuple[str, ...] = ()
    """The GPUs that Ray assigned, by index or UUID. Empty on a CPU."""

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.address}"


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


_held: dict[int, socket.socket] = {}


def held_port(address: str) -> int:
    """Listen on a free port of this node and return the port. No other process can then take it before it is needed.

    If ``address`` is a loopback address, the port is open on this address only. Otherwise it is open on all addresses.
    """
    alone = ipaddress.ip_address(address).is_loopback
    dual = not alone and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in address else socket.AF_INET
    listener = socket.create_server((address if alone else "", 0), family=family, dualstack_ipv6=dual)
    port = int(listener.getsockname()[1])
    _held[port] = listener
    return port


def take_listener(port: int) -> int | None:
    """Return the file descriptor that listens on ``port``, or None if :func:`held_port` did not open this port.

    The caller closes the descriptor. This closes all other ports that :func:`held_port` opened.
    """
    listener = _held.pop(port, None)
    while _held:
        _held.popitem()[1].close()
    return None if listener is None else listener.detach()


def network_of(address: str) -> dict[str, str]:
    """Return the environment variables that make gloo and vLLM use ``address`` of this node.

    Without them gloo listens at the address of the host name. On Debian and Ubuntu that is a loopback address (127.0.1.1),
    which other nodes cannot reach.
    """
    import psutil

    interfaces = [name for name, found in psutil.net_if_addrs().items() if any(entry.address == address for entry in found)]
    return {"VLLM_HOST_IP": address} | ({"GLOO_SOCKET_IFNAME": interfaces[0]} if interfaces else {})


def visible_devices(homes: Sequence[Home], rank: int, device: str) -> dict[str, str]:
    """Return the environment variable that shows a member all GPUs of its group on its node, in the order of local ranks.

    On a CPU it shows no GPU. The result is empty if Ray assigned no GPU to any member of the node.

    Raises:
        ConfigError: Ray assigned a member of the node no GPU or more than one.
    """
    if device == "cpu":  # Ray hides no GPU from a process that requested none
        return {VISIBLE_DEVICES: ""}
    neighbours = [home.gpus for home in homes if home.node == homes[rank].node]
    if not any(neighbours):
        return {}
    if any(len(gpus) != 1 for gpus in neighbours):
        raise ConfigError(
            f"ray_kwargs.ray_init: Ray gave worker {rank} on {homes[rank].address} the GPUs {sorted(homes[rank].gpus)} instead "
            f"of one. Remove {VISIBLE_DEVICES} from ray_init's runtime_env. To use only some GPUs of a node, set "
            f"{VISIBLE_DEVICES} before Ray starts on that node."
        )
    return {VISIBLE_DEVICES: ",".join(gpu for (gpu,) in neighbours)}


def site(paths: Mapping[str, str], probe: str) -> dict[str, str]:
    """Return the versions of this node's software, the text of the file ``probe``, and checksums of ``paths``.

    The keys are the names in error messages. ``paths`` are as in :func:`compare_nodes`, which also writes ``probe``.
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
        run_dir: The run folder. A temporary file is written there, which all nodes must see.
        here: Ray's ID of this machine's node.
        ask: Takes indices into ``homes`` and the path of the temporary file. Returns :func:`site` of each of these nodes.

    Raises:
        ConfigError: A node differs. The message names the node and each difference.
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
            state = "there is no such path" if other is None else "its contents differ"
            problems.append(f"{name}: {state}; give all nodes the same files at this path")
        elif name.startswith("the code"):
            problems.append(f"{name} differs; install the same version on all nodes")
        else:
            problems.append(
                f"it has {name} {other or '(none)'}, this machine has {own or '(none)'}; install the same version on all nodes"
            )
    return f"node {address} differs from this machine: {'; '.join(problems)}" if problems else ""
