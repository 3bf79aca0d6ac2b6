"""The sections ``optim`` and ``fsdp_config``, which say how a model is sharded and updated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from verl_memopt.knobs.activation_checkpointing import ActivationCheckpointing
from verl_memopt.knobs.activation_offload import ActivationOffload
from verl_memopt.knobs.bucketed_adamw import BucketedAdamW
from verl_memopt.knobs.lora import Lora
from verl_memopt.knobs.native_offload import NativeOffload
from verl_memopt.knobs.optimizer_in_backward import OptimizerInBackward
from verl_memopt.knobs.optimizer_offload import OptimizerOffload
from verl_memopt.knobs.optimizer_state_dtype import OptimizerStateDtype
from verl_memopt.knobs.param_offload import ParamOffload
from verl_memopt.knobs.precision import PrecisionSettings
from verl_memopt.knobs.prune_last_block import PruneLastBlock
from verl_memopt.knobs.recompute_elementwise import RecomputeElementwise
from verl_memopt.knobs.resharding import GradientSync, Resharding
from verl_memopt.knobs.sharding_units import ShardingUnits
from verl_memopt.knobs.stochastic_rounding import StochasticRounding
from verl_memopt.knobs.tiled_mlp import TiledMlpSettings
from verl_memopt.knobs.values import (
    MINUS_ONE_OR_MORE,
    POSITIVE,
    CountOrMinusOne,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    Range,
    Share,
)

Schedule = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "cosine_with_restarts", "polynomial",
    "inverse_sqrt", "warmup_stable_decay",
]  # fmt: skip
DECAYS = Range("must each be at least 0 and below 1", lambda pair: all(0 <= decay < 1 for decay in pair))


# A section has the fields of its knobs. Fields of the last base come first, so that the page lists knobs in their order.
@dataclass(frozen=True)
class ModelKnobs(Lora, ActivationOffload, ActivationCheckpointing, TiledMlpSettings, PruneLastBlock, RecomputeElementwise):
    """The knobs that act in the policy's model and in the critic's."""


@dataclass(frozen=True)
class Optim(OptimizerInBackward, StochasticRounding, OptimizerStateDtype, BucketedAdamW):
    """Optimizer and schedule."""

    lr: NaturalFloat = 1e-6
    """Peak learning rate."""
    weight_decay: NaturalFloat = 0.01
    """Decoupled weight decay."""
    betas: Annotated[tuple[float, float], DECAYS] = (0.9, 0.999)
    """Adam's moment decays."""
    clip_grad: Annotated[float | None, POSITIVE] = 1.0
    """Global gradient-norm clip; null = no clipping, the norm is still reported."""
    lr_scheduler_type: Schedule = "constant"
    """Shape of the learning rate after the warm-up, by transformers' names. constant keeps ``lr``; the others lower it."""
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Further arguments of transformers' schedule, such as ``power`` of polynomial or ``num_decay_steps`` of
    warmup_stable_decay."""
    min_lr_ratio: Share = 0.0
    """Floor of the schedule as a share of ``lr``."""
    num_cycles: PositiveFloat = 0.5
    """Waves of cosine over the run: 0.5 falls once from ``lr`` to the floor. cosine_with_restarts takes a whole number."""
    lr_warmup_steps: Annotated[int, MINUS_ONE_OR_MORE] = -1
    """Optimizer steps of linear warm-up; -1 = use ``lr_warmup_steps_ratio``."""
    lr_warmup_steps_ratio: Share = 0.0
    """Warm-up as a share of the run's optimizer steps."""
    total_training_steps: CountOrMinusOne = -1
    """Length of the schedule in optimizer steps; -1 = the run's own number."""


@dataclass(frozen=True)
class WrapPolicy:
    """Which modules become FSDP units."""

    transformer_layer_cls_to_wrap: list[str] | None = None
    """Block classes that become shards; null = the model's own decoder blocks."""


@dataclass(frozen=True)
class Fsdp(PrecisionSettings, ShardingUnits, Resharding, NativeOffload, ParamOffload):
    """Sharding and precision of a model."""

    wrap_policy: WrapPolicy = field(default_factory=WrapPolicy)
    """Which modules become FSDP units."""
    forward_prefetch: bool = False
    """Gather the next block while the present one computes."""
    seed: NaturalInt = 42
    """Seed of every worker's torch generator."""
    full_determinism: bool = False
    """Deterministic kernels on every worker."""


@dataclass(frozen=True)
class TrainedFsdp(GradientSync, OptimizerOffload, Fsdp):
    """Sharding and precision of a model that is trained."""
