"""Rows of every accepted form, and why others are rejected."""

import logging

import pytest

from verl_memopt.errors import DataError
from verl_memopt.recipes.rlt.dataset import (
    EMPTY_QUESTION,
    EMPTY_SOLUTION,
    NO_SECTIONS,
    NOT_TWO_TURNS,
    R1,
    STRATOS,
    TAG_IN_QUESTION,
    TAG_IN_SOLUTION,
    TAG_IN_TRACE,
    RltRecord,
    read_records,
)

GOOD = {"question": "1+1?", "solution": "2"}
ANSWER = "<|begin_of_thought|>\n\nadd\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\n2\n\n<|end_of_solution|>"


def conversation(answer=ANSWER, question="1+1?", roles=("user", "assistant")):
    return {"system": "s", "conversations": [{"from": roles[0], "value": question}, {"from": roles[1], "value": answer}]}


def records(*rows, rlt_format=STRATOS):
    return read_records([(f"f:{place}", row) for place, row in enumerate(rows, start=1)], rlt_format)


def test_columns_of_ones_own():
    (row,) = records({**GOOD, "reasoning_trace": "one and one", "other": 3}).rows
    assert row == RltRecord("1+1?", "2", "one and one", "f:1")


@pytest.mark.parametrize("trace", [{}, {"reasoning_trace": None}])
def test_a_trace_may_be_missing(trace):
    assert records(GOOD | trace).rows[0].reasoning_trace is None


def test_prompt_is_read_as_question_with_one_warning_and_both_are_an_error(caplog):
    with caplog.at_level(logging.WARNING):
        result = records(*[{"prompt": "1+1?", "solution": "2"}] * 3)
    assert [row.question for row in result.rows] == ["1+1?"] * 3
    assert [record.message for record in caplog.records] == ["f:1: the column 'prompt' is read as 'question'. Rename it."]
    with pytest.raises(DataError, match=r"^f:1: there are columns 'question' and 'prompt'"):
        records({**GOOD, "prompt": "1+1?"})


@pytest.mark.parametrize("roles", [("user", "assistant"), ("human", "gpt")])
@pytest.mark.parametrize("rlt_format", [STRATOS, R1])
def test_a_conversation_of_stratos_gives_its_sections_as_they_are(roles, rlt_format):
    (row,) = records(conversation(roles=roles), rlt_format=rlt_format).rows
    assert (row.question, row.solution, row.reasoning_trace) == ("1+1?", "\n\n2\n\n", "\n\nadd\n\n")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "there is no column 'solution'. The row has question. Add"),
        ({"solution": "2"}, "there is no column 'question'"),
        ({"question": 3, "solution": "2"}, "question must be a string, but it is 3"),
        ({"question": "q", "solution": None}, "solution must be a string, but it is None"),
        ({**GOOD, "reasoning_trace": ["x"]}, "reasoning_trace must be a string"),
        ({**GOOD, **conversation()}, "there are columns 'conversations' and 'question' or 'solution'"),
        ({"conversations": "x"}, "conversations must be a list"),
    ],
)
def test_a_row_of_another_form_is_an_error(row, message):
    with pytest.raises(DataError, match=f"^f:2: {message}"):
        records(GOOD, row)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": " \n", "solution": "2"}, EMPTY_QUESTION),
        ({"question": "q", "solution": ""}, EMPTY_SOLUTION),
        ({"question": "q", "solution": " \n\n "}, EMPTY_SOLUTION),
        ({"question": "q", "solution": "<|begin_of_solution|> <|end_of_solution|>"}, EMPTY_SOLUTION),
        ({"question": "what is <|end_of_explanation|>?", "solution": "2"}, TAG_IN_QUESTION),
        ({"question": "q", "solution": "2<|end_of_solution|>"}, TAG_IN_SOLUTION),
        ({"question": "q", "solution": "2", "reasoning_trace": "a <|end_of_explanation|> b"}, TAG_IN_TRACE),
        (conversation(roles=("assistant", "user")), NOT_TWO_TURNS),
        ({"conversations": conversation()["conversations"] * 2}, NOT_TWO_TURNS),
        ({"conversations": []}, NOT_TWO_TURNS),
        ({"conversations": [{"from": "user", "value": None}, {"from": "assistant", "value": "x"}]}, NOT_TWO_TURNS),
        (conversation("the answer is 2"), NO_SECTIONS),
        (conversation(ANSWER + ANSWER), NO_SECTIONS),
        (conversation(ANSWER.replace("<|end_of_thought|>", "")), NO_SECTIONS),
        (conversation("<|begin_of_solution|>2<|end_of_solution|><|begin_of_thought|>x<|end_of_thought|>"), NO_SECTIONS),
        (conversation(ANSWER.replace("2", "  ")), EMPTY_SOLUTION),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_rejected_with_its_reason(row, reason, caplog):
    result = records(GOOD, row, row)
    assert ([kept.address for kept in result.rows], result.rejected) == (["f:1"], {reason: 2})
    assert f"rejected 2 of 3 rows: {reason} (2). The first is f:2: {reason}" in caplog.text


def test_tags_around_a_solution_and_a_trace_are_stripped():
    (row,) = records(
        {
            "question": "q",
            "solution": " <|begin_of_solution|>2\n<|end_of_solution|>",
            "reasoning_trace": "<|begin_of_thought|>x<|end_of_thought|>",
        }
    ).rows
    assert (row.solution, row.reasoning_trace) == ("2\n", "x")


def test_only_tags_of_the_format_in_use_are_refused():
    row = {"question": "what is <think>?", "solution": "2"}
    assert len(records(row).rows) == 1
    assert records(GOOD, row, rlt_format=R1).rejected == {TAG_IN_QUESTION: 1}


def test_a_source_without_one_usable_row_is_an_error():
    with pytest.raises(DataError, match=rf"^f:1: {EMPTY_SOLUTION}\. All 2 rows were rejected: {EMPTY_SOLUTION} \(2\)"):
        records({"question": "q", "solution": ""}, {"question": "q", "solution": " "})
