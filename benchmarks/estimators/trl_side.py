"""TRL's advantages and policy losses, from the methods of its trainers, on padded rows.

The methods are called with a stand-in for the trainer. It holds the settings that they read and gives log-probs, responses and
rewards in place of a model's. TRL computes advantages inside its generation step, which then generates nothing.
"""

from __future__ import annotations

import inspect
import types
import warnings
from collections import defaultdict
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator

from benchmarks.estimators.batch import CLIP_HIGH, CLIP_LOW, GROUP_SIZE, SCALE_FACTOR, Batch, with_gradient
from benchmarks.estimators.ours import NO_DUAL_CLIP, NO_LOWER_CLIP, UNSCORED, Case, Values, unscored

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import GRPOTrainer, RLOOTrainer
    from trl.experimental.gmpo import GMPOTrainer

VERSION = version("trl")


class StandIn:
    """A trainer whose settings are off unless they are given."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def advantages(trainer: type, batch: Batch, scale_rewards: str = "none") -> Values:
    rows = len(batch.scores)
    ids, texts = [[1]] * rows, ["x"] * rows
    generated = (ids, ids, texts) if trainer is RLOOTrainer else (ids, ids, None, texts, None, {}, None, None)
    stand_in = StandIn(
        accelerator=Accelerator(cpu=True), model=types.SimpleNamespace(training=True, is_gradient_checkpointing=False),
        args=StandIn(per_device_train_batch_size=rows, gradient_accumulation_steps=1, steps_per_generation=1),
        _generate=lambda prompts: generated, _tokenizer=types.SimpleNamespace(pad_token_id=0, eos_token_id=2),
        _get_per_token_logps_and_entropies=lambda *_, **__: (torch.zeros(rows, 1), None, None),
        _calculate_rewards=lambda *_: batch.scores[:, None], reward_weights=torch.ones(1, dtype=batch.scores.dtype),
        reward_funcs=[None], reward_func_names=["score"], num_generations=GROUP_SIZE, num_iterations=1, beta=0.0,
        scale_rewards=scale_rewards, multi_objective_aggregation="sum_then_normalize", chat_template_kwargs={},
        _metrics=defaultdict(lambda: defaultdict(list)), _pending_extra_logs={}, _pending_metrics={},
        _logs={"prompt": [], "completion": [], "rewards": defaultdict(list), "advantages": [], "extra": defaultdict(list)},
    )  # fmt: skip
    compute = inspect.unwrap(trainer._generate_and_score_completions)
    per_token = compute(stand_in, [{"prompt": "p"}] * rows)["advantages"][batch.row]
    return {"advantages": per_token, "returns": per_token}


def policy(trainer: type, batch: Batch, loss_type: str = "grpo", level: str = "token", high: float = CLIP_HIGH) -> Values:
    leaf = batch.pad(batch.log_probs).requires_grad_()
    stand_in = StandIn(
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


VALUES: dict[str, Case] = {
    "advantages rloo": partial(advantages, RLOOTrainer),
    "advantages grpo": partial(advantages, GRPOTrainer, scale_rewards="group"),
    "advantages grpo, no std": partial(advantages, GRPOTrainer),
    f"advantages rloo{UNSCORED}": unscored(partial(advantages, RLOOTrainer)),
    f"advantages grpo, no std{UNSCORED}": unscored(partial(advantages, GRPOTrainer)),
    f"loss vanilla{NO_DUAL_CLIP}, seq-mean-token-mean": partial(policy, GRPOTrainer, loss_type="grpo"),
    f"loss vanilla{NO_DUAL_CLIP}, token-mean": partial(policy, GRPOTrainer, loss_type="dapo"),
    f"loss vanilla{NO_DUAL_CLIP}, seq-mean-token-sum-norm": partial(policy, GRPOTrainer, loss_type="dr_grpo"),
    f"loss cispo{NO_LOWER_CLIP}, token-mean": partial(policy, GRPOTrainer, loss_type="cispo", high=1 + CLIP_HIGH),
    "loss gspo": partial(policy, GRPOTrainer, loss_type="grpo", level="sequence"),
    "loss sequence": partial(policy, RLOOTrainer),
    "loss geo_mean": partial(policy, GMPOTrainer),
}
"""Name of a case -> TRL's values. TRL's upper bound of CISPO is of the ratio itself, not of its distance from 1."""
