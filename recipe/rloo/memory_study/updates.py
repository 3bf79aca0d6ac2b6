"""The updates that save memory with the whole prompt and the same loss.

``no_retention`` and ``response_only`` mend the published program. The others are this project's own update pass, with one more of
its settings at each step. ``shared_prompt_checkpointing`` has the project's defaults.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe.rloo.memory_study.arms import Arm
from recipe.rloo.memory_study.legacy import (
    Options,
    Values,
    build_optimizer,
    forward,
    on_device,
    read_values,
    sequence_loss,
    token_log_probs,
)
from recipe.rloo.memory_study.meters import Meter
from recipe.rloo.memory_study.shapes import Shapes, StudyBatch
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import ActorRolloutRef
from verl_memopt.data.batch import Ragged, RolloutBatch, rollout_batch
from verl_memopt.distributed.device import join_process_group, leave_process_group, training_mesh
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.weights import named_weights
from verl_memopt.trainer.micro_batching import budgets
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.trained_model import micro_batches_of

RESPONSE_ONLY, CHUNKED = "response_only", "chunked"
SHARED, SHARED_CHECKPOINTING = "shared_prompt", "shared_prompt_checkpointing"
OWN_UPDATES = (CHUNKED, SHARED, SHARED_CHECKPOINTING)
"""Updates that are this project's own pass."""
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"


