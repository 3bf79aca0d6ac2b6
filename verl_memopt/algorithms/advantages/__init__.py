"""Advantage estimators: pure functions from rewards to advantages, and the statistics of the groups they compare."""

from verl_memopt.algorithms.advantages.estimators import ESTIMATORS, NEEDS, AdvantageInputs, TokenAdvantages
from verl_memopt.algorithms.advantages.groups import check_rewards, group_counts, group_statistics, has_signal
from verl_memopt.algorithms.advantages.outcome import (
    ADVANTAGES,
    gpg_advantages,
    grpo_advantages,
    grpo_passk_advantages,
    opo_advantages,
    rloo_advantages,
)

__all__ = [
    "ADVANTAGES", "ESTIMATORS", "NEEDS", "AdvantageInputs", "TokenAdvantages", "check_rewards", "gpg_advantages",
    "group_counts", "group_statistics", "grpo_advantages", "grpo_passk_advantages", "has_signal", "opo_advantages",
    "rloo_advantages",
]  # fmt: skip
