"""The section ``critic``: the value model that ``algorithm.adv_estimator=gae`` trains beside the policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from verl_memopt.config.schema.actor import Aggregation, CheckpointContents
from verl_memopt.config.schema.training import ModelKnobs, Optim, TrainedFsdp
from verl_memopt.knobs.token_budget import CriticBudget
from verl_memopt.knobs.values import POSITIVE, NaturalInt, PositiveFloat


@dataclass(frozen=True)
class CriticModel(ModelKnobs):
    """The critic's model, with the settings of the knobs that act in it."""

    path: str | None = None
    """Folder in Hugging Face format, or a hub id. Its decoder computes the values; its value head is read where it has one, and
    starts at 0 where not. Follows ``actor_rollout_ref.model.path``."""
    hf_config_path: str | None = None
    """Read config.json from this folder in place of ``path``."""
    tokenizer_path: str | None = None
    """Read the tokenizer that is compared with the policy's from this folder in place of ``path``."""
    trust_remote_code: bool | None = None
    """Let transformers run code from the model's folder; follows the policy's."""
    external_lib: str | None = None
    """Module imported before the model is built; follows the policy's."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Merged into the model's config.json; a name the config does not have is an error."""
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa", "eager"] | None = None
    """auto, flash_attention_2, sdpa, eager; follows the policy's."""
    fsdp_config: TrainedFsdp = field(default_factory=TrainedFsdp)
    """Sharding and precision of the critic."""


@dataclass(frozen=True)
class Critic(CriticBudget):
    """The critic: built with ``algorithm.adv_estimator=gae`` alone, which is what reads its values."""

    enable: bool | None = None
    """null = the estimator decides: gae has a critic, the others have none. true and false only repeat that."""
    strategy: Literal["fsdp2"] = "fsdp2"
    """Sharding backend; fsdp2 is the only one."""
    model: CriticModel = field(default_factory=CriticModel)
    """The critic's model."""
    optim: Optim = field(default_factory=lambda: Optim(lr=1e-5))
    """Optimizer and schedule."""
    checkpoint: CheckpointContents = field(default_factory=CheckpointContents)
    """What a checkpoint holds of the critic."""
    ppo_mini_batch_size: Annotated[int | None, POSITIVE] = None
    """Prompts per optimizer step; follows the actor's."""
    ppo_epochs: Annotated[int | None, POSITIVE] = None
    """Passes over the rollout batch; follows the actor's."""
    shuffle: bool | None = None
    """Shuffle groups before they are cut into mini-batches; follows the actor's."""
    data_loader_seed: NaturalInt = 42
    """Seed of that shuffle."""
    cliprange_value: PositiveFloat = 0.5
    """Values move at most this far from the old ones before the loss is clipped."""
    loss_agg_mode: Aggregation | None = None
    """How the value loss is averaged over the global mini-batch; follows the actor's."""
    loss_scale_factor: Annotated[int | None, POSITIVE] = None
    """Divisor of seq-mean-token-sum-norm; follows the actor's."""
