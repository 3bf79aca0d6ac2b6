"""``python -m benchmarks.gpu.environment FILE`` writes what this machine has as JSON, and prints one line of it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write_json
from verl_memopt.distributed.device import device_count, memory_info

MISSING_ON_PURPOSE = ("ray", "vllm", "flash-attn", "fla-core")
"""Packages that the parts of all.sh do not need. They are named, so that a reader sees what was not covered."""


def environment() -> dict[str, Any]:
    packages = {found.metadata["Name"]: found.version for found in distributions()}
    return {
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "devices": [_device(index) for index in range(device_count("cuda"))],
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "tools": {name: shutil.which(name) is not None for name in ("nvcc", "gcc", "g++", "nvidia-smi")}, "cores": os.cpu_count(),
        "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "missing": [name for name in MISSING_ON_PURPOSE if name not in packages], "packages": dict(sorted(packages.items())),
    }  # fmt: skip


def _device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = memory_info(torch.device("cuda", index))
    return {
        "name": properties.name, "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count, "total_bytes": total, "free_bytes": free,
    }  # fmt: skip


def _first_line(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return lines[0] if lines else None


def main(path: Path) -> None:
    found = environment()
    write_json(path, found)
    names = ", ".join(device["name"] for device in found["devices"]) or "no GPU"
    print(f"{names}; Python {found['python']}, torch {found['torch']}; not here: {', '.join(found['missing']) or 'nothing'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
