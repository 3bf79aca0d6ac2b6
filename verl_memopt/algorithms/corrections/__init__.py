"""Corrections for a rollout engine whose probabilities differ from the trainer's: importance weights, rejection, metrics."""

from verl_memopt.algorithms.corrections.bypass import bypass_loss
from verl_memopt.algorithms.corrections.importance import importance_weights
from verl_memopt.algorithms.corrections.rejection import rejection
from verl_memopt.algorithms.corrections.rollout import Correction, correct

__all__ = ["Correction", "bypass_loss", "correct", "importance_weights", "rejection"]
