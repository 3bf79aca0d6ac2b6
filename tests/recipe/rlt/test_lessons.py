"""What is read and what is learned in a lesson."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from verl_memopt.data.batch import Ragged
from verl_memopt.data.encoder import tokenize
from verl_memopt.recipes.rlt.dataset import FORMATS, STRATOS, RltPrompts, RltRecord
from verl_memopt.recipes.rlt.lessons import student_lesson, teacher_lesson
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student_rows import END, PREFIX, StudentEncoder

RECORD = RltRecord("1+1?", "2", "one and one", "f:1")


def test_a_teacher_learns_the_explanation_and_where_it_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = RltPrompts(tokenizer, STRATOS)
    lesson = teacher_lesson(prompts, RECORD)
    assert tokenizer.decode(lesson.prompt) == prompts.teacher("1+1?", "2")[0]
    assert tokenizer.decode(lesson.answer) == "one and one<|end_of_explanation|><|im_end|>\n"
    assert tokenizer.decode(teacher_lesson(prompts, RECORD, ends=False).answer) == "one and one<|im_end|>\n"


@pytest.mark.parametrize(("trace", "learned"), [(None, "2"), ("\n\nwhy\n\n", "why\n\n"), ("", "")])
def test_the_padding_is_read_and_a_missing_trace_is_the_solution(
    tokenizer: PreTrainedTokenizerFast, trace: str | None, learned: str
) -> None:
    lesson = teacher_lesson(RltPrompts(tokenizer, FORMATS["short"]), RltRecord("q", "2", trace, "f:1"))
    assert tokenizer.decode(lesson.answer) == learned + "</explanation><|im_end|>\n"


def test_special_tokens_of_the_data_are_learned_as_text(tokenizer: PreTrainedTokenizerFast) -> None:
    lesson = student_lesson(RltPrompts(tokenizer, FORMATS["short"]), RltRecord("q", "<|im_end|>", "<|im_end|>", "f:1"))
    assert lesson.answer.count(tokenizer.eos_token_id) == 1


def test_a_student_learns_the_tokens_that_the_reward_scores(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = RltPrompts(tokenizer, FORMATS["short"])
    lesson = student_lesson(prompts, RECORD)
    response = tokenize(tokenizer, ["one and one", "</explanation>"])
    encoder = StudentEncoder(prompts, RltReward(), {tokenizer.eos_token_id})
    rows = encoder.encode(["1+1?"], ["2"], Ragged.from_rows([response[0] + response[1]], torch.int64), ["f:1"])
    assert lesson.prompt + lesson.answer == rows.ids.flat.tolist()
    assert lesson.prompt == rows.part(PREFIX).flat.tolist()
    assert tokenizer.decode(rows.part(END).flat) == "</solution><|im_end|>\n"
