"""Losses over flat response tokens.

``log_probs``, ``old_log_probs``, ``advantages`` are ``[R]`` fp32. ``row [R]`` is the row of each token, ``lengths [rows]`` the
response length of each row. Loss and metrics are shares of the mini-batch: sum them over micro-batches and ranks, never
average them.
"""

from verl_memopt.algorithms.losses.covariance import SELECTIONS
from verl_memopt.algorithms.losses.policy import LOSSES, TOKEN_LOCAL, policy_loss, with_shared_metrics
from verl_memopt.algorithms.losses.tokens import LossAndMetrics, LossSettings, LossTokens
from verl_memopt.algorithms.losses.value import explained_variance, value_loss

__all__ = [
    "LOSSES", "SELECTIONS", "TOKEN_LOCAL", "LossAndMetrics", "LossSettings", "LossTokens", "explained_variance", "policy_loss",
    "value_loss", "with_shared_metrics",
]  # fmt: skip
