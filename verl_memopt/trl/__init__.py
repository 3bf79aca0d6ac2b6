"""TRL's trainers under their own names. A TRL script runs with ``from verl_memopt.trl import GRPOConfig, GRPOTrainer``.

The trainers take TRL's arguments. An argument with a counterpart here is translated to it (docs/from_trl.md). Any other argument
is refused with an error that names it. ``trainer.run`` is the finished run (:class:`verl_memopt.api.Run`).
"""

from __future__ import annotations

from typing import ClassVar

from verl_memopt.trl.config import GRPOConfig, RLOOConfig
from verl_memopt.trl.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)
from verl_memopt.trl.trainer import TrlTrainer

__all__ = [
    "GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer", "accuracy_reward", "get_cosine_scaled_reward",
    "get_repetition_penalty_reward", "get_soft_overlong_punishment", "reasoning_accuracy_reward", "think_format_reward",
]  # fmt: skip


class GRPOTrainer(TrlTrainer):
    """TRL's ``GRPOTrainer``."""

    algorithm: ClassVar[str] = "grpo"
    config: ClassVar[type[GRPOConfig]] = GRPOConfig

    @property
    def entropy_coef(self) -> float:
        """The weight of the entropy bonus after the last step."""
        logged = (entry["entropy_coef"] for entry in reversed(self.state.log_history) if "entropy_coef" in entry)
        return float(next(logged, getattr(self.args, "entropy_coef", None) or 0.0))


class RLOOTrainer(TrlTrainer):
    """TRL's ``RLOOTrainer``."""

    algorithm: ClassVar[str] = "rloo"
    config: ClassVar[type[GRPOConfig]] = RLOOConfig
