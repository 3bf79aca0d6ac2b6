"""The supervised warm-up."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_memopt.data.toy import WarmUp, greedy_accuracy, warm_up
from verl_memopt.model.tiny import TinyShape, make_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, initializer_range=0.06)
    return make_tiny_model(tmp_path / "model", shape)


LESSONS = [("1+1=", "72", "12"), ("2+2=", "84", "34")]


def test_the_model_learns_the_teachers_probabilities(model: Path) -> None:
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


def test_an_answer_counts_only_when_the_turn_ends_after_it(model: Path) -> None:
    warm_up(model, [("1+1=", "722", "722")], WarmUp(steps=100, batch_size=4, lr=1e-2), seed=0)
    assert greedy_accuracy(model, [("1+1=", "722")]) == 1.0
    assert greedy_accuracy(model, [("1+1=", "72")]) == 0.0


def test_the_number_of_threads_is_as_before(model: Path) -> None:
    before = torch.get_num_threads()
    warm_up(model, LESSONS, WarmUp(steps=1, batch_size=2), seed=0)
    assert torch.get_num_threads() == before
