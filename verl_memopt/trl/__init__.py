"""TRL's trainers under their own names. A TRL script runs with ``from verl_memopt.trl import GRPOConfig, GRPOTrainer``.

The trainers take TRL's arguments. An argument with a counterpart here is translated to it (docs/from_trl.md). Any other argument
is refused with an error that names it. ``trainer.run`` is the finished run (:class:`verl_memopt.api.Run`).

What scripts import beside the trainers, such as ``TrlParser`` and ``RichProgressCallback``, is TRL's own and needs TRL.
"""

from __future__ import annotations

from typing import Any, ClassVar

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

OF_TRL = (
    "LogCompletionsCallback", "ModelConfig", "RichProgressCallback", "ScriptArguments", "TrlParser", "get_kbit_device_map",
    "get_peft_config", "get_quantization_config",
)  # fmt: skip
"""Names that come from TRL itself."""


def __getattr__(name: str) -> Any:
    if name not in OF_TRL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import trl
    except ImportError as problem:
        raise ImportError(f"{name} is TRL's own, and TRL cannot be imported ({problem}). Run pip install trl.") from problem
    return _parser(trl) if name == "TrlParser" else getattr(trl, name)


def _parser(trl: Any) -> Any:
    theirs = {GRPOConfig: "GRPOConfig", RLOOConfig: "RLOOConfig"}

    class TrlParser(trl.TrlParser):
        """TRL's parser of command lines. It reads TRL's configs in place of ours, which are no dataclasses."""

        def __init__(self, dataclass_types: Any = None, **options: Any) -> None:
            given = dataclass_types if isinstance(dataclass_types, list | tuple) else [dataclass_types]
            super().__init__([getattr(trl, theirs[kind]) if kind in theirs else kind for kind in given if kind], **options)

    return TrlParser


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