class MendedTrainer:
    """The published step without its retention: outputs are dropped at once, scores are not kept, no division is in place.

    The passes without gradient score ``micro_batch`` rows at a time too.

    Args:
        policy: The trained model.
        reference: The frozen model.
        shapes: Temperature, clip, epochs and learning rate.
        options: Micro-batch and precision.
        meter: Measures the phases.
        response_only: Compute the logits of the answers' positions alone.
    """

    def __init__(
        self, policy: nn.Module, reference: nn.Module, shapes: Shapes, options: Options, meter: Meter, response_only: bool
    ) -> None:
        """Build the optimizer."""
        self.policy, self.reference = policy, reference.requires_grad_(False)
        self.shapes, self.options, self.meter, self.response_only = shapes, options, meter, response_only
        self.optimizer = build_optimizer(policy, shapes.learning_rate)

    def train(self, batch: StudyBatch) -> Values:
        """Run the step on a batch and return the values of its first epoch."""
        meter = self.meter
        responses = on_device(batch.answers, meter.device)
        ids = torch.cat((on_device(batch.prompts, meter.device), responses), 1)
        advantages = torch.tensor(batch.advantages()).to(meter.device)
        with torch.no_grad():
            with meter.phase("old_log_prob"):
                old_log_probs = self._all_log_probs(self.policy, ids, responses, self.options.autocast)
                meter.empty_cache()
            with meter.phase("reference"):
                self._all_log_probs(self.reference, ids, responses, False)
                meter.empty_cache()
        drift = torch.tensor(batch.drift).to(meter.device) if self.options.for_values else None
        epochs = [self._epoch(epoch, ids, responses, old_log_probs, advantages, drift) for epoch in range(self.shapes.epochs)]
        return epochs[0]

    def _all_log_probs(self, model: nn.Module, ids: Tensor, responses: Tensor, mixed: bool) -> Tensor:
        size = self.options.micro_batch
        pairs = zip(ids.split(size), responses.split(size), strict=True)
        return torch.cat([token_log_probs(self._logits(model, rows, len(answers[0]), mixed), answers) for rows, answers in pairs])

    def _logits(self, model: nn.Module, ids: Tensor, response: int, mixed: bool) -> Tensor:
        """Return the logits of the answers' positions, fp32 [B, R, V]."""
        kept = {"logits_to_keep": response + 1} if self.response_only else {}
        logits = forward(model, ids, mixed, use_cache=False, **kept).logits
        return logits[:, -response - 1 : -1] / self.shapes.temperature

    def _epoch(
        self, epoch: int, ids: Tensor, responses: Tensor, old_log_probs: Tensor, advantages: Tensor, drift: Tensor | None
    ) -> Values:
        meter, size = self.meter, self.options.micro_batch
        shares = len(ids) // size
        total = torch.zeros((), device=meter.device)
        for start in range(0, len(ids), size):
            rows = slice(start, start + size)
            with meter.phase("forward", epoch):
                log_probs = token_log_probs(
                    self._logits(self.policy, ids[rows], responses.shape[1], self.options.autocast), responses[rows]
                )
                old = old_log_probs[rows].sum(1) if drift is None else log_probs.detach().sum(1) - drift[rows]
                loss = sequence_loss(log_probs.sum(1) - old, advantages[rows], self.shapes.clip).mean() / shares
                del log_probs
            with meter.phase("backward", epoch):
                loss.backward()
                total += loss.detach()
        with meter.phase("optimizer", epoch):
            values = read_values(self.policy, total, self.options.for_values and epoch == 0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            meter.empty_cache()
        return values


def own_settings(arm: Arm, shapes: Shapes, folder: Path) -> ActorRolloutRef:
    """Return this project's settings for an arm: its defaults but for what the arm switches off and the study holds equal.

    Compute is fp32, so that values can be compared. The loss, the epochs and the temperature are the published ones.

    Args:
        arm: One of OWN_UPDATES.
        shapes: The sizes.
        folder: Folder of the model.
    """
    shared = arm.update != CHUNKED
    rows = {f"{ACTOR}.use_dynamic_bsz": True} if shared else {f"{ACTOR}.ppo_micro_batch_size_per_gpu": arm.micro_batch}
    settings = settings_from_mapping(
        {
            "data.train_files": "none",
            "data.val_files": None,
            "data.train_batch_size": 1,
            "data.max_prompt_length": shapes.prompt,
            "data.max_response_length": shapes.response,
            "algorithm.adv_estimator": "rloo",
            f"{MODEL}.path": str(folder),
            f"{MODEL}.enable_gradient_checkpointing": arm.update == SHARED_CHECKPOINTING,
            f"{ACTOR}.use_prefix_grouper": shared,
            f"{ACTOR}.ppo_mini_batch_size": 1,
            f"{ACTOR}.ppo_epochs": shapes.epochs,
            f"{ACTOR}.policy_loss.loss_mode": "sequence",
            f"{ACTOR}.clip_ratio": shapes.clip,
            f"{ACTOR}.optim.lr": shapes.learning_rate,
            f"{ACTOR}.optim.clip_grad": None,
            f"{ACTOR}.optim.weight_decay": 0.0,
            f"{ACTOR}.fsdp_config.dtype": "fp32",
            "actor_rollout_ref.rollout.name": "hf",
            "actor_rollout_ref.rollout.n": arm.k,
            "actor_rollout_ref.rollout.dtype": "fp32",
            "actor_rollout_ref.rollout.temperature": shapes.temperature,
            "trainer.worker_group": "local",
        }
        | rows
    )
    return settings.actor_rollout_ref


@contextmanager
def own_policy(settings: ActorRolloutRef, epochs: int, device: torch.device) -> Iterator[Policy]:
    """Build the policy as a worker builds it, on one rank, and leave its process group at the end.

    Args:
        settings: As :func:`own_settings` returns them.
        epochs: Optimizer steps of the run.
        device: Where the policy computes.
    """
    model, actor = settings.model, settings.actor
    folder, fsdp = Path(model.path), actor.fsdp_config
    join_process_group(device, 0, 1, "", 0, 600)
    try:
        mesh = training_mesh(device.type, 1, fsdp.fsdp_size)
        recompute = model.enable_gradient_checkpointing
        policy_model = build_policy(model, fsdp, folder, mesh, device, ModelUse(recompute=recompute, trained=True))
        materialize(policy_model, folder, device)
        yield Policy(policy_model, actor, epochs, 1, device)
    finally:
        leave_process_group()


class OwnTrainer:
    """This project's log-prob pass and update on the study's batch.

    Args:
        policy: As :func:`own_policy` builds it.
        settings: Its settings.
        shapes: Temperature and epochs.
        arm: Its group size and micro-batch.
        options: Only ``for_values`` is read.
        meter: Measures the phases. ``backward`` is the whole forward and backward of an epoch, micro-batch by micro-batch.
    """

    def __init__(
        self, policy: Policy, settings: ActorRolloutRef, shapes: Shapes, arm: Arm, options: Options, meter: Meter
    ) -> None:
        """Remember the arguments."""
        self.policy, self.settings, self.shapes, self.arm, self.options, self.meter = (
            policy,
            settings,
            shapes,
            arm,
            options,
            meter,
        )

    def train(self, batch: StudyBatch) -> Values:
        """Run the step on a batch and return the values of its first epoch."""
        rows = project_batch(batch, self.settings)
        update, old_pass, _ = budgets(self.settings)
        names = [f"answer {row}" for row in range(batch.rows)]
        update_cuts, old_cuts = (budget.micro_batches(rows.row_tokens(), names) for budget in (update, old_pass))
        with self.meter.phase("old_log_prob"):
            rows.old_log_probs = self.policy.compute_log_probs(rows, old_cuts, self.shapes.temperature, False).log_probs
        if self.options.for_values:
            assert rows.old_log_probs is not None
            rows.old_log_probs[:: batch.response_len] -= torch.tensor(batch.drift)
        counts = GlobalCounts(tokens=float(batch.rows * batch.response_len), sequences=float(batch.rows))
        epochs = [self._epoch(epoch, rows, update_cuts, counts) for epoch in range(self.shapes.epochs)]
        return epochs[0]

    def _epoch(self, epoch: int, rows: RolloutBatch, cuts: Any, counts: GlobalCounts) -> Values:
        policy, trained = self.policy, self.policy.trained
        with self.meter.phase("backward", epoch):
            micro_batches = micro_batches_of(rows, cuts, policy.model.supports_prefix_kv)
            metrics = policy.accumulate(micro_batches, counts, self.shapes.temperature)
        with self.meter.phase("optimizer", epoch):
            keep = self.options.for_values and epoch == 0
            gradients = {name: _whole(parameter) for name, parameter in named_weights(policy.model)} if keep else None
            values = Values(float(metrics["actor/loss"]), float(trained.clip()), gradients)
            trained.apply()
            trained.optimizer.zero_grad(set_to_none=True)
        return values


def project_batch(batch: StudyBatch, settings: ActorRolloutRef) -> RolloutBatch:
    """Return the study's batch as the trainer holds it, without log-probs."""
    prompts = Ragged.from_rows([list(prompt) for prompt in batch.prompts], torch.int64)
    responses = Ragged.from_rows([list(answer) for answer in batch.answers], torch.int64)
    rows = rollout_batch(prompts, responses, torch.zeros(batch.rows, dtype=torch.int64), settings.actor)
    rows.advantages = torch.tensor(batch.advantages()).repeat_interleave(batch.response_len)
    return rows


def _whole(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().cpu().clone()
