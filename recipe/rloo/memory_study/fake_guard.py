"""Runs a function in a process in which autograd accepts fake ``cuda`` tensors, on a machine without a GPU.

For this, a small C++ library, the guard, must be loaded before torch. So this file does not import torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import pickle
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from verl_memopt.errors import ConfigError
from verl_memopt.observe.files import written_aside

SOURCE = Path(__file__).with_name("fake_guard.cpp")
ROOT = Path(__file__).parents[3]
_loaded = False


class NoCompilerError(ConfigError):
    """The guard cannot be compiled on this machine."""


def call_in_fake_process(function: str, *args: Any) -> Any:
    """Call a function, ``module:name``, in a new process with a fake CUDA device. Arguments and result are pickled.

    If this process has loaded the guard already, the function is called here.

    Raises:
        NoCompilerError: There is no C++ compiler.
        RuntimeError: The function raised an error. The message has its traceback.
    """
    if _loaded:
        return pkgutil.resolve_name(function)(*args)
    library = compiled_guard()
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request", Path(folder) / "answer"
        request.write_bytes(pickle.dumps((function, args)))
        code = f"import {__name__} as it; it.serve(*it.sys.argv[1:])"
        command = [sys.executable, "-c", code, str(library), str(request), str(answer)]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        child = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
        if child.returncode:
            raise RuntimeError(f"{function} failed on the fake device:\n{child.stderr[-3000:]}")
        return pickle.loads(answer.read_bytes())


def compiled_guard() -> Path:
    """Return the library of the guard. It is compiled once per installation of torch and version of the guard's source."""
    torch_folder = _torch_folder()
    version = (torch_folder / "version.py").read_bytes()
    # The path counts too, because the library finds torch by it.
    digest = hashlib.sha256(SOURCE.read_bytes() + version + str(torch_folder).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl_memopt"
    library = cache / f"fake-guard-{digest}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with written_aside(library, several_write=True) as aside:
            _compile(torch_folder, aside)
    return library


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is not installed"  # noqa: PT018
    return Path(spec.origin).parent


def _compile(torch_folder: Path, target: Path) -> None:
    compiler, libraries = os.environ.get("CXX", "g++"), torch_folder / "lib"
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(SOURCE), "-o", str(target)]
    links = [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
    try:
        done = subprocess.run([compiler, *flags, *links], capture_output=True, text=True, timeout=300)
    except FileNotFoundError as error:
        raise NoCompilerError(
            f"There is no C++ compiler named {compiler}. Fake GPU tensors need one: install g++, or name yours in CXX."
        ) from error
    if done.returncode:
        raise NoCompilerError(f"{SOURCE.name} does not compile with {compiler}:\n{done.stderr[-3000:]}")


def load(library: str) -> None:
    global _loaded
    ctypes.CDLL(library)
    _loaded = True


def serve(library: str, request: str, answer: str) -> None:
    """In a fresh process load the guard, run the pickled request, and write the pickled answer."""
    assert "torch" not in sys.modules, "torch was imported before the guard"
    of_cuda = _torch_folder() / "lib" / "libtorch_cuda.so"
    if of_cuda.exists():
        ctypes.CDLL(str(of_cuda))  # a CUDA build registers its own guard when it is loaded, and the last guard is used
    load(library)
    function, args = pickle.loads(Path(request).read_bytes())
    Path(answer).write_bytes(pickle.dumps(pkgutil.resolve_name(function)(*args)))
