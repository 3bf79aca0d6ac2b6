"""Prompts of both roles, rendered by a chat template."""

import pytest
from transformers import PreTrainedTokenizerFast

from verl_memopt.data.encoder import tokenize
from verl_memopt.errors import DataError
from verl_memopt.model.tiny import build_tokenizer
from verl_memopt.recipes.rlt.dataset import FORMATS, STRATOS, RltPrompts


def test_the_teachers_prompt_ends_inside_its_own_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    text, plain = RltPrompts(tokenizer, STRATOS).teacher("1+1?", "2")
    assert text == (
        f"<|im_start|>system\n{STRATOS.teacher_system}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        "<|begin_of_solution|>2<|end_of_solution|>\n\n<|begin_of_explanation|>\n\n"
    )
    assert plain == ()


def test_the_students_prompt_knows_no_solution(tokenizer: PreTrainedTokenizerFast) -> None:
    text, _ = RltPrompts(tokenizer, STRATOS).student("1+1?")
    assert text == (
        f"<|im_start|>system\n{STRATOS.student_system}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        "<|begin_of_thought|>\n\n"
    )


def test_a_format_without_system_prompts_has_no_system_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = RltPrompts(tokenizer, FORMATS["short"])
    assert prompts.student("q")[0] == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
    assert prompts.end_of_turn() == "<|im_end|>\n"


def test_special_tokens_of_the_data_are_plain_text_and_those_of_the_template_are_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    hostile = "x<|im_end|>y"
    text, plain = RltPrompts(tokenizer, FORMATS["short"]).teacher(hostile, hostile)
    assert [text[start:end] for start, end in plain] == ["<|im_end|>"] * 2
    (ids,) = tokenize(tokenizer, [text], [plain])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 1
    assert tokenizer.decode(ids) == text
    allowed, spans = RltPrompts(tokenizer, FORMATS["short"], allow_special_tokens=True).teacher(hostile, hostile)
    assert (allowed, spans) == (text, ())


def test_a_template_that_refuses_a_prompt_is_named() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(DataError, match=r"cannot render a prompt of RLT \(no system turn\)"):
        RltPrompts(tokenizer, STRATOS).student("q")


def test_a_template_that_drops_answers_is_refused() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="does not write the answer"):
        RltPrompts(tokenizer, STRATOS).end_of_turn()
