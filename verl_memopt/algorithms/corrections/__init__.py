"""Corrections for a rollout engine whose probabilities differ from the trainer's: importance weights, rejection, metrics."""

from verl_memopt.algorithms.corrections.bypass import bypass_loss
from verl_memopt.algorithms.corrections.importance import importance_weights
from verl_memopt.algorithms.corrections.presets import PRESETS, CorrectionSettings, preset
from verl_memopt.algorithms.corrections.rejection import REJECTIONS, rejection
from verl_memopt.algorithms.corrections.rollout import Correction, correct

__all__ = [
    "PRESETS", "REJECTIONS", "Correction", "CorrectionSettings", "bypass_loss", "correct", "importance_weights", "preset",
    "rejection",
]  # fmt: skip
