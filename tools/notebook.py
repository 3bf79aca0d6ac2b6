"""Runs a notebook's cells in one namespace, as Jupyter would, and writes their outputs into the notebook.

``python -m tools.notebook examples/memory_optimization/quick_start.ipynb`` does this for one file. It needs no Jupyter.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run_cell(source: str, space: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell, and return its outputs: the printed text, and the value of its last line."""
    tree, printed, value = ast.parse(source), io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        if tree.body and isinstance(last := tree.body[-1], ast.Expr):
            exec(compile(ast.Module(tree.body[:-1], []), "<cell>", "exec"), space)
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), space)
        else:
            exec(compile(tree, "<cell>", "exec"), space)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append(
            {"output_type": "stream", "name": "stdout", "text": portable(printed.getvalue()).splitlines(keepends=True)}
        )
    if value is not None:
        data = {"text/plain": [portable(repr(value))]}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = [portable(value._repr_html_())]
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def portable(text: str) -> str:
    """Remove the paths of this machine from a text: the working folder, and the folder of the Python environment."""
    return text.replace(f"{Path.cwd()}/", "").replace(f"{sys.prefix}/bin/", "")


def run_notebook(notebook: dict[str, Any]) -> None:
    """Run all cells, and replace the old outputs."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = run_cell("".join(cell["source"]), space)


def main(file: str) -> None:
    path = Path(file).absolute()
    notebook = json.loads(path.read_text(encoding="utf-8"))
    run_notebook(notebook)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
