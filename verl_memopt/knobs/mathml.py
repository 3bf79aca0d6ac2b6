"""Write Python expressions as mathematics: MathML, which browsers show without a script."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from html import escape

OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "−", ast.Mult: "·"}
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "=",
    ast.NotEq: "≠",
    ast.Lt: "<",
    ast.LtE: "≤",
    ast.Gt: ">",
    ast.GtE: "≥",
    ast.In: "∈",
    ast.NotIn: "∉",
    ast.Is: "is",
    ast.IsNot: "is not",
}
CONVERSIONS = ("int", "float", "bool", "str")
"""Functions that change the type of a value and not the value."""
SUBJECTS = {"before": "off", "after": "on"}
"""Name of an argument -> the subscript of what is read from it."""
_SUMS = (ast.Add, ast.Sub)


class Writer:
    """Write expressions whose attributes have symbols."""

    def __init__(self, symbols: Mapping[str, str]) -> None:
        """Keep the symbols.

        Args:
            symbols: name of an attribute -> its symbol, with a subscript after "_".
        """
        self._symbols = symbols

    def block(self, name: str, node: ast.expr) -> str:
        """Return ``name = expression`` as a block of its own; the name may be empty."""
        left = f"{_name(name)}<mo>=</mo>" if name else ""
        return f'<math display="block">{left}{self.write(node)}</math>'

    def inline(self, node: ast.expr) -> str:
        """Return an expression to stand in a line of text."""
        return f"<math>{self.write(node)}</math>"

    def write(self, node: ast.expr) -> str:
        """Return the MathML of an expression, without the ``math`` element."""
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=ast.BinOp(left=ast.UnaryOp(operand=top), op=ast.FloorDiv(), right=below)):
                return f"<mo>⌈</mo>{_fraction(self.write(top), self.write(below))}<mo>⌉</mo>"
            case ast.UnaryOp(op=ast.USub()):
                return f"<mo>−</mo>{self._factor(node.operand)}"
            case ast.UnaryOp(op=ast.Not()):
                return f"<mtext>not&nbsp;</mtext>{self.write(node.operand)}"
            case ast.BinOp(op=ast.Div()):
                return _fraction(self.write(node.left), self.write(node.right))
            case ast.BinOp(op=ast.FloorDiv()):
                return f"<mo>⌊</mo>{_fraction(self.write(node.left), self.write(node.right))}<mo>⌋</mo>"
            case ast.BinOp(op=ast.Pow()):
                return f"<msup>{_row(self._factor(node.left))}{_row(self.write(node.right))}</msup>"
            case ast.BinOp(op=ast.Mult()):
                return f"{self._factor(node.left)}<mo>·</mo>{self._factor(node.right)}"
            case ast.BinOp() if type(node.op) in OPERATORS:
                right = self._factor(node.right) if isinstance(node.op, ast.Sub) else self.write(node.right)
                return f"{self.write(node.left)}<mo>{OPERATORS[type(node.op)]}</mo>{right}"
            case ast.IfExp():
                return self._cases(node)
            case ast.Compare():
                parts = zip(node.ops, node.comparators, strict=True)
                more = "".join(f"<mo>{escape(COMPARISONS[type(op)])}</mo>{self.write(right)}" for op, right in parts)
                return self.write(node.left) + more
            case ast.BoolOp():
                word = "and" if isinstance(node.op, ast.And) else "or"
                return f"<mtext>&nbsp;{word}&nbsp;</mtext>".join(map(self.write, node.values))
            case ast.Call():
                return self._call(node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Name():
                return _name(node.id)
            case ast.Constant(value=bool() | None as word):
                return f"<mtext>{str(word).lower()}</mtext>"
            case ast.Constant(value=int() | float() as number):
                return f"<mn>{number:,}</mn>"
            case ast.Constant(value=str() as text):
                return f"<mtext>{escape(text)}</mtext>"
        return f"<mtext>{escape(ast.unparse(node))}</mtext>"

    def _factor(self, node: ast.expr) -> str:
        """Return an expression that can stand beside a product or a minus."""
        needs = isinstance(node, ast.IfExp) or (isinstance(node, ast.BinOp) and isinstance(node.op, _SUMS))
        return f"<mo>(</mo>{self.write(node)}<mo>)</mo>" if needs else self.write(node)

    def _cases(self, node: ast.IfExp) -> str:
        rows, rest = [], node
        while isinstance(rest, ast.IfExp):
            rows.append((self.write(rest.body), f"<mtext>if&nbsp;</mtext>{self.write(rest.test)}"))
            rest = rest.orelse  # type: ignore[assignment]
        rows.append((self.write(rest), "<mtext>otherwise</mtext>"))
        cells = "".join(f"<mtr><mtd>{_row(value)}</mtd><mtd>{_row(when)}</mtd></mtr>" for value, when in rows)
        return f'<mrow><mo>{{</mo><mtable columnalign="left left">{cells}</mtable></mrow>'

    def _call(self, node: ast.Call) -> str:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if function in CONVERSIONS and len(node.args) == 1:
            return self.write(node.args[0])
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if any(isinstance(argument, ast.GeneratorExp | ast.Starred) for argument in arguments) or function == "replace":
            return f"<mtext>{escape(ast.unparse(node))}</mtext>"
        return f"{_name(function)}<mo>(</mo>{'<mo>,</mo>'.join(map(self.write, arguments))}<mo>)</mo>"

    def _attribute(self, node: ast.Attribute) -> str:
        subject = node.value.id if isinstance(node.value, ast.Name) else ""
        if node.attr not in self._symbols:
            return _with_subscript(_name(node.attr), SUBJECTS.get(subject, ""))
        letter, _, below = self._symbols[node.attr].partition("_")
        marks = [part for part in (below, SUBJECTS.get(subject, "")) if part]
        return _with_subscript(f"<mi>{letter}</mi>", ", ".join(marks))


def _fraction(top: str, below: str) -> str:
    return f"<mfrac>{_row(top)}{_row(below)}</mfrac>"


def _row(content: str) -> str:
    return f"<mrow>{content}</mrow>"


def _name(name: str) -> str:
    """Return a name as it stands in the code; a single letter is a variable of mathematics."""
    return f"<mi>{name}</mi>" if len(name) == 1 else f"<mtext>{escape(name.strip('_'))}</mtext>"


def _with_subscript(base: str, below: str) -> str:
    return f"<msub>{_row(base)}<mtext>{below}</mtext></msub>" if below else base
