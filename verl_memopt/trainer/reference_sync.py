"""The reference that follows the policy, as the driver sees it: when it moves, and what a checkpoint keeps of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl_memopt.trainer.timed_group import TimedGroup
from verl_memopt.workers.trained_model import ACTOR
from verl_memopt.workers.worker import Worker


@dataclass
class ReferenceSync:
    """Moves the reference towards the policy every so many steps that update the policy.

    Attributes:
        workers: Workers that hold both models.
        every: Number of such steps from one move to the next.
        optimizer_steps: Optimizer steps of the policy in one training step.
        steps: Steps so far that updated the policy.
    """

    workers: TimedGroup
    every: int
    optimizer_steps: int
    steps: int = 0

    def after_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Count a step, move the reference if it is time, and return the metric ``ref/sync``: 1 for a move, else 0.

        A step whose optimizer steps were all skipped is not counted: the policy is what it was.

        Args:
            metrics: Metrics of the policy's update.
        """
        is_due = False
        if metrics[ACTOR.skipped] < self.optimizer_steps:
            self.steps += 1
            is_due = self.steps % self.every == 0
        if is_due:
            self.workers.all("sync_ref", Worker.sync_reference)
        return {"ref/sync": float(is_due)}

    def state_dict(self) -> dict[str, int]:
        """Return the state for a checkpoint."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a state that :meth:`state_dict` returned."""
        self.steps = state["steps"]
