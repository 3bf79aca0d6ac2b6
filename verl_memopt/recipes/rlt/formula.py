"""The reward of RLT from log-probs: r_ss - r_kl + match.

The inputs are one-dimensional over the tokens of N rows:

    s  the student's log-probs of the solution
    u  the student's log-probs of the explanation
    v  the teacher's log-probs of the explanation

The settings give the weights a and b, the transforms f and g, and the reductions R and Q::

    k    = v - u                                    by default
         = (v - u) - 1 + exp(-(v - u))              with use_schulman_kl_estimation
         = -u                                       without include_teacher_think_entropy
    r_ss = sum_i a_i * R_i(max(f(s), -clip_log_prob))
    r_kl = sum_i b_i * Q_i(min(g(k), clip_kl))

``match`` is the penalty of a row without an end tag. Arithmetic is in fp64, and results are in fp32. No code loops over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from verl_memopt.algorithms.rows import row_means, row_sums
from verl_memopt.config.reward_limits import LARGEST_SCORE
from verl_memopt.errors import RewardError
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student_rows import NAMES, SKIPPED, SOLUTION, THINK, StudentRows

Rows = tuple[Tensor, Tensor]
"""int64 [R], the row of each of R tokens, and int64 [N], the number of tokens of each row."""


def reduce_rows(name: str, values: Tensor, lengths: Tensor) -> Tensor:
    """Reduce the values of each row to one number, fp64 [N].

    Args:
        name: A key of ``REDUCTIONS``.
        values: [R], in any floating dtype.
        lengths: int64 [N], the number of tokens of each row.
    """
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return REDUCTIONS[name](values.double(), (row, lengths))


def _extreme(kind: str, values: Tensor, rows: Rows) -> Tensor:
    row, lengths = rows
    return values.new_zeros(len(lengths)).scatter_reduce(0, row, values, kind, include_self=False)


def _quantile(share: float, values: Tensor, rows: Rows) -> Tensor:
    # Interpolates linearly between neighbours, as ``torch.quantile`` does.
    _, lengths = rows
    place = share * (lengths - 1).clamp(min=0).double()
    below = place.floor().long()
    low, high = _ordered(values, rows, below), _ordered(values, rows, (below + 1).minimum((lengths - 1).clamp(min=0)))
    return torch.lerp(low, high, place - below)


def _median(values: Tensor, rows: Rows) -> Tensor:
    # If there are two middle values, the smaller one is the median, as in ``torch.median``.
    return _ordered(values, rows, (rows[1] - 1).clamp(min=0) // 2)


def _ordered(values: Tensor, rows: Rows, place: Tensor) -> Tensor:
    # fp64 [N]: sort the values of each row in ascending order and take the one at index `place`; 0 for an empty row.
    row, lengths = rows
    by_value = values.argsort(stable=True)
    ascending = values[by_value[row[by_value].argsort(stable=True)]]
    index = (lengths.cumsum(0) - lengths + place).clamp(max=max(len(values) - 1, 0))
    picked = ascending[index] if len(values) else values.new_zeros(len(lengths))
    return torch.where(lengths > 0, picked, 0.0)


REDUCTIONS: dict[str, Callable[[Tensor, Rows], Tensor]] = {
    "mean": lambda values, rows: row_means(values, *rows),
    "sum": lambda values, rows: row_sums(values, rows[0], len(rows[1])),
    "min": partial(_extreme, "amin"),
    "max": partial(_extreme, "amax"),
    "median": _median,
    "first_quartile": partial(_quantile, 0.25),
    "last_quartile": partial(_quantile, 0.75),
}
"""Reductions by their name in the settings."""


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda values: values,
    "exp": torch.exp,
    "exp_norm": lambda values: -torch.expm1(-values),
}
"""Transforms by their name in the settings."""


@dataclass(frozen=True)
class RltScores:
    """The reward of each row and the parts of the reward. All tensors are [N].

    Attributes:
        reward: fp32, ``r_ss - r_kl + match``. Always finite; 0 for a skipped row.
        r_ss: fp32, the weighted sum of the reductions over the log-probs of the solution.
        r_kl: fp32, the weighted sum of the reductions over the differences of log-probs on the explanation.
        match: fp32, 0, or the penalty for a missing end tag.
        parts: A dict from the name of a reduction, such as ``answer_log_prob/mean``, to its value, fp32. The entry with the
            suffix ``/weighted`` is that value times its weight: the amount that this reduction adds to ``r_ss`` or ``r_kl``.
        num_think: int32, tokens of the explanation.
        num_solution: int32, tokens of the solution.
        status: int8, a key of ``NAMES``.
        has_text_after: bool, whether text follows the end tag.
    """

    reward: Tensor
    r_ss: Tensor
    r_kl: Tensor
    match: Tensor
    parts: dict[str, Tensor]
    num_think: Tensor
    num_solution: Tensor
    status: Tensor
    has_text_after: Tensor

    def training_rewards(self) -> Tensor:
        """Return the rewards, fp32 [N], with NaN for skipped rows.

        The trainer treats NaN as a missing reward: the row counts in no mean or standard deviation, and its advantage is 0.
        """
        return torch.where(self.status == SKIPPED, torch.nan, self.reward)

    def metrics(self) -> dict[str, float]:
        scored = self.status != SKIPPED
        values = {"reward": self.reward, "r_ss": self.r_ss, "r_kl": self.r_kl, "match": self.match, **self.parts}
        values |= {"think_tokens": self.num_think, "solution_tokens": self.num_solution}
        if not len(self.status):
            return {}
        means = {name: value[scored].double().mean().item() for name, value in values.items()} if bool(scored.any()) else {}
        shares = {f"status/{name}": (self.status == status).double().mean().item() for status, name in NAMES.items()}
        text_after = self.has_text_after.double().mean().item()
        return means | shares | {"text_after_end_tag": text_after, "num_rows": float(len(self.status))}


def rlt_scores(
    settings: RltReward,
    rows: StudentRows,
    student_think: Tensor,
    teacher_think: Tensor | None,
    solution: Tensor,
    addresses: Sequence[str],
) -> RltScores:
    """Compute the reward of each row.

    Args:
        settings: Settings of the reward.
        rows: The sequences that the student scored.
        student_think: u, the student's log-probs of the explanations, fp32 [tokens of all explanations].
        teacher_think: v, the teacher's log-probs of the same tokens, of the same shape and dtype. May be None if
            ``include_teacher_think_entropy`` is false.
        solution: s, the student's log-probs of the solutions, fp32 [tokens of all solutions].
        addresses: File and row of each question, for errors.

    Raises:
        RewardError: A log-prob is not finite. The message names the row.
    """
    think_lengths, solution_lengths = rows.parts[:, THINK], rows.parts[:, SOLUTION]
    _check_finite("the student's log-probs of the solution", solution, solution_lengths, addresses)
    _check_finite("the student's log-probs of the explanation", student_think, think_lengths, addresses)
    if settings.include_teacher_think_entropy:
        assert teacher_think is not None, "the settings compare with the teacher"
        _check_finite("the teacher's log-probs of the explanation", teacher_think, think_lengths, addresses)
    log_probs = TRANSFORMS[settings.normalize_log_prob_fn](solution.double()).clamp(min=-settings.clip_log_prob)
    differences = TRANSFORMS[settings.normalize_kl_fn](_differences(settings, student_think.double(), teacher_think))
    differences = differences.clamp(-LARGEST_SCORE, settings.clip_kl)

    scored, parts = rows.scored(), dict[str, Tensor]()
    r_ss, r_kl = torch.zeros(rows.num_rows, dtype=torch.float64), torch.zeros(rows.num_rows, dtype=torch.float64)
    for name, weight in zip(settings.reduction_log_prob_fn, settings.answer_log_prob_coeff, strict=True):
        value = reduce_rows(name, log_probs, solution_lengths)
        _add_part(parts, f"answer_log_prob/{name}", value, weight, r_ss)
    is_empty = scored & (think_lengths == 0)
    for name, weight in zip(settings.reduction_kl_fn, settings.kl_penalty_reward_coeff, strict=True):
        value = torch.where(is_empty, settings.empty_think_kl, reduce_rows(name, differences, think_lengths))
        _add_part(parts, f"reasoning_kl/{name}", value, weight, r_kl)
    match = torch.where(rows.matched | ~scored, 0.0, settings.not_matched_penalty).double()
    return RltScores(
        reward=_finite(r_ss - r_kl + match),
        r_ss=_finite(r_ss),
        r_kl=_finite(r_kl),
        match=match.float(),
        parts=parts,
        num_think=think_lengths.int(),
        num_solution=solution_lengths.int(),
        status=rows.status,
        has_text_after=rows.has_text_after,
    )


def _differences(settings: RltReward, student: Tensor, teacher: Tensor | None) -> Tensor:
    # k of each token of the explanations, fp64.
    if not settings.include_teacher_think_entropy:
        return -student
    assert teacher is not None
    difference = teacher.double() - student
    return difference - 1 + torch.exp(-difference) if settings.use_schulman_kl_estimation else difference


def _add_part(parts: dict[str, Tensor], name: str, value: Tensor, weight: float, total: Tensor) -> None:
    weighted = weight * value
    parts[name], parts[f"{name}/weighted"] = _finite(value), _finite(weighted)
    total += weighted


def _finite(values: Tensor) -> Tensor:
    return values.clamp(-LARGEST_SCORE, LARGEST_SCORE).float()


def _check_finite(what: str, values: Tensor, lengths: Tensor, addresses: Sequence[str]) -> None:
    assert len(values) == int(lengths.sum()), (what, len(values), int(lengths.sum()))
    wrong = (~torch.isfinite(values)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        row = int(torch.repeat_interleave(torch.arange(len(lengths)), lengths)[place])
        raise RewardError(
            f"{addresses[row]}: {what} contain {values[place].item()}. The model is broken: check its weights and its dtype."
        )
