"""Checks, in the first scored batch, that a quantised student orders explanations as its unquantised weights do.

At load there is nothing to order: random tokens say how large the error of a log-prob is, and not whether it is smaller than the
differences between real explanations. So the check waits for the first explanations of the policy, and scores some of them twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from verl_memopt.config.schema.rlt import RltReward
from verl_memopt.data.ragged import token_index
from verl_memopt.rewards.rlt.formula import RltScores, rlt_scores
from verl_memopt.rewards.rlt.rank_agreement import rank_agreement
from verl_memopt.rewards.rlt.student_rows import THINK, StudentRows
from verl_memopt.workers.rlt_scores import StudentLogProbs

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

        Args:
            rows: What the student read.
            scores: The rewards of these rows.
            teacher: fp32 [tokens of all explanations]; None where the reward does not read it.
            addresses: File and row of the question of each row. Rows with the same address are a group.
            exact: Returns the log-probs of some rows under the unquantised weights.
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
        agreement = rank_agreement(scores.training_rewards()[chosen], unquantised.training_rewards(), group)
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
