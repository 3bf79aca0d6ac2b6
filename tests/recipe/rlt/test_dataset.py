"""The data of RLT: tags, prompts, rows of every accepted form, the dataset of a run, and prepared files."""

import json
import logging
from pathlib import Path

import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from recipe.rlt.prepare_rlt import prepare_rlt, token_lengths
from tests.rlt import data_of, write
from verl_memopt.data.encoder import tokenize
from verl_memopt.data.sources import NAMES_OF_SPLITS, files_of_split, read_source
from verl_memopt.errors import DataError
from verl_memopt.model.tiny import build_tokenizer
from verl_memopt.recipes.rlt.dataset import (
    EMPTY_QUESTION,
    EMPTY_SOLUTION,
    FORMATS,
    NO_SECTIONS,
    NOT_TWO_TURNS,
    R1,
    STRATOS,
    TAG_IN_QUESTION,
    TAG_IN_SOLUTION,
    TAG_IN_TRACE,
    TOO_LONG,
    RltDataset,
    RltPrompts,
    RltRecord,
    TagPair,
    read_records,
)


def row(number, **more):
    return {"question": f"{number}?", "solution": f"{number}!", **more}


def test_rows_are_teacher_prompts_with_what_the_reward_needs(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "rows.jsonl", row(1, reasoning_trace="why"), row(2, solution=" "), row(3))
    rows = RltDataset(path, data_of(), tokenizer, "train")
    assert rows.rejected == {EMPTY_SOLUTION: 1}
    assert [(each.index, each.address) for each in rows] == [(0, f"{path}:1"), (1, f"{path}:3")]
    first = rows[0]
    assert first.text == RltPrompts(tokenizer, STRATOS).teacher("1?", "1!")[0]
    assert first.text.endswith(STRATOS.forced_prefix)
    assert (first.data_source, first.ground_truth) == ("rlt", "1!")
    assert first.extra_info == {"question": "1?", "solution": "1!", "reasoning_trace": "why"}


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_limit_takes_the_first_rows_or_a_random_choice(tmp_path, tokenizer: PreTrainedTokenizerFast, split) -> None:
    path = write(tmp_path / "rows.jsonl", *map(row, range(20)))

    def questions(**more):
        data = data_of(train_max_samples=3, val_max_samples=3, **more)
        return [each.extra_info["question"] for each in RltDataset(path, data, tokenizer, split, "short")]

    shuffled = {"train": {"shuffle": True}, "val": {"validation_shuffle": True}}[split]
    assert questions(shuffle=False) == ["0?", "1?", "2?"]
    assert questions(**shuffled) not in (["0?", "1?", "2?"], questions(**shuffled, seed=1))
    assert questions(**shuffled) == questions(**shuffled)


def test_a_long_prompt_is_an_error_or_a_counted_rejection(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "rows.jsonl", row(1), row(2, solution="long " * 50), row(3))
    limit = {"max_prompt_length": 120}
    with pytest.raises(DataError, match=r"rows.jsonl:2: the prompt has \d+ tokens, but data.max_prompt_length is 120"):
        RltDataset(path, data_of(**limit), tokenizer, "train", "short")
    rows = RltDataset(path, data_of(**limit, filter_overlong_prompts=True), tokenizer, "train", "short")
    assert ([(each.index, each.ground_truth) for each in rows], rows.rejected) == ([(0, "1!"), (1, "3!")], {TOO_LONG: 1})
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*the shortest of 3 and has \d+ tokens"):
        RltDataset(path, data_of(max_prompt_length=5, filter_overlong_prompts=True), tokenizer, "train", "short")


def test_prompts_cannot_be_cut_and_a_template_that_fails_names_the_row(tmp_path, tokenizer, monkeypatch) -> None:
    path = write(tmp_path / "rows.jsonl", row(1))
    with pytest.raises(DataError, match=r"^data.truncation=left: a prompt of RLT ends with the solution and a tag"):
        RltDataset(path, data_of(truncation="left"), tokenizer, "train")
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no') }}")
    with pytest.raises(DataError, match=r"rows.jsonl:1: the chat template cannot render"):
        RltDataset(path, data_of(), tokenizer, "train")


# Tags and prefixes of both families.


@pytest.mark.parametrize("name", FORMATS)
def test_both_turns_are_sections_in_tags_of_which_none_contains_another(name):
    chosen = FORMATS[name]
    solution, explanation = chosen.solution, chosen.explanation
    expected = f"{solution.begin}42{solution.end}\n\n{explanation.begin}\n\n"
    assert chosen.teacher_prefill("42") == expected
    assert expected.endswith(chosen.forced_prefix)
    whole = chosen.student_opening + "why" + chosen.bridge + "42" + solution.end
    assert whole == f"{chosen.thought.begin}\n\nwhy{chosen.thought.end}\n\n{solution.wrap('42')}"
    assert len(chosen.tags) == 6
    assert not [(one, other) for one in chosen.tags for other in chosen.tags if one != other and one in other]


