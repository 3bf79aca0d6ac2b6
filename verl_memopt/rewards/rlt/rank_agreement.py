"""How far a quantised student orders the explanations of a question as its unquantised weights do.

Advantages are normalised within a group, so a shift of all rewards of a group changes nothing. What counts is their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

ACCEPTED = {"int8": 0.98, "nf4": 0.95}
"""Least mean in-group Spearman correlation with which a quantised student is taken without a warning."""


@dataclass(frozen=True)
class RankAgreement:
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
        """Return a warning where the agreement is too low; None where it is high enough, or no group has an order.

        Args:
            quantization: A key of :data:`ACCEPTED`.
            key: The setting that chose it.
        """
        if not self.num_groups or self.mean >= ACCEPTED[quantization]:
            return None
        return (
            f"{key}={quantization}: the student orders the explanations of a question as its unquantised weights do with a rank "
            f"correlation of {self.mean:.3f} only (mean over {self.num_groups} groups; {ACCEPTED[quantization]} is expected). "
            f"Set {key}={'int8 or none' if quantization == 'nf4' else 'none'}."
        )


def rank_agreement(rewards: Tensor, exact: Tensor, group: Sequence[int]) -> RankAgreement:
    """Return the in-group rank correlations of two scorings. Rows without a reward (NaN) are left out.

    Args:
        rewards: [N], by the quantised student.
        exact: [N], by its unquantised weights.
        group: The group of each row.
    """
    members: dict[int, list[int]] = {}
    for row, number in enumerate(group):
        if math.isfinite(float(rewards[row])) and math.isfinite(float(exact[row])):
            members.setdefault(number, []).append(row)
    of_groups = [spearman(rewards[rows], exact[rows]) for rows in members.values()]
    ordered = [value for value in of_groups if math.isfinite(value)]
    if not ordered:
        return RankAgreement(math.nan, math.nan, 0)
    return RankAgreement(sum(ordered) / len(ordered), min(ordered), len(ordered))


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
