"""What a worker builds, as the driver sends it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from verl_memopt.config.schema import ActorRolloutRef, Critic, Memory, RltReward, RolloutCorrection, ScoringModel


@dataclass(frozen=True)
class StudentPlan:
    """What a worker builds to score explanations (RLT)."""

    model: ScoringModel
    """Settings of the student's own model."""
    rlt: RltReward
    """How explanations are scored."""
    residency: str
    """``alias_ref``, ``separate`` or ``swap``."""
    folder: str | None = None
    """Folder of the student's model. None with ``alias_ref``."""
    shares_prompts: bool = True
    """Explanations of one question compute the student's prompt once."""


@dataclass(frozen=True)
class WorkerPlan:
    """Everything that a worker builds from. Folders are local paths."""

    settings: ActorRolloutRef
    folder: str
    """Folder of the policy's model."""
    engine_folder: str | None
    """Folder with the config for the engine: the model's own, or one with ``model.override_config`` merged in. None = there is no
    engine."""
    reference_folder: str | None
    """Folder of the reference's model. None = no model of its own."""
    tokenizer_folder: str
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response."""
    optimizer_steps: int
    """Optimizer steps of the whole run."""
    free_engine: bool
    """The engine sleeps outside of rollout and validation."""
    track_init: bool
    """Count the bytes of the start on a CPU."""
    critic: Critic | None = None
    """The ``critic`` section of the settings. None = there is no critic."""
    critic_folder: str | None = None
    """Folder of the critic's model."""
    critic_steps: int = 0
    """Optimizer steps of the critic over the whole run."""
    memory: Memory = dataclasses.field(default_factory=Memory)
    """Limits and host buffers of the process."""
    kinds_on_gpu: bool = False
    """Count bytes by kind in tracked phases on a GPU too. Compiled functions then stay uncompiled."""
    bypass: RolloutCorrection | None = None
    """The rollout correction in bypass mode. None = decoupled mode, or no correction."""
    stop_file: str | None = None
    """File in which the driver writes when rollouts are abandoned. None = never."""
    reward_model: ScoringModel | None = None
    """Settings of the reward model's own model. None = no model scores."""
    reward_folder: str | None = None
    """Folder of the reward model."""
    student: StudentPlan | None = None
    """The student of RLT. None = no student scores."""
