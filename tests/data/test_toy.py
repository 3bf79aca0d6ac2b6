"""The toy task: its sums, its files, and what the warm-up leaves for reinforcement learning to do."""

import json
import logging
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_memopt.config.schema import Data
from verl_memopt.data.dataset import PromptDataset
from verl_memopt.data.toy import ToyRecipe, WarmUp, careless_answer, carries, make_toy, split_problems
from verl_memopt.data.warm_up import greedy_accuracy, warm_up
from verl_memopt.errors import DataError
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.rewards.rules import RULES, exact_match

SHORT = ToyRecipe(warm_up=WarmUp(steps=2, batch_size=4))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy") / "toy", 3, SHORT)


def read(folder, name):
    path = str(folder / name)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return PromptDataset(path, Data(train_files=path, val_files=path, shuffle=False, max_prompt_length=16), tokenizer, "train")


@pytest.mark.parametrize("seed", range(2))
def test_held_out_sums_are_never_trained_on_and_every_sum_is_in_one_split(seed):
    train, validation = split_problems(ToyRecipe(), seed)
    assert len({*train, *validation}) == len(train) + len(validation) == 80 * 9
    assert len(validation) == 128
    assert sum(map(carries, validation)) == 80
    assert (train, validation) == split_problems(ToyRecipe(), seed)
    assert set(validation) != set(split_problems(ToyRecipe(), seed + 1)[1])
    for problem in (*train, *validation):
        ones, tens = (problem[0] % 10 + problem[1]) % 10, problem[0] // 10 * 10
        assert careless_answer(problem) == tens + ones
        assert (careless_answer(problem) == sum(problem)) == (not carries(problem))


def test_the_files_are_datasets_of_short_prompts_with_a_rule_for_their_reward(toy):
    for name, size in [("train.parquet", 592), ("val.parquet", 128)]:
        rows = read(toy, name)
        assert len(rows) == size
        for row in rows:
            question = row.extra_info["question"]
            assert row.text == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            assert RULES[row.data_source] is exact_match
            assert sum(map(int, question.removesuffix("=").split("+"))) == int(row.ground_truth)


def test_the_same_seed_gives_the_same_weights_and_the_record_tells_how_they_were_made(toy, tmp_path):
    record = json.loads((toy / "toy.json").read_text())
    assert (record["seed"], record["recipe"]["warm_up"]["steps"], 0 <= record["greedy_accuracy"] <= 1) == (3, 2, True)
    again = make_toy(tmp_path / "again", 3, SHORT)
    other = make_toy(tmp_path / "other", 4, SHORT)
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (toy, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_a_whole_folder_of_the_same_recipe_is_left_and_of_another_is_made_anew(tmp_path, caplog):
    folder = make_toy(tmp_path / "toy", 0, SHORT)
    made = (folder / "toy.json").stat().st_mtime_ns
    with caplog.at_level(logging.INFO):
        make_toy(folder, 0, SHORT)
    assert "is ready" in caplog.text
    assert (folder / "toy.json").stat().st_mtime_ns == made
    make_toy(folder, 1, SHORT)
    assert json.loads((folder / "toy.json").read_text())["seed"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="it exists and is not a toy task"):
        make_toy(tmp_path, 0, SHORT)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.slow
def test_the_warmed_up_model_adds_but_forgets_the_carry(tmp_path):
    """48 of the 128 held-out sums have no carry: greedy answers are right on those and on few others."""
    record = json.loads((make_toy(tmp_path / "toy", 0) / "toy.json").read_text())
    assert 0.3 <= record["greedy_accuracy"] <= 0.5


# The supervised warm-up.


@pytest.fixture
def model(tmp_path):
    shape = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, initializer_range=0.06)
    return make_tiny_model(tmp_path / "model", shape)


LESSONS = [("1+1=", "72", "12"), ("2+2=", "84", "34")]


def test_the_model_learns_the_teachers_probabilities(model):
    """With two answers given at 3:1 the loss cannot fall below their entropy, spread over three tokens."""
    loss = warm_up(model, LESSONS, WarmUp(carelessness=0.75, steps=150, batch_size=8, lr=1e-2), seed=0)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / 3
    assert entropy - 1e-6 < loss < entropy + 0.02
    assert greedy_accuracy(model, [(question, careless) for question, careless, _ in LESSONS]) == 1.0
    assert greedy_accuracy(model, [(question, right) for question, _, right in LESSONS]) == 0.0
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False, add_generation_prompt=True)
    logits = AutoModelForCausalLM.from_pretrained(model)(**tokenizer(text, return_tensors="pt")).logits[0, -1]
    chances = logits.softmax(dim=-1)[tokenizer.convert_tokens_to_ids(["7", "1"])]
    torch.testing.assert_close(chances, torch.tensor([0.75, 0.25]), atol=0.05, rtol=0)


def test_an_answer_counts_only_when_the_turn_ends_after_it(model):
    before = torch.get_num_threads()
    warm_up(model, [("1+1=", "722", "722")], WarmUp(steps=100, batch_size=4, lr=1e-2), seed=0)
    assert torch.get_num_threads() == before
    assert greedy_accuracy(model, [("1+1=", "722")]) == 1.0
    assert greedy_accuracy(model, [("1+1=", "72")]) == 0.0
