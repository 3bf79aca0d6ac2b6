"""The reward functions of ``trl.rewards`` with the same names, arguments and values, for scripts that import them.

A completion is a string, or the messages of one turn. The score None means that the row has no reward and is left out of its
group. The other arguments are columns of the dataset (``solution``), or come from the rollout (``completion_ids``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_memopt.rewards.math_answers import LatexAnswer, latex_answer

LogExtra = Callable[[str, list[Any]], None]
"""Adds a column to the table of samples. It is called with the column's name and one value per row."""

# A reward function with settings is an object and not a closure, so that it can be sent to a reward process.

_THINK = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)


def think_format_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Return 1.0 where a completion begins with one ``<think>...</think>``, else 0.0."""
    return [float(_THINK.match(_text(completion)) is not None) for completion in completions]


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], log_extra: LogExtra | None = None, **columns: Any
) -> list[float | None]:
    """Return 1.0 if the LaTeX in a completion equals its solution, else 0.0. None = the solution cannot be parsed.

    If a completion has a boxed answer, that one is used. Only LaTeX counts as an answer. math-verify limits its own time with an
    alarm, which works only in the main thread; in any other thread its time has no limit.
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
    """Apply :func:`accuracy_reward` to the text after the reasoning. The score is 0.0 if the reasoning does not end.

    ``reasoning_delimiters`` lists strings that end the reasoning; None = ``</think>``. The first string of the list that occurs
    in the completion is used, and the reasoning ends where it occurs last.
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
    """Score of a wrong answer with 0 tokens, and with ``max_len`` tokens."""
    right: tuple[float, float]
    """Score of a right answer with 0 tokens, and with ``max_len`` tokens."""
    __name__ = "cosine_scaled_reward"

    def __call__(
        self, completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        rows = zip(accuracy_reward(completions, solution), completion_ids, strict=True)
        return [None if right is None else self._scaled(bool(right), len(ids)) for right, ids in rows]

    def _scaled(self, right: bool, length: int) -> float:
        first, last = self.right if right else self.wrong
        # Longer completions count as max_len tokens, because the cosine would rise again.
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
    """Return a reward function that prefers short right answers and long wrong answers.

    From 0 to ``max_len`` tokens the score follows a cosine. The score of a right answer falls from ``max_value_correct`` to
    ``min_value_correct``, and that of a wrong answer rises from ``min_value_wrong`` to ``max_value_wrong``. An answer is right if
    :func:`accuracy_reward` says so. Source: arXiv 2502.03373, C.1.
    """
    return _CosineScaled(max_len, (min_value_wrong, max_value_wrong), (max_value_correct, min_value_correct))


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """Return a reward function that penalises repetition.

    The score is ``max_penalty`` times the share of a completion's token n-grams that repeat an earlier n-gram. Source: arXiv
    2502.03373, C.2.

    Raises:
        ValueError: ``max_penalty`` is above 0.
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty={max_penalty}: a penalty must not be above 0. Give a negative number.")
    return _RepetitionPenalty(ngram_size, max_penalty)


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Return a reward function that penalises completions near or beyond the length limit.

    The score is 0 up to ``max_completion_len - soft_punish_cache`` tokens. It then falls linearly to -1 at
    ``max_completion_len``, and stays at -1. Source: DAPO, arXiv 2503.14476, equation 13.
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
