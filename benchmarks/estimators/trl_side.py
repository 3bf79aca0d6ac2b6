"""TRL's policy losses, from ``_compute_loss`` of its trainers, on padded rows.

The method is called with a stand-in for the trainer that holds the settings which it reads and gives log-probs in place of a
model's. TRL computes advantages inside its generation step, so that there is no function of its own to call for them.
"""

from __future__ import annotations

import types
import warnings
from collections import defaultdict
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator

from benchmarks.estimators.batch import CLIP_HIGH, CLIP_LOW, SCALE_FACTOR, Batch, with_gradient
from benchmarks.estimators.ours import NO_DUAL_CLIP, NO_LOWER_CLIP, Case, Values

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import GRPOTrainer, RLOOTrainer
    from trl.experimental.gmpo import GMPOTrainer

VERSION = version("trl")


def policy(trainer: type, loss_type: str = "grpo", level: str = "token", high: float = CLIP_HIGH) -> Case:
    def values(batch: Batch) -> Values:
        leaf = batch.pad(batch.log_probs).requires_grad_()
        stand_in = types.SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(leaf), None),
            accelerator=Accelerator(cpu=True), model=types.SimpleNamespace(training=True), aux_loss_enabled=False,
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=level, beta=0.0,
            args=types.SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
            loss_type=loss_type, epsilon_low=CLIP_LOW, epsilon_high=high, use_vllm=False,
            vllm_importance_sampling_correction=False, current_gradient_accumulation_steps=1,
            max_completion_length=SCALE_FACTOR, _entropy_bonus_enabled=False, use_adaptive_entropy=False,
            _metrics=defaultdict(lambda: defaultdict(list)),
        )  # fmt: skip
        rows, longest = batch.mask.shape
        ids = torch.zeros(rows, longest, dtype=torch.int64)
        inputs: dict[str, Any] = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": batch.mask,
            "advantages": batch.advantages, "old_per_token_logps": batch.pad(batch.old_log_probs),
            "old_logps": (batch.pad(batch.old_log_probs) * batch.mask).sum(1), "num_items_in_batch": batch.mask.sum(),
        }  # fmt: skip
        return with_gradient(batch, trainer._compute_loss(stand_in, None, inputs), leaf)

    return values


VALUES: dict[str, Case] = {
    f"loss vanilla{NO_DUAL_CLIP}, seq-mean-token-mean": policy(GRPOTrainer, "grpo"),
    f"loss vanilla{NO_DUAL_CLIP}, token-mean": policy(GRPOTrainer, "dapo"),
    f"loss vanilla{NO_DUAL_CLIP}, seq-mean-token-sum-norm": policy(GRPOTrainer, "dr_grpo"),
    f"loss cispo{NO_LOWER_CLIP}, token-mean": policy(GRPOTrainer, "cispo", high=1 + CLIP_HIGH),
    "loss gspo": policy(GRPOTrainer, "grpo", "sequence"),
    "loss sequence": policy(RLOOTrainer),
    "loss geo_mean": policy(GMPOTrainer),
}
"""Name of a case -> TRL's values. TRL's upper bound of CISPO is of the ratio itself, not of its distance from 1."""
