"""Counts steps that applied no update, over restarts too, and ends the run when there are too many in a row."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_memopt.errors import TrainingError
from verl_memopt.trainer.checkpoints import CheckpointStore
from verl_memopt.workers.trained_model import ACTOR, CRITIC, Role

logger = logging.getLogger(__name__)

KEY = "trainer.max_skipped_steps"
PATHS = {
    ACTOR: "actor_rollout_ref.model.path and actor_rollout_ref.actor.fsdp_config.dtype",
    CRITIC: "critic.model.path and critic.model.fsdp_config.dtype",
}
"""Role -> settings that a first update without finite gradients points to."""
LARGE = 1e6
"""Advantages above this make gradients overflow, whatever the weights are."""
BAD_LOG_PROBS = "training/log_probs_not_finite"
"""Metric: how many of the policy's log-probs before the update are NaN or infinite."""


@dataclass
class _Updates:
    """The updates of a trained role so far.

    Attributes:
        role: The role.
        lr: Its learning rate.
        updates_per_step: Its optimizer steps in one training step.
    """

    role: Role
    lr: float
    updates_per_step: int
    skipped_in_a_row: int = 0
    applied_step: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {"skipped_in_a_row": self.skipped_in_a_row, "applied_step": self.applied_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint."""
        self.skipped_in_a_row, self.applied_step = state["skipped_in_a_row"], state["applied_step"]


class UpdateGuard:
    """Watches the updates of each step, and marks checkpoints whose weights have proven good."""

    def __init__(
        self,
        max_skipped_steps: int,
        lr: float,
        store: CheckpointStore,
        updates_per_step: int,
        critic_lr: float | None = None,
        critic_updates_per_step: int = 0,
    ) -> None:
        """Start to count.

        Args:
            max_skipped_steps: Steps in a row without any update of a role that end the run.
            lr: Learning rate of the policy, which the error says to lower.
            store: Checkpoints of the run.
            updates_per_step: Optimizer steps of the policy in one training step.
            critic_lr: Learning rate of the critic; None = there is none.
            critic_updates_per_step: Optimizer steps of the critic in one training step.
        """
        self._max_skipped_steps = max_skipped_steps
        self._store = store
        self._actor = _Updates(ACTOR, lr, updates_per_step)
        self._critic = None if critic_lr is None else _Updates(CRITIC, critic_lr, critic_updates_per_step)

    def watch(self, step: int, metrics: Mapping[str, float], sound: bool) -> None:
        """Judge a finished step.

        Weights are good if they gave a finite gradient other than 0 and the reward has not collapsed. A step begins with the
        weights of the checkpoint before it, so that checkpoint is then proven. A gradient of exactly 0 proves nothing. With a
        critic, both models must be good. A role that was not updated in the step is not judged.

        Args:
            step: Number of the step.
            metrics: Metrics of the step.
            sound: The reward has not collapsed.

        Raises:
            TrainingError: ``trainer.max_skipped_steps`` steps in a row applied no update.
        """
        trained = [self._actor] if self._critic is None else [self._actor, self._critic]
        good = [self._judge(updates, step, metrics) for updates in trained if updates.role.skipped in metrics]
        if sound and all(good):
            self._store.prove(step - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        critic = {} if self._critic is None else {"critic": self._critic.state_dict()}
        return self._actor.state_dict() | critic

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint."""
        self._actor.load_state_dict(state)
        if self._critic is not None:
            self._critic.load_state_dict(state["critic"])

    def _judge(self, updates: _Updates, step: int, metrics: Mapping[str, float]) -> bool:
        """Count the updates of a role in a step, and return whether its weights are good."""
        role = updates.role
        skipped, norm = int(metrics[role.skipped]), metrics[role.grad_norm]
        if skipped:
            logger.warning(
                "step %d: the gradient norm%s is %s. %d of %d updates skipped: weights, optimizer state and schedule are "
                "unchanged", step, _of(role), norm, skipped, updates.updates_per_step,
            )  # fmt: skip
        if skipped < updates.updates_per_step:
            updates.skipped_in_a_row, updates.applied_step = 0, step
            return norm != 0.0
        updates.skipped_in_a_row += 1
        if updates.skipped_in_a_row >= self._max_skipped_steps:
            raise TrainingError(self._message(updates, step, norm, metrics))
        return False

    def _message(self, updates: _Updates, step: int, norm: float, metrics: Mapping[str, float]) -> str:
        first = step - updates.skipped_in_a_row + 1
        steps = f"step {step}" if first == step else f"steps {first} to {step}"
        weights = f"the update of step {updates.applied_step}" if updates.applied_step else "the model that the run began with"
        return (
            f"{KEY}={self._max_skipped_steps}: {steps} applied no update{_of(updates.role)}, because the gradient norm was not "
            f"finite ({norm}). The weights are those of {weights}. {_cause(updates, metrics)} "
            f"{way_back(updates.role, updates.lr, self._store)}"
        )


def _of(role: Role) -> str:
    return "" if role is ACTOR else f" of the {role.name}"


def _cause(updates: _Updates, metrics: Mapping[str, float]) -> str:
    """Return why the gradients of a role are probably not finite."""
    learned, outputs = ("advantages", "log-probs") if updates.role is ACTOR else ("returns", "values")
    low, high = (metrics.get(f"critic/{learned}/{name}", 0.0) for name in ("min", "max"))
    if updates.role is ACTOR:
        is_damaged = bool(metrics.get(BAD_LOG_PROBS))
    else:
        is_damaged = not math.isfinite(metrics.get("critic/values/mean", 0.0))
    if is_damaged:
        symptom = f"They give {outputs} that are not finite"
    elif max(abs(low), abs(high)) > LARGE:
        return f"The {learned} reach from {low:.4g} to {high:.4g}: look at the rewards first."
    else:
        symptom = f"Their {outputs} are finite, but their gradients overflow"
    if updates.applied_step:
        return f"{symptom}: that update has damaged them."
    return f"{symptom}: check {PATHS[updates.role]}."


def way_back(role: Role, lr: float, store: CheckpointStore) -> str:
    """Return how to continue after an update that damaged the weights: from which checkpoint and with which settings.

    Args:
        role: The role that took the update.
        lr: Its learning rate, which is to be lowered.
        store: Checkpoints of the run.
    """
    lower = f"{role.key}.optim.lr=<less than {lr:g}>"
    proven = store.proven()
    if proven is None:
        return f"No checkpoint of this run has proven good. Start again with a lower rate: trainer.resume_mode=disable {lower}"
    return (
        f"The checkpoint of step {proven} is good: its weights gave finite gradients. Go on from it with a lower rate: "
        f"trainer.resume_mode=resume_path trainer.resume_from_path={store.folder(proven)} {lower}"
    )
