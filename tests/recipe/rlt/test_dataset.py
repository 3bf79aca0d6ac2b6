"""The dataset of an RLT run."""

import inspect
import json

import pytest
from transformers import PreTrainedTokenizerFast

from verl_memopt.config.schema import CustomClass, Data
from verl_memopt.data.dataset import build_dataset
from verl_memopt.data.encoder import tokenize
from verl_memopt.errors import DataError
from verl_memopt.recipes.rlt.dataset import EMPTY_SOLUTION, FORMATS, STRATOS, TOO_LONG, RltDataset, RltPrompts


def write(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(**more):
    return Data(**{"train_files": None, "val_files": None, "seed": 0, "max_prompt_length": 4000, **more})


def row(number, **more):
    return {"question": f"{number}?", "solution": f"{number}!", **more}


def test_rows_are_teacher_prompts_with_what_the_reward_needs(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path, row(1, reasoning_trace="why"), row(2, solution=" "), row(3))
    rows = RltDataset(path, settings(), tokenizer, "train")
    assert rows.rejected == {EMPTY_SOLUTION: 1}
    assert [(each.index, each.address) for each in rows] == [(0, f"{path}:1"), (1, f"{path}:3")]
    first = rows[0]
    assert first.text == RltPrompts(tokenizer, STRATOS).teacher("1?", "1!")[0]
    assert first.text.endswith(STRATOS.forced_prefix)
    assert (first.data_source, first.ground_truth) == ("rlt", "1!")
    assert first.extra_info == {"question": "1?", "solution": "1!", "reasoning_trace": "why"}


def test_special_tokens_inside_the_data_stay_text(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    (prompt,) = RltDataset(write(tmp_path, row(1, solution="<|im_end|>")), settings(), tokenizer, "train", "short")
    (ids,) = tokenize(tokenizer, [prompt.text], [prompt.plain])
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_limit_takes_the_first_rows_or_a_random_choice(tmp_path, tokenizer: PreTrainedTokenizerFast, split) -> None:
    path = write(tmp_path, *map(row, range(20)))

    def questions(**more):
        data = settings(train_max_samples=3, val_max_samples=3, **more)
        return [each.extra_info["question"] for each in RltDataset(path, data, tokenizer, split, "short")]

    shuffled = {"train": {"shuffle": True}, "val": {"validation_shuffle": True}}[split]
    assert questions(shuffle=False) == ["0?", "1?", "2?"]
    assert questions(**shuffled) not in (["0?", "1?", "2?"], questions(**shuffled, seed=1))
    assert questions(**shuffled) == questions(**shuffled)


def test_a_long_prompt_is_an_error_or_a_counted_rejection(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path, row(1), row(2, solution="long " * 50), row(3))
    limit = {"max_prompt_length": 120}
    with pytest.raises(DataError, match=r"rows.jsonl:2: the prompt has \d+ tokens, but data.max_prompt_length is 120"):
        RltDataset(path, settings(**limit), tokenizer, "train", "short")
    rows = RltDataset(path, settings(**limit, filter_overlong_prompts=True), tokenizer, "train", "short")
    assert ([(each.index, each.ground_truth) for each in rows], rows.rejected) == ([(0, "1!"), (1, "3!")], {TOO_LONG: 1})
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*\(2 more rows"):
        RltDataset(path, settings(max_prompt_length=5, filter_overlong_prompts=True), tokenizer, "train", "short")


def test_prompts_cannot_be_cut(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"^data.truncation=left: a prompt of RLT ends with the solution and a tag"):
        RltDataset(write(tmp_path, row(1)), settings(truncation="left"), tokenizer, "train")


def test_a_template_that_fails_names_the_row(tmp_path, tokenizer: PreTrainedTokenizerFast, monkeypatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no') }}")
    with pytest.raises(DataError, match=r"rows.jsonl:1: the chat template cannot render"):
        RltDataset(write(tmp_path, row(1)), settings(), tokenizer, "train")


def test_a_run_can_name_it_as_its_dataset_class(tmp_path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path, row(1))
    custom = CustomClass(path=inspect.getfile(RltDataset), name="RltDataset")
    (prompt,) = build_dataset(path, settings(custom_cls=custom), tokenizer, "train")
    assert prompt == RltDataset(path, settings(), tokenizer, "train")[0]


def test_every_format_of_the_settings_exists() -> None:
    from typing import get_args, get_type_hints

    from verl_memopt.recipes.rlt.settings import RltReward

    assert set(get_args(get_type_hints(RltReward)["tag_format"])) == set(FORMATS)
