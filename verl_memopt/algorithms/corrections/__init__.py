"""Corrections for a rollout engine whose probabilities differ from the trainer's: importance weights, rejection, metrics."""

from verl_memopt.algorithms.corrections.bypass import bypass_loss, is_token_local
from verl_memopt.algorithms.corrections.importance import bounded_weights, importance_weights, mean_weight
from verl_memopt.algorithms.corrections.rejection import kept_lengths, rejection
from verl_memopt.algorithms.corrections.rollout import Correction, correct, corrects_before_update

__all__ = [
    "Correction", "bounded_weights", "bypass_loss", "correct", "corrects_before_update", "importance_weights", "is_token_local",
    "kept_lengths", "mean_weight", "rejection",
]  # fmt: skip
