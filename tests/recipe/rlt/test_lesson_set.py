"""Lessons of a warm-up, read from files of questions, solutions and traces."""

import json
import logging

import pytest
from transformers import PreTrainedTokenizerFast

from verl_memopt.config.schema import Data
from verl_memopt.data.encoder import tokenize
from verl_memopt.errors import DataError
from verl_memopt.recipes.rlt.dataset import FORMATS, RltPrompts, RltRecord
from verl_memopt.recipes.rlt.lessons import NO_TRACE, Lesson, teacher_lesson, teacher_rows


def write(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(number, **more):
    return {"question": f"{number}?", "solution": f"{number}!", "reasoning_trace": f"because {number}", **more}


def settings(**more):
    return Data(**{"train_files": None, "val_files": None, "seed": 0, "max_prompt_length": 4000, **more})


def test_each_row_with_a_trace_is_the_teachers_lesson(tmp_path, tokenizer: PreTrainedTokenizerFast, caplog) -> None:
    path = write(tmp_path, row(1), row(2, reasoning_trace=None), row(3, solution=" "), row(4))
    with caplog.at_level(logging.WARNING):
        rows = teacher_rows(path, settings(), tokenizer, "train", "r1")
    prompts = RltPrompts(tokenizer, FORMATS["r1"])
    expected = [teacher_lesson(prompts, RltRecord(f"{n}?", f"{n}!", f"because {n}", "")) for n in (1, 4)]
    ids = tokenize(tokenizer, [row.text for row in rows], [row.plain for row in rows])
    assert [Lesson(prompt, list(row.response)) for prompt, row in zip(ids, rows, strict=True)] == expected
    assert [row.address for row in rows] == [f"{path}:1", f"{path}:4"]
    assert f"data.train_files: left out 1 rows: {NO_TRACE}" in caplog.messages


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"max_prompt_length": 60}, r"prompt has \d+ tokens, but data.max_prompt_length is 60"),
        ({"max_response_length": 40}, r"response has \d+ tokens, but data.max_response_length is 40"),
    ],
)
def test_a_long_row_is_refused_or_left_out(tmp_path, tokenizer: PreTrainedTokenizerFast, limit, reason) -> None:
    path = write(tmp_path, row(1), row(2, question="?" * 50, reasoning_trace="x" * 50))
    with pytest.raises(DataError, match=f"{path}:2: the {reason}.*filter_overlong_prompts=true"):
        teacher_rows(path, settings(**limit), tokenizer, "train", "short")
    rows = teacher_rows(path, settings(filter_overlong_prompts=True, **limit), tokenizer, "train", "short")
    assert [row.address for row in rows] == [f"{path}:1"]


def test_a_file_without_traces_is_refused(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path, row(1, reasoning_trace=None), row(2, reasoning_trace=None))
    with pytest.raises(DataError, match=r"data.val_files: no row can be learned from: there is no reasoning trace"):
        teacher_rows(path, settings(), tokenizer, "val", "short")
