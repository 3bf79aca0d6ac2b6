"""TRL's trainers under their own names. A TRL script runs with ``from verl_memopt.trl import GRPOConfig, GRPOTrainer``.

The trainers take TRL's arguments. An argument with a counterpart here is translated to it (docs/from_trl.md). Any other argument
is refused with an error that names it. ``trainer.run`` is the finished run (:class:`verl_memopt.api.Run`).

What scripts import beside the trainers, such as ``TrlParser`` and ``RichProgressCallback``, is TRL's own and needs TRL.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from verl_memopt.trl.config import DistillationConfig, GKDConfig, GOLDConfig, GRPOConfig, RLOOConfig, SDFTConfig
from verl_memopt.trl.distillation import DistillationTrainer, GKDTrainer, GOLDTrainer, SDFTTrainer
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
    "DistillationConfig", "DistillationTrainer", "GKDConfig", "GKDTrainer", "GOLDConfig", "GOLDTrainer", "GRPOConfig",
    "GRPOTrainer", "RLOOConfig", "RLOOTrainer", "SDFTConfig", "SDFTTrainer", "accuracy_reward", "get_cosine_scaled_reward",
    "get_repetition_penalty_reward", "get_soft_overlong_punishment", "reasoning_accuracy_reward", "think_format_reward",
]  # fmt: skip

OF_TRL = (
    "LogCompletionsCallback", "ModelConfig", "RichProgressCallback", "ScriptArguments", "TrlParser", "get_kbit_device_map",
    "get_peft_config", "get_quantization_config",
)  # fmt: skip
"""Names that come from TRL itself."""
_SERVER = "a server's address is a setting here. Use DistillationTrainer with teacher.endpoint.url"
NOT_HERE = {
    "MiniLLM": "its reward of whole responses is not here. Use DistillationTrainer with beta=1.0, which is exact at each token",
    "SDPO": "a policy does not learn from its own successful answers. Use SDFTTrainer with a column privileged_context",
    "ServerDistillation": _SERVER, "AsyncDistillation": _SERVER,
}  # fmt: skip
"""Start of the name of a trainer of TRL's distillation -> why it is not here, and the way out."""


def __getattr__(name: str) -> Any:
    kind = name.removesuffix("Trainer").removesuffix("Config")
    if kind in NOT_HERE and kind != name:
        raise ImportError(f"{name}: {NOT_HERE[kind]}.")
    if name not in OF_TRL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import trl
    except ImportError as problem:
        raise ImportError(f"{name} is TRL's own, and TRL cannot be imported ({problem}). Run pip install trl.") from problem
    return _parser(trl) if name == "TrlParser" else getattr(trl, name)


def _parser(trl: Any) -> Any:
    def theirs(kind: Any) -> Any:
        if kind in (GKDConfig, GOLDConfig, SDFTConfig):
            return getattr(importlib.import_module(f"trl.experimental.{kind.algorithm}"), kind.__name__)
        return getattr(trl, kind.__name__) if kind in (DistillationConfig, GRPOConfig, RLOOConfig) else kind

    class TrlParser(trl.TrlParser):
        """TRL's parser of command lines. It reads TRL's configs in place of ours, which are no dataclasses."""

        def __init__(self, dataclass_types: Any = None, **options: Any) -> None:
            given = dataclass_types if isinstance(dataclass_types, list | tuple) else [dataclass_types]
            super().__init__([theirs(kind) for kind in given if kind], **options)

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