@pytest.mark.parametrize("chosen", [STRATOS, R1])
def test_system_prompts_spell_out_the_tags_of_both_sections(chosen):
    assert all(tag in chosen.teacher_system for pair in (chosen.solution, chosen.explanation) for tag in (pair.begin, pair.end))
    assert all(tag in chosen.student_system for pair in (chosen.solution, chosen.thought) for tag in (pair.begin, pair.end))
    assert chosen.explanation.begin not in chosen.student_system


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" <a>x\n</a>\n", "x\n"), ("<a></a>", ""), ("<a>x", "<a>x"), ("x </a>", "x </a>"), (" x ", " x "), ("<a/a>", "<a/a>")],
)
def test_only_a_whole_pair_around_a_text_is_stripped(text, expected):
    assert TagPair("<a>", "</a>").unwrap(text) == expected
    assert TagPair("<<", "<<").unwrap("<<<") == "<<<", "tags that overlap are no pair"


# Prompts of both roles, rendered by a chat template.


def test_prompts_of_both_roles_end_inside_their_own_turns_and_the_students_knows_no_solution(tokenizer) -> None:
    text, plain = RltPrompts(tokenizer, STRATOS).teacher("1+1?", "2")
    assert text == (
        f"<|im_start|>system\n{STRATOS.teacher_system}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        "<|begin_of_solution|>2<|end_of_solution|>\n\n<|begin_of_explanation|>\n\n"
    )
    assert plain == ()
    text, _ = RltPrompts(tokenizer, STRATOS).student("1+1?")
    assert text == (
        f"<|im_start|>system\n{STRATOS.student_system}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        "<|begin_of_thought|>\n\n"
    )
    prompts = RltPrompts(tokenizer, FORMATS["short"])  # no system prompt and no system turn
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


def test_a_template_that_refuses_a_prompt_or_drops_answers_is_named() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(DataError, match=r"cannot render a prompt of RLT \(no system turn\)"):
        RltPrompts(tokenizer, STRATOS).student("q")
    tokenizer.chat_template = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="does not write the answer"):
        RltPrompts(tokenizer, STRATOS).end_of_turn()


# Rows of every accepted form, and why others are rejected.


GOOD = {"question": "1+1?", "solution": "2"}
ANSWER = "<|begin_of_thought|>\n\nadd\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\n2\n\n<|end_of_solution|>"


def conversation(answer=ANSWER, question="1+1?", roles=("user", "assistant")):
    return {"system": "s", "conversations": [{"from": roles[0], "value": question}, {"from": roles[1], "value": answer}]}


def records(*rows, rlt_format=STRATOS):
    return read_records([(f"f:{place}", row) for place, row in enumerate(rows, start=1)], rlt_format)


def test_columns_of_ones_own():
    (row,) = records({**GOOD, "reasoning_trace": "one and one", "other": 3}).rows
    assert row == RltRecord("1+1?", "2", "one and one", "f:1")
    assert [row.reasoning_trace for row in records(GOOD, GOOD | {"reasoning_trace": None}).rows] == [None, None]


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
        ({"question": "q", "solution": " \n\n "}, EMPTY_SOLUTION),
        ({"question": "q", "solution": "<|begin_of_solution|> <|end_of_solution|>"}, EMPTY_SOLUTION),
        ({"question": "what is <|end_of_explanation|>?", "solution": "2"}, TAG_IN_QUESTION),
        ({"question": "q", "solution": "2<|end_of_solution|>"}, TAG_IN_SOLUTION),
        ({"question": "q", "solution": "2", "reasoning_trace": "a <|end_of_explanation|> b"}, TAG_IN_TRACE),
        (conversation(roles=("assistant", "user")), NOT_TWO_TURNS),
        ({"conversations": conversation()["conversations"] * 2}, NOT_TWO_TURNS),
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


def test_tags_around_a_solution_and_a_trace_are_stripped_and_those_of_another_format_are_text():
    solution, trace = " <|begin_of_solution|>2\n<|end_of_solution|>", "<|begin_of_thought|>x<|end_of_thought|>"
    (row,) = records({"question": "q", "solution": solution, "reasoning_trace": trace}).rows
    assert (row.solution, row.reasoning_trace) == ("2\n", "x")
    row = {"question": "what is <think>?", "solution": "2"}
    assert len(records(row).rows) == 1
    assert records(GOOD, row, rlt_format=R1).rejected == {TAG_IN_QUESTION: 1}


def test_a_source_without_one_usable_row_is_an_error():
    with pytest.raises(DataError, match=rf"^f:1: {EMPTY_SOLUTION}\. All 2 rows were rejected: {EMPTY_SOLUTION} \(2\)"):
        records({"question": "q", "solution": ""}, {"question": "q", "solution": " "})


