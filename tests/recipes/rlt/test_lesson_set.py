"""Lessons of a warm-up, read from files of questions, solutions and traces."""

import json
import logging

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from verl_memopt.config.schema import Data
from verl_memopt.errors import DataError
from verl_memopt.recipes.rlt.dataset import EMPTY_SOLUTION, FORMATS, RltPrompts, RltRecord
from verl_memopt.recipes.rlt.lessons import (
    ANSWER_TOO_LONG,
    NO_TRACE,
    PROMPT_TOO_LONG,
    Lesson,
    lesson_batch,
    read_lessons,
    teacher_lesson,
)


def write(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(number, **more):
    return {"question": f"{number}?", "solution": f"{number}!", "reasoning_trace": f"because {number}", **more}


def settings(**more):
    return Data(**{"train_files": None, "val_files": None, "seed": 0, "max_prompt_length": 4000, **more})


def test_each_row_with_a_trace_is_the_teachers_lesson(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path, row(1), row(2, reasoning_trace=None), row(3, solution=" "), row(4))
    lessons = read_lessons(path, settings(), tokenizer, "train", "r1")
    prompts = RltPrompts(tokenizer, FORMATS["r1"])
    expected = [teacher_lesson(prompts, RltRecord(f"{n}?", f"{n}!", f"because {n}", "")) for n in (1, 4)]
    assert lessons.lessons == [lessons[0], lessons[1]] == expected
    assert lessons.names == [f"{path}:1", f"{path}:4"]
    assert lessons.rejected == {EMPTY_SOLUTION: 1, NO_TRACE: 1}


@pytest.mark.parametrize(
    ("limit", "reason"), [({"max_prompt_length": 60}, PROMPT_TOO_LONG), ({"max_response_length": 40}, ANSWER_TOO_LONG)]
)
def test_a_long_row_is_refused_or_left_out_and_counted(
    tmp_path, tokenizer: PreTrainedTokenizerFast, caplog, limit, reason
) -> None:
    path = write(tmp_path, row(1), row(2, question="?" * 50, reasoning_trace="x" * 50))
    with pytest.raises(DataError, match=f"{path}:2: {reason}.*filter_overlong_prompts=true"):
        read_lessons(path, settings(**limit), tokenizer, "train", "short")
    with caplog.at_level(logging.WARNING):
        lessons = read_lessons(path, settings(filter_overlong_prompts=True, **limit), tokenizer, "train", "short")
    assert len(lessons) == 1
    assert lessons.rejected == {reason: 1}
    assert f"data.train_files: left out 1 rows: {reason}" in caplog.messages


def test_a_file_without_traces_is_refused(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path, row(1, reasoning_trace=None), row(2, reasoning_trace=None))
    with pytest.raises(DataError, match=r"data.val_files: no row can be learned from: there is no reasoning trace.* \(2\)"):
        read_lessons(path, settings(), tokenizer, "val", "short")


def test_a_batch_has_an_advantage_of_one_for_each_answer_token_and_no_other() -> None:
    batch = lesson_batch([Lesson([5, 6, 7], [8, 9]), Lesson([10], [11])])
    assert [row.tolist() for row in batch.prompts.rows()] == [[5, 6, 7], [10]]
    assert [row.tolist() for row in batch.responses.rows()] == [[8, 9], [11]]
    assert torch.equal(batch.advantages, torch.ones(3))
    assert batch.prompt_groups() == [0, 1]
