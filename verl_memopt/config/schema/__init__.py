"""Every setting, typed and frozen, with its one default.

A field without a default is required. A field whose default is ``None`` and which appears in
:mod:`verl_memopt.config.links` follows another key unless it is given. Choices are ``Literal`` types and ranges are
``Annotated`` ones. The fields of a memory knob stand in its file in :mod:`verl_memopt.knobs`. Nothing past the loader sees a
Hydra object, and no other file in the project holds a default for a key.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_memopt.algorithms.records import CustomEstimator, CustomLoss, PolicyLoss
from verl_memopt.config.schema.actor import Actor, CheckpointContents, Ref, RefModel
from verl_memopt.config.schema.corrections import PfPpo, RolloutCorrection
from verl_memopt.config.schema.critic import Critic, CriticModel
from verl_memopt.config.schema.data import REQUIRED, CustomClass, CustomSampler, Data
from verl_memopt.config.schema.model import Model
from verl_memopt.config.schema.rewards import CustomReward, OverlongBuffer, RewardKwargs, RewardModel, SandboxFusion, ScoringModel
from verl_memopt.config.schema.rollout import EngineKwargs, Rollout, ValKwargs
from verl_memopt.config.schema.run import (
    Algorithm,
    Debug,
    FilterGroups,
    KlControl,
    Memory,
    RayKwargs,
    Trainer,
)
from verl_memopt.config.schema.training import Fsdp, ModelKnobs, Optim, TrainedFsdp, WrapPolicy
from verl_memopt.knobs.precision import MixedPrecision
from verl_memopt.knobs.tiled_mlp import TiledMlp
from verl_memopt.knobs.values import PositiveInt
from verl_memopt.knobs.weight_buckets import BucketEngine

__all__ = [
    "REQUIRED", "Actor", "ActorRolloutRef", "Algorithm", "BucketEngine", "CheckpointContents", "Critic", "CriticModel",
    "CustomClass", "CustomEstimator", "CustomLoss", "CustomReward", "CustomSampler", "Data", "Debug", "EngineKwargs",
    "FilterGroups", "Fsdp", "KlControl", "Memory", "MixedPrecision", "Model", "ModelKnobs", "Optim", "OverlongBuffer", "PfPpo",
    "PolicyLoss", "RayKwargs", "Ref", "RefModel", "RewardKwargs", "RewardModel", "Rollout",
    "RolloutCorrection", "SandboxFusion", "ScoringModel", "Settings", "TiledMlp", "TrainedFsdp", "Trainer", "ValKwargs",
    "WrapPolicy",
]  # fmt: skip


@dataclass(frozen=True)
class ActorRolloutRef:
    """The policy, its reference and its engine."""

    hybrid_engine: bool = True
    """Trainer and engine share devices; only true exists."""
    nccl_timeout: PositiveInt = 600
    """Timeout of process groups in seconds."""
    model: Model = field(default_factory=Model)
    """The policy's model."""
    actor: Actor = field(default_factory=Actor)
    """The update."""
    ref: Ref = field(default_factory=Ref)
    """The reference; built only when a KL is asked for."""
    rollout: Rollout = field(default_factory=Rollout)
    """Generation."""


@dataclass(frozen=True)
class Settings:
    """Everything that a run is told."""

    data: Data = field(default_factory=Data)
    actor_rollout_ref: ActorRolloutRef = field(default_factory=ActorRolloutRef)
    critic: Critic = field(default_factory=Critic)
    algorithm: Algorithm = field(default_factory=Algorithm)
    reward_model: RewardModel = field(default_factory=RewardModel)
    custom_reward_function: CustomReward = field(default_factory=CustomReward)
    trainer: Trainer = field(default_factory=Trainer)
    ray_kwargs: RayKwargs = field(default_factory=RayKwargs)
    memory: Memory = field(default_factory=Memory)
    """Limits of each worker process. As a group, ``memory=constrained`` names a profile."""
    debug: Debug = field(default_factory=Debug)
