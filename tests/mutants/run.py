"""Runs mutmut with two additions: `python tests/mutants/run.py run [mutant ...]`, and every other command of mutmut.

mutmut leaves decorated functions alone. Properties and context managers are safe to mutate once the copies that mutmut makes of
them have no decorator: the one on the outside stays. `Residency.phase` is such a function.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import libcst as cst
from mutmut.__main__ import cli
from mutmut.mutation import file_mutation

SAFE_DECORATORS = ("property", "contextmanager")

SURVIVED = (0, 5, 33)
"""Exit codes of a mutant's process: pytest's "all passed" and "nothing to run", and mutmut's "no test reaches it"."""

skip_as_mutmut_does = file_mutation.MutationVisitor._skip_node_and_children
arrange_as_mutmut_does = file_mutation.function_trampoline_arrangement


def is_safe(decorator):
    return isinstance(decorator.decorator, cst.Name) and decorator.decorator.value in SAFE_DECORATORS


def skip(visitor, node):
    if isinstance(node, cst.FunctionDef) and len(node.decorators) == 1 and is_safe(node.decorators[0]):
        return False
    return skip_as_mutmut_does(visitor, node)


def arrange(function, mutants, class_name):
    tables, nodes, entries, names = arrange_as_mutmut_does(function, mutants, class_name=class_name)
    trampoline, *copies = nodes
    bare = [copy.with_changes(decorators=[each for each in copy.decorators if not is_safe(each)]) for copy in copies]
    return tables, [trampoline, *bare], entries, names


def forget_survivors(folder=Path("mutants")):
    """Make mutmut try the survivors again and find out again which test reaches what, because tests may have changed."""
    shutil.rmtree(folder / "tests", ignore_errors=True)
    (folder / "mutmut-stats.json").unlink(missing_ok=True)
    for path in folder.rglob("*.py.meta"):
        meta = json.loads(path.read_text())
        meta["exit_code_by_key"] = {name: None if code in SURVIVED else code for name, code in meta["exit_code_by_key"].items()}
        path.write_text(json.dumps(meta))


if __name__ == "__main__":
    file_mutation.MutationVisitor._skip_node_and_children = skip
    file_mutation.function_trampoline_arrangement = arrange
    if sys.argv[1:2] == ["run"]:
        forget_survivors()
    cli()
