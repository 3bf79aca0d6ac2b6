"""A short supervised warm-up of a tiny model on the answers of a careless teacher, for the toy tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from verl_memopt.data.encoder import tokenize

if TYPE_CHECKING:
    from verl_memopt.data.toy import Descent, WarmUp


def warm_up(folder: Path, lessons: Sequence[tuple[str, str, str]], recipe: WarmUp, seed: int) -> float:
    """Train the model in ``folder``, save it in place, and return the loss of the last step in nats per answer token.

    ``lessons`` are triples (question, careless answer, right answer). ``recipe`` gives both answers a fixed probability. The loss
    compares the model's probabilities with these, because answers that are sampled with them would be noisy. The same seed gives
    the same weights.
    """
    model, tokenizer = load_model(folder)
    prompts = _ids(tokenizer, [_prompt(tokenizer, lesson[0]) for lesson in lessons])
    careless, right = (_ids(tokenizer, [lesson[i] + tokenizer.eos_token for lesson in lessons]) for i in (1, 2))

    def loss_of(draw: torch.Generator) -> Tensor:
        pick = torch.randint(len(lessons), (recipe.batch_size,), generator=draw)
        is_careless = torch.rand(recipe.batch_size, 1, generator=draw) < recipe.carelessness
        return _teacher_loss(model, prompts[pick], careless[pick], right[pick], is_careless, recipe.carelessness)

    loss = descend(model, loss_of, recipe, seed)
    model.save_pretrained(folder)
    return loss


def descend(model: Any, loss_of: Callable[[torch.Generator], Tensor], recipe: Descent, seed: int) -> float:
    """Minimise a loss with AdamW on one thread, and return the loss of the last step.

    The learning rate rises over 20 steps and then falls linearly to a twentieth of its peak. ``loss_of`` returns the loss of a
    batch that it draws with the given generator.
    """
    steps = recipe.steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, max(0.05, 1 - step / steps)))
    draw, loss = torch.Generator().manual_seed(seed), torch.tensor(0.0)
    with one_thread():
        for _ in range(steps):
            loss = loss_of(draw)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return loss.item()


def _teacher_loss(model: Any, prompts: Tensor, careless: Tensor, right: Tensor, is_careless: Tensor, share: float) -> Tensor:
    """Return the cross entropy against both answers, weighted by the teacher's probability of each answer.

    ``prompts`` are ids [B, P], the answers are ids [B, R], and the result is a scalar. The two answers differ at most in their
    first token. The model predicts the later tokens after the drawn answer.
    """
    drawn = torch.where(is_careless, careless, right)  # [B, R]
    logits = model(torch.cat([prompts, drawn], dim=1)[:, :-1], logits_to_keep=drawn.shape[1]).logits  # [B, R, V]
    log_probs = logits.log_softmax(dim=-1)
    careless_part, right_part = (log_probs.gather(-1, answer[..., None]).mean() for answer in (careless, right))
    return -(share * careless_part + (1 - share) * right_part)


def greedy_accuracy(folder: Path, problems: Sequence[tuple[str, str]]) -> float:
    """Return the share of (question, answer) pairs that greedy decoding answers exactly, including the end of the turn."""
    model, tokenizer = load_model(folder)
    prompts = _ids(tokenizer, [_prompt(tokenizer, problem[0]) for problem in problems])
    answers = _ids(tokenizer, [problem[1] + tokenizer.eos_token for problem in problems])
    with one_thread(), torch.no_grad():
        sequences = prompts
        for _ in range(answers.shape[1]):
            chosen = model(sequences, logits_to_keep=1).logits[:, -1].argmax(dim=-1, keepdim=True)
            sequences = torch.cat([sequences, chosen], dim=1)
    return (sequences[:, prompts.shape[1] :] == answers).all(dim=1).double().mean().item()


# Lessons of unequal length, for tasks whose answers have several parts.


@dataclass(frozen=True)
class Lesson:
    """One worked example."""

    prompt: list[int]
    """Token ids that the model reads."""
    answer: list[int]
    """Token ids that the model learns to write after the prompt."""
    read: tuple[tuple[int, int], ...] = ()
    """Parts of the answer, each as (first, after the last), that the model reads and does not learn, such as a tool's result."""


IGNORED = -100
"""Label of a token that is not learned, as in torch's cross entropy."""


def warm_up_on_lessons(folder: Path, lessons: Sequence[Lesson], recipe: Descent, seed: int) -> float:
    """Train the model in ``folder`` on random ``lessons``, save it in place, and return the last loss in nats per answer token.

    The same seed gives the same weights.
    """
    model, _ = load_model(folder)

    def loss_of(draw: torch.Generator) -> Tensor:
        drawn = torch.randint(len(lessons), (recipe.batch_size,), generator=draw)
        return lesson_loss(model, [lessons[place] for place in drawn])

    loss = descend(model, loss_of, recipe, seed)
    model.save_pretrained(folder)
    return loss


def lesson_loss(model: Any, lessons: Sequence[Lesson]) -> Tensor:
    """Return the mean cross entropy over the answer tokens of some lessons, a scalar."""
    ids = [torch.tensor(lesson.prompt + lesson.answer) for lesson in lessons]
    labels = [torch.tensor([IGNORED] * len(lesson.prompt) + lesson.answer) for lesson in lessons]
    for label, lesson in zip(labels, lessons, strict=True):
        for first, end in lesson.read:
            label[len(lesson.prompt) + first : len(lesson.prompt) + end] = IGNORED
    # In a causal model, padding on the right has no influence on the tokens before it, so no mask is needed.
    padded, targets = pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    logits = model(padded[:, :-1]).logits  # [B, T - 1, V]
    return cross_entropy(logits.flatten(0, 1).float(), targets[:, 1:].flatten(), ignore_index=IGNORED)


def load_model(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def _prompt(tokenizer: Any, question: str) -> str:
    return tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)


def _ids(tokenizer: Any, texts: list[str]) -> Tensor:
    # int64 [B, T]: all texts of the toy task have the same number of tokens.
    return torch.tensor(tokenize(tokenizer, texts))


@contextmanager
def one_thread() -> Iterator[None]:
    # One thread is fastest for such small tensors, and makes the sums independent of the number of cores.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
