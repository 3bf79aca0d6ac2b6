import json

import pytest

from benchmarks.rlt_student.__main__ import main, random_rows
from verl_memopt.recipes.rlt.student_rows import END, SOLUTION, THINK

SMALL = [
    "--questions", "4", "--samples", "4", "--layers", "1", "--hidden", "128", "--vocabulary", "320", "--rows", "2",
    "--think", "8", "--solution", "4", "--repeats", "1", "--warm-up", "3",
]  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    file = tmp_path_factory.mktemp("benchmark") / "result.json"
    assert main([*SMALL, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_each_precision_has_its_ranks_its_bytes_and_its_speed(result):
    pairs = {"bf16 weights against fp32", "bf16 against fp32", "int8 against bf16", "nf4 against bf16"}
    assert {name for name in result["toy"] if "against" in name} == pairs
    assert 4 < result["toy"]["rows"] <= 16
    sizes = [result["shape"][kind]["bytes"] for kind in ("fp32", "bf16", "int8", "nf4")]
    assert sizes == sorted(sizes, reverse=True)
    assert result["shape"]["fp32"]["linear_bytes_per_parameter"] == 4.0
    assert result["shape"]["bf16"]["linear_bytes_per_parameter"] == 2.0
    for side in ("chunked", "whole"):
        assert result["logits"][side]["tokens_per_second"] > 0


def test_rows_of_a_question_share_prompt_and_solution_and_no_explanation():
    rows = random_rows(2, 3, 8, 4, 50)
    thoughts, solutions = ([part.tolist() for part in rows.part(which).rows()] for which in (THINK, SOLUTION))
    assert len({tuple(thought) for thought in thoughts}) == 6
    assert solutions[:3] == [solutions[0]] * 3
    assert solutions[0] != solutions[3]
    assert [len(part) for part in rows.part(END).rows()] == [2] * 6
