"""Compiles and loads ``guard.cpp``, in a process that has not imported torch yet."""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
BUILD = Path(__file__).parents[2] / "build" / "virtual_gpu"


def load_guard():
    """Makes autograd take fake ``cuda`` tensors in this process.

    Raises:
        RuntimeError: torch was imported before, or the C++ compiler is missing or fails.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the stand-in must be loaded before torch is imported: torch looks for an accelerator once")
    ctypes.CDLL(str(compiled()))


def compiled():
    """Return the path of the compiled stand-in, compiled once for each version of torch and of the source."""
    torch_folder = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    version = (torch_folder / "version.py").read_bytes()
    target = BUILD / f"guard-{hashlib.sha256(SOURCE.read_bytes() + version + sys.version.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as aside:
            made = Path(aside) / target.name
            _compile(torch_folder, made)
            os.replace(made, target)
    return target


def _compile(torch_folder, target):
    libraries = torch_folder / "lib"
    command = [
        os.environ.get("CXX", "g++"),
        "-std=c++20",
        "-O0",
        "-shared",
        "-fPIC",
        f"-I{torch_folder / 'include'}",
        str(SOURCE),
    ]
    command += ["-o", str(target), f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except FileNotFoundError as error:
        raise RuntimeError(f"no C++ compiler ({command[0]}): install g++, or name one in CXX") from error
    if done.returncode:
        raise RuntimeError(f"{SOURCE.name} does not compile:\n{done.stderr[-3000:]}")
