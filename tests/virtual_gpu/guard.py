"""Loads the guard of fake ``cuda`` tensors, in a process that has not imported torch yet."""

import ctypes
import sys

from recipe.rloo.memory_study.fake_guard import compiled_guard


def load_guard():
    """Let autograd accept fake ``cuda`` tensors in this process.

    Raises:
        RuntimeError: torch was imported before.
        NoCompilerError: The C++ compiler is missing or fails.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the stand-in must be loaded before torch is imported: torch looks for an accelerator once")
    ctypes.CDLL(str(compiled_guard()))
