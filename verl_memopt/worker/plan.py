"""What a worker builds, as the driver sends it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from verl_memopt.config.schema import ActorRolloutRef, Critic, Memory, RewardModel, RolloutCorrection, ScoringModel

if TYPE_CHECKING:
    from verl_memopt.model.packed_model import PolicyModel
    from verl_memopt.worker.roles import RoleBuilder


class FrozenRole(Protocol):
    """A frozen model with what a recipe computes in it. The driver calls its methods through ``Worker.of_role``."""

    @property
    def model(self) -> PolicyModel:
        """The model, which may be the reference's or the policy's own."""


class RolePlan(Protocol):
    """One more role that a recipe asks each worker to build. It travels to the workers, so it must be picklable.

    The role computes in the phase ``reward``. Its model rests on the host outside of that phase if its settings say so.
    """

    @property
    def is_reference(self) -> bool:
        """Whether the role's model is the reference's, so that the reference is on the device in the phase ``reward`` too."""

    def build(self, roles: RoleBuilder, policy: PolicyModel, reference: PolicyModel | None) -> FrozenRole:
        """Return the role.

        ``reference`` is None where it has no model of its own.
        """


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
    schedule_steps: int
    """Steps of the policy's schedule over the whole run, as ``actor.optim.lr_schedule_steps`` counts them."""
    free_engine: bool
    """The engine sleeps outside of rollout and validation."""
    track_init: bool
    """Count the bytes of the start on a CPU."""
    critic: Critic | None = None
    """The ``critic`` section of the settings. None = there is no critic."""
    critic_folder: str | None = None
    """Folder of the critic's model."""
    critic_schedule_steps: int = 0
    """The same of the critic."""
    memory: Memory = dataclasses.field(default_factory=Memory)
    """Limits and host buffers of the process."""
    kinds_on_gpu: bool = False
    """Count bytes by kind in tracked phases on a GPU too. Compiled functions then stay uncompiled."""
    bypass: RolloutCorrection | None = None
    """The rollout correction in bypass mode. None = decoupled mode, or no correction."""
    stop_file: str | None = None
    """File in which the driver writes when rollouts are abandoned. None = never."""
    sync_check: bool = False
    """Compare the engine's weights with the policy's after each sync, and look for stale cache blocks."""
    snapshot_folder: str | None = None
    """Where a snapshot of the memory is written when it runs out. None = nowhere."""
    reward_model: ScoringModel | None = None
    """Settings of the reward model's own model. None = no model scores."""
    reward_folder: str | None = None
    """Folder of the reward model."""
    rewards: RewardModel | None = None
    """The ``reward_model`` section of the settings, that advice is based on. None = no model scores."""
    role: RolePlan | None = None
    """A recipe's own role. None = no recipe has one."""
    beside_cache_bytes: int | None = None
    """What the device holds beside the KV cache by the formulas, with ``rollout.kv_cache_memory_gb=auto``. None = the settings
    say how large the cache is."""
    adaptive_phases: tuple[str, ...] = ()
    """Phases whose micro-batches are cut again after an out-of-memory error, on one rank."""
