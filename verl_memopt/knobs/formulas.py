"""Write ``docs/formulas.md`` from the code that computes it: ``python -m verl_memopt.knobs.formulas > docs/formulas.md``."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from verl_memopt.knobs import shapes
from verl_memopt.knobs.knob import knobs
from verl_memopt.knobs.mathml import Writer
from verl_memopt.knobs.values import LOSSES_OF_SEQUENCES

HEAD = """# Formulas

Written by `python -m verl_memopt.knobs.formulas` from the code that computes them (`verl_memopt/knobs/`). The ladder,
`verl-memopt knobs --measure`, compares each with the bytes that it counts. A subscript *off* or *on* says whether the knob is;
`/ W` for W ranks that share a model is left out. Names in upright letters are settings, or are defined further down.
"""

SYMBOLS = {
    "layers": ("L", "decoder blocks"),
    "hidden": ("h", "hidden size"),
    "mlp": ("I", "width of the MLP"),
    "heads": ("H", "query heads"),
    "kv_heads": ("K", "key and value heads"),
    "head_dim": ("D", "size of a head"),
    "vocab": ("V", "rows of the vocabulary"),
    "params": ("N", "parameters of the model, a tied matrix once"),
    "block_params": ("N_l", "parameters of one decoder block"),
    "linear_params": ("N_b", "parameters of the linear layers of all blocks"),
    "tokens": ("T", "tokens computed in the largest micro-batch"),
    "responses": ("R", "response tokens of that micro-batch"),
    "suffix_tokens": ("S", "its computed tokens that are answers sharing a prompt"),
    "skipped": ("U", "its computed tokens that the last block skips"),
    "compute_bytes": ("b", "bytes of an element of an activation"),
    "master_bytes": ("b_w", "bytes of an element of the policy's weights and gradients at rest"),
    "state_bytes": ("b_o", "bytes of both moments of a parameter"),
    "reference_bytes": ("B_ref", "bytes of the reference's parameters at rest"),
    "input_bytes": ("X", "bytes of a block's input"),
    "block_bytes": ("A", "bytes that a block keeps for its backward"),
    "activation_bytes": ("B_act", "bytes of activations at the peak of the update"),
}
"""Attribute of :class:`verl_memopt.knobs.shapes.Shapes` -> its symbol, and what it is."""

_WRITER = Writer({name: symbol for name, (symbol, _) in SYMBOLS.items()})


def page() -> str:
    """Return the page's text."""
    parts = [HEAD, _symbols(), "## What each knob saves\n", *_savings(), "## Definitions\n", *_definitions(), *_constants()]
    return "\n".join(parts)


def _symbols() -> str:
    rows = "".join(f"| {_WRITER.inline(_expression(f'self.{name}'))} | {words} |\n" for name, (_, words) in SYMBOLS.items())
    return f"| symbol | meaning |\n|---|---|\n{rows}"


def _savings() -> Iterator[str]:
    for knob in knobs():
        claims = _claims(_module(knob.name))
        if claims:
            yield f"### {knob.name}\n"
        for phase, kind, formula in claims:
            yield f"In `{phase}`, of {kind}:\n\n{_WRITER.block('saved', formula)}\n"


