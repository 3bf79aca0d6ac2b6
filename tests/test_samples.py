"""The command that shows the answers of a run."""

import pytest

from verl_memopt.cli import main
from verl_memopt.model.tiny import build_tokenizer
from verl_memopt.observe.samples import Sample, dump_samples

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.fixture
def dump(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    first, second = ids("call"), ids("two")
    turns = [
        {"kept": 0, "new_ids": ids("ask"), "sampled": len(first)},
        {"kept": len(ids("ask")) + len(first), "new_ids": ids("tool says"), "sampled": len(second)},
    ]
    messages = [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "tool says"},
        {"role": "assistant", "content": "two"},
    ]
    agent = Sample(
        "7", "toy", "ask", "two", "two", 1.0, ids("ask"), first + second, turns=turns, conversation=messages, ended="answer"
    )
    plain = Sample(
        "8", "toy", "what", "that", None, None, ids("what"), ids("that"), messages=[{"role": "user", "content": "what"}]
    )
    return dump_samples(tmp_path / "rows", 3, [agent, plain])


def test_the_messages_of_a_conversation_are_shown_with_calls_and_results(dump, capsys):
    assert main(["samples", str(dump)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in shown if line] == [
        "step=3 prompt=7 score=1.0 answer=two ended=answer",
        "user ask", "assistant -> add(a=1)", "tool tool says", "assistant two",
        "step=3 prompt=8 ended=stop",
        "user what", "assistant that",
    ]  # fmt: skip


def test_sampled_tokens_are_marked(dump, capsys, tmp_path):
    assert main(["samples", str(dump), "--tokens", "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    shown = capsys.readouterr().out
    assert "ask[[call]]" in shown
    assert "tool says[[two]]" in shown
    assert "what[[that]]" in shown


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--step", "4"], "no samples of step 4. There are samples of 3"),
        (["--tokens"], "Give its folder as --tokenizer"),
    ],
)
def test_what_is_missing_is_said(dump, capsys, arguments, error):
    assert main(["samples", str(dump), *arguments]) == 2
    assert error in capsys.readouterr().err
    assert main(["samples", str(dump.parent / "none.jsonl")]) == 2
    assert "there are no samples" in capsys.readouterr().err
