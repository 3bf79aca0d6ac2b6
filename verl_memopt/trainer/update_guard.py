"""Counts steps that applied no update, over restarts too, and ends the run when there are too many in a row."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from verl_memopt.errors import TrainingError
from verl_memopt.trainer.checkpoints import CheckpointStore
from verl_memopt.workers.trained_model import ACTOR

logger = logging.getLogger(__name__)

KEY = "trainer.max_skipped_steps"
LR = "actor_rollout_ref.actor.optim.lr"
LARGE = 1e6
"""Advantages above this make gradients overflow, whatever the weights are."""
BAD_LOG_PROBS = "training/log_probs_not_finite"
"""Metric: how many of the policy's log-probs before the update are NaN or infinite."""


class UpdateGuard:
    """Watches the updates of each step, and marks checkpoints whose weights have proven good."""

    def __init__(self, max_skipped_steps: int, lr: float, store: CheckpointStore, updates_per_step: int) -> None:
        """Start to count.

        Args:
            max_skipped_steps: Steps in a row without any update that end the run.
            lr: Learning rate, which the error says to lower.
            store: Checkpoints of the run.
            updates_per_step: Optimizer steps of one training step.
        """
        self._max_skipped_steps = max_skipped_steps
        self._lr = lr
        self._store = store
        self._updates_per_step = updates_per_step
        self._skipped_in_a_row = 0
        self._applied_step = 0

    def watch(self, step: int, metrics: Mapping[str, float], sound: bool) -> None:
        """Judge a finished step.

        Weights are good if they gave a finite gradient other than 0 and the reward has not collapsed. A step begins with the
        weights of the checkpoint before it, so that checkpoint is then proven. A gradient of exactly 0 proves nothing.

        Args:
            step: Number of the step.
            metrics: Metrics of the step.
            sound: The reward has not collapsed.

        Raises:
            TrainingError: ``trainer.max_skipped_steps`` steps in a row applied no update.
        """
        skipped, norm = int(metrics[ACTOR.skipped]), metrics[ACTOR.grad_norm]
        if skipped:
            logger.warning(
                "step %d: the gradient norm is %s. %d of %d updates skipped: weights, optimizer state and schedule are unchanged",
                step, norm, skipped, self._updates_per_step,
            )  # fmt: skip
        if skipped < self._updates_per_step:
            self._skipped_in_a_row, self._applied_step = 0, step
            if sound and norm != 0.0:
                self._store.prove(step - 1)
            return
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self._max_skipped_steps:
            raise TrainingError(self._message(step, norm, metrics))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {"skipped_in_a_row": self._skipped_in_a_row, "applied_step": self._applied_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint."""
        self._skipped_in_a_row, self._applied_step = state["skipped_in_a_row"], state["applied_step"]

    def _message(self, step: int, norm: float, metrics: Mapping[str, float]) -> str:
        first = step - self._skipped_in_a_row + 1
        steps = f"step {step}" if first == step else f"steps {first} to {step}"
        weights = f"the update of step {self._applied_step}" if self._applied_step else "the model that the run began with"
        return (
            f"{KEY}={self._max_skipped_steps}: {steps} applied no update, because the gradient norm was not "
            f"finite ({norm}). The weights are those of {weights}. {self._cause(metrics)} {way_back(self._lr, self._store)}"
        )

    def _cause(self, metrics: Mapping[str, float]) -> str:
        """Return why the gradients are probably not finite."""
        low, high = (metrics.get(f"critic/advantages/{name}", 0.0) for name in ("min", "max"))
        if metrics.get(BAD_LOG_PROBS):
            symptom = "They give log-probs that are not finite"
        elif max(abs(low), abs(high)) > LARGE:
            return f"The advantages reach from {low:.4g} to {high:.4g}: look at the rewards first."
        else:
            symptom = "Their log-probs are finite, but their gradients overflow"
        if self._applied_step:
            return f"{symptom}: that update has damaged them."
        return f"{symptom}: check actor_rollout_ref.model.path and actor_rollout_ref.actor.fsdp_config.dtype."


def way_back(lr: float, store: CheckpointStore) -> str:
    """Return how to continue after an update that damaged the weights: from which checkpoint and with which settings."""
    lower = f"{LR}=<less than {lr:g}>"
    proven = store.proven()
    if proven is None:
        return f"No checkpoint of this run has proven good. Start again with a lower rate: trainer.resume_mode=disable {lower}"
    return (
        f"The checkpoint of step {proven} is good: its weights gave finite gradients. Go on from it with a lower rate: "
        f"trainer.resume_mode=resume_path trainer.resume_from_path={store.folder(proven)} {lower}"
    )
