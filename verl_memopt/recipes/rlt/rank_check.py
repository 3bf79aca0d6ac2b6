"""Checks, in the first scored batch, that a quantised student orders explanations as its unquantised weights do.

At load there is nothing to order: random tokens say how large the error of a log-prob is, and not whether it is smaller than the
differences between real explanations. So the check waits for the first explanations of the policy, and scores some of them twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from verl_memopt.data.batch import token_index
from verl_memopt.recipes.rlt.formula import RltScores, rlt_scores
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import StudentLogProbs
from verl_memopt.recipes.rlt.student_rows import THINK, StudentRows

ACCEPTED = {"int8": 0.98, "nf4": 0.95}
"""Least mean in-group Spearman correlation with which a quantised student is taken without a warning."""


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman correlations of two scorings of the same rows.

    Attributes:
        mean: Mean over groups; NaN without any.
        lowest: The lowest of a group; NaN without any.
        num_groups: Groups with an order: at least two rows, and not all rewards equal.
    """

    mean: float
    lowest: float
    num_groups: int

    def warning(self, quantization: str, key: str) -> str | None:
        """Return a warning where the agreement is too low; None where it is high enough, or no group has an order."""
        if not self.num_groups or self.mean >= ACCEPTED[quantization]:
            return None
        return (
            f"{key}={quantization}: the student orders the explanations of a question as its unquantised weights do with a rank "
            f"correlation of {self.mean:.3f} only (mean over {self.num_groups} groups; {ACCEPTED[quantization]} is expected). "
            f"Set {key}={'int8 or none' if quantization == 'nf4' else 'none'}."
        )


def rank_correlation(rewards: Tensor, exact: Tensor, group: Sequence[int]) -> RankCorrelation:
    """Return the in-group rank correlations of two scorings. Rows without a reward (NaN) are left out.

    ``rewards``: [N], by the quantised student. ``exact``: [N], by its unquantised weights.
    """
    members: dict[int, list[int]] = {}
    for row, number in enumerate(group):
        if math.isfinite(float(rewards[row])) and math.isfinite(float(exact[row])):
            members.setdefault(number, []).append(row)
    of_groups = [spearman(rewards[rows], exact[rows]) for rows in members.values()]
    ordered = [value for value in of_groups if math.isfinite(value)]
    if not ordered:
        return RankCorrelation(math.nan, math.nan, 0)
    return RankCorrelation(sum(ordered) / len(ordered), min(ordered), len(ordered))


def spearman(one: Tensor, other: Tensor) -> float:
    """Return Spearman's rank correlation of two vectors, where equal values share their mean rank. NaN if one is constant."""
    first, second = (_ranks(values) for values in (one, other))
    first, second = first - first.mean(), second - second.mean()
    length = (first.square().sum() * second.square().sum()).sqrt()
    return float((first * second).sum() / length) if length > 0 else math.nan


def _ranks(values: Tensor) -> Tensor:
    """Return the mean rank of each value, fp64 [N]."""
    below = (values[:, None] > values[None, :]).sum(1)
    equal = (values[:, None] == values[None, :]).sum(1)
    return below.double() + (equal - 1).double() / 2


logger = logging.getLogger(__name__)

MOST_GROUPS = 16
"""Groups that are scored twice."""


@dataclass
class RankCheck:
    """Compares the rewards of a quantised student with those of its unquantised weights, once a start.

    Attributes:
        settings: Settings of the reward.
        quantization: How the student is quantised.
        key: The setting that says so.
        done: The check was made.
    """

    settings: RltReward
    quantization: str
    key: str
    done: bool = False

    def check(
        self,
        rows: StudentRows,
        scores: RltScores,
        teacher: Tensor | None,
        addresses: Sequence[str],
        exact: Callable[[StudentRows], StudentLogProbs],
    ) -> dict[str, float]:
        """Return ``rank_correlation``, and warn where it is too low. The metrics are empty after the first check.

        A batch without a group of two scored rows, or whose rewards are all equal in each group, is left to the next.

        ``teacher``: fp32 [tokens of all explanations]; None where the reward does not read it. ``addresses``: File and row of
        the question of each row. Rows with the same address are a group. ``exact``: Returns the log-probs of some rows under
        the unquantised weights.
        """
        chosen = [] if self.done else _some_groups(rows, addresses)
        if not chosen:
            return {}
        subset, names = rows.select(chosen), [addresses[row] for row in chosen]
        of_teacher = None if teacher is None else teacher[token_index(rows.parts[:, THINK].tolist(), chosen)]
        log_probs = exact(subset)
        unquantised = rlt_scores(self.settings, subset, log_probs.think, of_teacher, log_probs.solution, names)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        group = [numbers[name] for name in names]
        agreement = rank_correlation(scores.training_rewards()[chosen], unquantised.training_rewards(), group)
        if not agreement.num_groups:
            return {}
        self.done = True
        warning = agreement.warning(self.quantization, self.key)
        if warning is not None:
            logger.warning("%s", warning)
        logger.info(
            "%s=%s: the first explanations are ordered as by the unquantised weights with a rank correlation of %.3f "
            "(mean over %d groups, %.3f at least)", self.key, self.quantization, agreement.mean, agreement.num_groups,
            agreement.lowest,
        )  # fmt: skip
        return {"rank_correlation": agreement.mean}


def _some_groups(rows: StudentRows, addresses: Sequence[str]) -> list[int]:
    """Return the scored rows of the first groups that have two of them at least."""
    groups: dict[str, list[int]] = {}
    for row, is_scored in enumerate(rows.scored().tolist()):
        if is_scored:
            groups.setdefault(addresses[row], []).append(row)
    ordered = [members for members in groups.values() if len(members) > 1]
    return [row for members in ordered[:MOST_GROUPS] for row in members]
