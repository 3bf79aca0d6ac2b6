"""A short supervised warm-up of a tiny model on lessons, with the loss on the answers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from verl_memopt.data.rlt.lessons import Lesson
from verl_memopt.data.warm_up import descend, load_model

IGNORED = -100
"""Label of a token that is not learned, as in torch's cross entropy."""


@dataclass(frozen=True)
class RltWarmUp:
    """Settings of the warm-up."""

    steps: int = 500
    """Optimizer steps."""
    batch_size: int = 32
    """Lessons per step."""
    lr: float = 3e-3
    """Peak learning rate, reached after 20 steps. It then falls linearly to a twentieth."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""


def warm_up_on_lessons(folder: Path, lessons: Sequence[Lesson], recipe: RltWarmUp, seed: int) -> float:
    """Train the model in ``folder``, save it in place, and return the loss of the last step in nats per answer token.

    The same seed gives the same weights.

    Args:
        folder: Holds model and tokenizer.
        lessons: What to learn. Each step draws some with replacement.
        recipe: Settings of the warm-up.
        seed: Seed of the batches.
    """
    model, _ = load_model(folder)

    def loss_of(draw: torch.Generator) -> Tensor:
        drawn = torch.randint(len(lessons), (recipe.batch_size,), generator=draw)
        return lesson_loss(model, [lessons[place] for place in drawn])

    loss = descend(model, loss_of, recipe.steps, recipe.lr, recipe.weight_decay, seed)
    model.save_pretrained(folder)
    return loss


def lesson_loss(model: Any, lessons: Sequence[Lesson]) -> Tensor:
    """Return the mean cross entropy over the answer tokens of some lessons, a scalar.

    Args:
        model: A causal LM of transformers.
        lessons: The lessons, padded on the right where they are shorter than the longest.
    """
    ids = [torch.tensor(lesson.prompt + lesson.answer) for lesson in lessons]
    labels = [torch.tensor([IGNORED] * len(lesson.prompt) + lesson.answer) for lesson in lessons]
    # A causal model sees no padding on the right, so no mask is needed.
    padded, targets = pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    logits = model(padded[:, :-1]).logits  # [B, T - 1, V]
    return cross_entropy(logits.flatten(0, 1).float(), targets[:, 1:].flatten(), ignore_index=IGNORED)
