"""TRL's reward functions by name: what a script imports from ``trl.rewards``. They take TRL's arguments and give its values.

A completion is a text, or the messages of one turn. The score None means that the row has no reward and leaves its group. What
a function reads beside the completions is a column of the dataset (``solution``), or comes from the rollout (``completion_ids``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_memopt.rewards.math_answers import LatexAnswer, latex_answer

LogExtra = Callable[[str, list[Any]], None]
"""Called with the name of a column for the table of samples, and one value per row."""

# A reward function with settings is an object and not a closure, so that it can be sent to a reward process.

_THINK = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)


def think_format_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Return 1.0 where a completion begins with one ``<think>...</think>``, else 0.0."""
    return [float(_THINK.match(_text(completion)) is not None) for completion in completions]


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], log_extra: LogExtra | None = None, **columns: Any
) -> list[float | None]:
    """Return 1.0 if the LaTeX of a completion equals its solution, else 0.0; None if the solution cannot be read.

    The boxed answer is tried first. A text without LaTeX has no answer. Outside the main thread nothing bounds the time of
    math-verify, because its alarm works only in the main thread.
    """
    compared = [latex_answer(_text(text), wanted) for text, wanted in zip(completions, solution, strict=True)]
    return _logged(compared, solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **columns: Any,
) -> list[float | None]:
    """Return what :func:`accuracy_reward` gives for the text after the reasoning, and 0.0 if the reasoning does not end.

    ``reasoning_delimiters`` are texts that end the reasoning. The first of them that occurs counts, at its last position. None =
    ``</think>``.
    """
    ends = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    compared = []
    for completion, wanted in zip(completions, solution, strict=True):
        text = _text(completion)
        end = next((delimiter for delimiter in ends if delimiter in text), None)
        if end is None:
            compared.append(LatexAnswer(0.0, "[incomplete reasoning]", "[incomplete reasoning]"))
        else:
            compared.append(latex_answer(text.rpartition(end)[2], wanted))
    return _logged(compared, solution, log_extra)


@dataclass(frozen=True)
class _CosineScaled:
    max_len: int
    wrong: tuple[float, float]
    """At no token, and at ``max_len``."""
    right: tuple[float, float]
    __name__ = "cosine_scaled_reward"

    def __call__(
        self, completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        rows = zip(accuracy_reward(completions, solution), completion_ids, strict=True)
        return [None if right is None else self._scaled(bool(right), len(ids)) for right, ids in rows]

    def _scaled(self, right: bool, length: int) -> float:
        first, last = self.right if right else self.wrong
        # Longer ones count as max_len, because the cosine would rise again.
        share = min(length / self.max_len, 1.0)
        return last + 0.5 * (first - last) * (1.0 + math.cos(share * math.pi))


@dataclass(frozen=True)
class _RepetitionPenalty:
    ngram_size: int
    max_penalty: float
    __name__ = "repetition_penalty_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        return [self._penalty(list(ids)) for ids in completion_ids]

    def _penalty(self, ids: list[int]) -> float:
        number = len(ids) - self.ngram_size + 1
        if number < 1:
            return 0.0
        different = {tuple(ids[start : start + self.ngram_size]) for start in range(number)}
        repeated = 1 - len(different) / number
        return repeated * self.max_penalty if repeated else 0.0


@dataclass(frozen=True)
class _SoftOverlong:
    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        return [self._penalty(len(ids)) for ids in completion_ids]

    def _penalty(self, length: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if length <= free:
            return 0.0
        return (free - length) / self.soft_punish_cache if length <= self.max_completion_len else -1.0


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """Return a reward function that prefers short right answers and long wrong ones, along a cosine of the length in tokens.

    A right answer falls from ``max_value_correct`` to ``min_value_correct`` at ``max_len`` tokens, and a wrong one rises from
    ``min_value_wrong`` to ``max_value_wrong``. :func:`accuracy_reward` decides which is right. Source: arXiv 2502.03373, C.1.
    """
    return _CosineScaled(max_len, (min_value_wrong, max_value_wrong), (max_value_correct, min_value_correct))


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """Return a reward function: ``max_penalty`` times the share of a completion's token n-grams that repeat earlier ones.

    Source: arXiv 2502.03373, C.2.

    Raises:
        ValueError: ``max_penalty`` is above 0.
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty={max_penalty}: a penalty is not above 0. Give its negative.")
    return _RepetitionPenalty(ngram_size, max_penalty)


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Return a reward function that is 0 up to the last ``soft_punish_cache`` tokens, and falls to -1 at ``max_completion_len``.

    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    return _SoftOverlong(max_completion_len, soft_punish_cache)


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def _logged(compared: Sequence[LatexAnswer], solution: Sequence[str], log_extra: LogExtra | None) -> list[float | None]:
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [answer.solution for answer in compared])
        log_extra("answer_parsed", [answer.answer for answer in compared])
    return [answer.score for answer in compared]
