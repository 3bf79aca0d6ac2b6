"""Imported once by the server from which the processes of cells are forked: the fake GPU's guard, then what a cell imports.

The guard must be loaded before torch. A machine with a GPU has a real one and must not import this file.
"""

import importlib
from contextlib import suppress

from recipe.rloo.memory_study import fake_guard

# Without a compiler there is no guard. Then a cell that needs it fails with this error, and says so.
with suppress(fake_guard.NoCompilerError):
    fake_guard.load(str(fake_guard.compiled_guard()))

for module in ("transformers.models.auto.tokenization_auto", "transformers.models.qwen3.modeling_qwen3"):
    importlib.import_module(module)
importlib.import_module("recipe.rloo.memory_study.measure")