# Data files of RLT, prepared from files of any accepted form.


def traced(number, **more):
    return row(number, **{"reasoning_trace": f"because {number}", **more})


def numbered_conversation(number, answer=None):
    text = STRATOS.thought.wrap(f"hm {number}") + "\n\n" + STRATOS.solution.wrap(f"{number}!")
    turns = [("user", f"{number}?"), ("assistant", answer or text)]
    return {"system": "ignored", "conversations": [{"from": role, "value": value} for role, value in turns]}


def test_rows_are_split_written_and_counted(tmp_path) -> None:
    rows = [*map(traced, range(10)), traced(10, solution=" "), traced(11, question=f"what is {STRATOS.thought.end}")]
    prepared = prepare_rlt(tmp_path / "out", [write(tmp_path / "a.jsonl", *rows)], num_validation=3)
    files = {split: parquet.read_table(path).to_pylist() for split, path in prepared.paths.items()}
    assert {split: len(each) for split, each in files.items()} == {"train": 7, "val": 3}
    together = sorted([*files["train"], *files["val"]], key=lambda each: int(each["question"][:-1]))
    assert together == [traced(number) for number in range(10)]
    assert prepared.rejected == {EMPTY_SOLUTION: 1, TAG_IN_QUESTION: 1}


def test_conversations_of_stratos_become_rows_of_rlt(tmp_path) -> None:
    train = write(tmp_path / "a.jsonl", numbered_conversation(1), numbered_conversation(2, "no tags"), numbered_conversation(3))
    val = write(tmp_path / "b.jsonl", numbered_conversation(4))
    prepared = prepare_rlt(tmp_path / "out", [train], [val])
    assert parquet.read_table(prepared.paths["train"]).to_pylist() == [
        {"question": f"{n}?", "solution": f"{n}!", "reasoning_trace": f"hm {n}"} for n in (1, 3)
    ]
    assert prepared.rejected == {NO_SECTIONS: 1}


@pytest.mark.parametrize("number", [0, 4])
def test_as_many_rows_as_there_are_cannot_be_held_out(tmp_path, number) -> None:
    path = write(tmp_path / "a.jsonl", *map(traced, range(4)))
    with pytest.raises(DataError, match=f"--num-validation={number}: choose between 1 and 3"):
        prepare_rlt(tmp_path / "out", [path], num_validation=number)


def test_token_lengths_are_those_of_the_teachers_prompts(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [traced(n, question="?" * n, reasoning_trace="x" * 5 if n else None) for n in range(1, 21)]
    prepared = prepare_rlt(tmp_path / "out", [write(tmp_path / "a.jsonl", *rows)], num_validation=1)
    lengths = token_lengths(prepared.rows["train"], tokenizer, "short")
    data = data_of(max_prompt_length=lengths["prompt"]["largest"])
    path = str(prepared.paths["train"])
    assert len(RltDataset(path, data, tokenizer, "train", "short")) == 19
    shorter = data_of(max_prompt_length=lengths["prompt"]["largest"] - 1)
    with pytest.raises(DataError, match="max_prompt_length"):
        RltDataset(path, shorter, tokenizer, "train", "short")
    assert lengths["trace"] == {"median": 5, "95 %": 5, "largest": 5}
    assert lengths["prompt"]["median"] < lengths["prompt"]["95 %"] <= lengths["prompt"]["largest"]


# Local files and hub datasets.


def write_question(path: Path, question: str = "q") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"question": question, "solution": "s"}) + "\n")
    return path


def test_files_of_a_split_may_lie_in_a_folder(tmp_path):
    expected = [write_question(tmp_path / "data" / f"train-0000{part}.jsonl") for part in (0, 1)]
    write_question(tmp_path / "data" / "test-00000.jsonl")
    (tmp_path / "train.md").write_text("no rows")
    assert files_of_split(tmp_path, NAMES_OF_SPLITS["train"], "hub:x") == expected
    assert [path.name for path in files_of_split(tmp_path, NAMES_OF_SPLITS["val"], "hub:x")] == ["test-00000.jsonl"]


def test_a_split_that_is_not_there_is_named(tmp_path):
    paths = [str(write_question(tmp_path / f"{name}.jsonl", name)) for name in ("b", "a")]
    assert [row["question"] for _, row in read_source(paths, "train", "data.train_files")] == ["b", "a"]
    with pytest.raises(DataError, match=r"^hub:x: there is no file validation\*, val\*, test\* that ends in"):
        files_of_split(tmp_path, NAMES_OF_SPLITS["val"], "hub:x")


@pytest.mark.parametrize("name", ["hub:nobody/nothing", "hub:no such name"])
def test_a_hub_that_cannot_deliver_is_told_with_the_way_out(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(DataError, match=rf"data\.train_files={name}: the hub could not deliver it.*download the files"):
        read_source(name, "train", "data.train_files")
