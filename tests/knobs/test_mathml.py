import ast

import pytest

from verl_memopt.knobs.mathml import Writer

WRITER = Writer({"layers": "L", "params": "N", "master_bytes": "b_w"})


def written(text):
    """Returns an expression as MathML without the marks of rows and texts, which say nothing to a reader."""
    mathml = WRITER.write(ast.parse(text, mode="eval").body)
    for mark in ("mrow", "mtext", "mi", "mn", "mo"):
        mathml = mathml.replace(f"<{mark}>", "").replace(f"</{mark}>", "")
    return mathml.replace("&nbsp;", " ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("self.layers * (self.params - 1)", "L·(N−1)"),
        ("self.layers - (self.params - 1)", "L−(N−1)"),
        ("self.layers - self.params - 1", "L−N−1"),
        ("before.params - after.params", "<msub>Noff</msub>−<msub>Non</msub>"),
        ("after.master_bytes", "<msub>bw, on</msub>"),
        ("a / b", "<mfrac>ab</mfrac>"),
        ("a // b", "⌊<mfrac>ab</mfrac>⌋"),
        ("-(-a // b)", "⌈<mfrac>ab</mfrac>⌉"),
        ("2 ** 16", "<msup>216</msup>"),
        ("16384", "16,384"),
        ("max(a, b + 1)", "max(a,b+1)"),
        ("int(a)", "a"),
        ("a and not b or c <= 1", "a and not b or c≤1"),
        ("model.tiled_mlp.enabled", "enabled"),
        ("sum(x for x in y)", "sum((x for x in y))"),
    ],
)
def test_an_expression_is_written_as_mathematics(text, expected):
    assert written(text) == expected


def test_a_choice_is_written_as_cases():
    cases = written("a if b else c if d else 0")
    assert [cases.count(word) for word in ("<mtr>", "if ", "otherwise")] == [3, 2, 1]


def test_a_comparison_does_not_break_the_page():
    assert WRITER.write(ast.parse("a < b", mode="eval").body) == "<mi>a</mi><mo>&lt;</mo><mi>b</mi>"
