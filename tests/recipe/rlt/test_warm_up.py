"""The warm-up of a tiny model on lessons."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.recipes.rlt.lessons import Lesson, RltWarmUp, lesson_loss, warm_up_on_lessons


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, initializer_range=0.06)
    return make_tiny_model(tmp_path / "model", shape)


def test_the_loss_is_that_of_each_lesson_alone_over_its_answer(model: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lessons = [Lesson([5, 6, 7], [8, 9]), Lesson([10], [11]), Lesson([12, 13], [14, 15, 16, 17])]
    total = 0.0
    for lesson in lessons:
        ids = torch.tensor([lesson.prompt + lesson.answer])
        log_probs = lm(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        total -= log_probs[len(lesson.prompt) - 1 :].sum()
    torch.testing.assert_close(lesson_loss(lm, lessons), total / 7, rtol=0, atol=1e-5)


def test_a_warmed_up_model_gives_the_shares_of_its_lessons(model: Path) -> None:
    lessons = [Lesson([5, 6], [7])] * 3 + [Lesson([5, 6], [8])]
    loss = warm_up_on_lessons(model, lessons, RltWarmUp(steps=150, batch_size=16, lr=1e-2), seed=0)
    logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([[5, 6]])).logits[0, -1]
    torch.testing.assert_close(logits.softmax(-1)[[7, 8]], torch.tensor([0.75, 0.25]), rtol=0, atol=0.1)
    assert loss == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), abs=0.25)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        folder = make_tiny_model(tmp_path / name, TinyShape(hidden_size=32, num_layers=1, num_heads=1))
        warm_up_on_lessons(folder, [Lesson([5], [6]), Lesson([7], [8])], RltWarmUp(steps=2, batch_size=1), seed)
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]