def _claims(module: ModuleType) -> list[tuple[str, str, ast.expr]]:
    """Return (phase, kind, formula) of every claim of a knob's file; the formula of a named function is its last line."""
    claims = []
    for call in ast.walk(_tree(module)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Claim":
            phase, kind, formula = call.args
            claims.append((ast.literal_eval(phase), ast.literal_eval(kind), _body(module, formula)))
    return claims


def _body(module: ModuleType, formula: ast.expr) -> ast.expr:
    if isinstance(formula, ast.Lambda):
        return formula.body
    called = formula.func if isinstance(formula, ast.Call) else formula
    assert isinstance(called, ast.Name), ast.unparse(formula)
    function = _functions(module).get(called.id) or _functions(shapes)[called.id]
    returned = function.body[-1]
    assert isinstance(returned, ast.Return), f"{called.id} ends with a return"
    assert returned.value is not None
    if not isinstance(returned.value, ast.Lambda):
        return returned.value
    # A function that makes the formula: its arguments stand for those of the call.
    assert isinstance(formula, ast.Call)
    arguments = {argument.arg: value for argument, value in zip(function.args.args, formula.args, strict=True)}
    return _Replaced(arguments).visit(copy.deepcopy(returned.value.body))


class _Replaced(ast.NodeTransformer):
    def __init__(self, arguments: dict[str, ast.expr]) -> None:
        self._arguments = arguments

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._arguments.get(node.id, node)


def _definitions() -> Iterator[str]:
    """Yield the functions that savings are made of: those of the knobs' files, then the sizes of a model."""
    for knob in knobs():
        module = _module(knob.name)
        used = [name for name in _functions(module) if _claims(module) and _is_size(module, name)]
        for name in used:
            yield from _definition(_functions(module)[name])
    for name, function in _functions(shapes).items():
        if name not in ("activation_saving", "width"):
            yield from _definition(function)


def _is_size(module: ModuleType, name: str) -> bool:
    """Return whether a function of a knob's file computes a size that a claim's formula calls by its name."""
    formulas = (formula for _, _, formula in _claims(module))
    return any(isinstance(node, ast.Name) and node.id == name for formula in formulas for node in ast.walk(formula))


def _definition(function: ast.FunctionDef) -> Iterator[str]:
    symbol = SYMBOLS.get(function.name)
    yield f"### {function.name.strip('_')}{'' if symbol is None else f' ({symbol[0]})'}\n"
    yield f"{_first_line(function)}\n"
    yield from _statements(function.body, function.name)


def _first_line(function: ast.FunctionDef) -> str:
    return (ast.get_docstring(function) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "`")


def _statements(body: list[ast.stmt], name: str) -> Iterator[str]:
    for statement in body:
        match statement:
            case ast.Expr():
                continue
            case ast.Assign(targets=[ast.Tuple() as names], value=ast.Tuple() as values):
                for target, value in zip(names.elts, values.elts, strict=True):
                    yield from _assigned(ast.unparse(target), value)
            case ast.Assign(targets=[target]):
                yield from _assigned(ast.unparse(target), statement.value)
            case ast.Return(value=ast.expr() as value):
                yield _WRITER.block(name.strip("_"), value) + "\n"
            case ast.If():
                yield f"If {_WRITER.inline(statement.test)}:\n"
                yield from _statements(statement.body, name)
                if isinstance(statement.body[-1], ast.Return):
                    yield "Otherwise:\n"
            case _:
                raise AssertionError(f"no way to write {ast.unparse(statement)} as a formula")


def _assigned(name: str, value: ast.expr) -> Iterator[str]:
    if "settings." not in f"{ast.unparse(value)}." or not isinstance(value, ast.Attribute):  # an alias of a section says nothing
        yield _WRITER.block(name, value) + "\n"


def _constants() -> Iterator[str]:
    values = {name: value for name, value in vars(shapes).items() if name.isupper() and type(value) is int}
    yield "### Constants\n"
    yield from (f"`{name}` = {value:,}\n" for name, value in values.items())
    yield f"`LOSSES_OF_SEQUENCES` = {', '.join(LOSSES_OF_SEQUENCES)}\n"


@cache
def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


@cache
def _functions(module: ModuleType) -> dict[str, ast.FunctionDef]:
    """Return the functions, and the methods and properties of classes, of a module."""
    return {node.name: node for node in ast.walk(_tree(module)) if isinstance(node, ast.FunctionDef)}


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"verl_memopt.knobs.{name}")


assert {field.name for field in dataclasses.fields(shapes.Shapes)} - SYMBOLS.keys() == {"settings", "tied"}

if __name__ == "__main__":
    sys.stdout.write(page())
