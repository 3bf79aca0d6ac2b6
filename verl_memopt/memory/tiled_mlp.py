"""Compute each MLP over tiles of tokens, and again in backward, so that its wide tensors exist for one tile at a time.

Use it when: micro-batches are long and activations set the memory peak.
Saves: all but one tile of the MLP's gate, up and activation tensors, which are most of the bytes of a block.
Costs: the MLP's forward once more in backward; nothing extra with full activation checkpointing. Small tiles make matrix products
    slow.
Works with: activation checkpointing, LoRA and sharding. With ``recompute_elementwise`` and checkpointing, the MLP runs over tiles
    of at most 2,048 tokens (8,192 on a GPU) anyway, and this knob makes them smaller. A mixture of experts runs over tiles of
    experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_memopt.memory.knob import Claim, Knob, LadderRow, PositiveInt, UnusedKey, activation_saving

_KEY = "actor_rollout_ref.model.tiled_mlp"


@dataclass(frozen=True)
class TiledMlp:
    enabled: bool = False
    """Compute each MLP tile by tile, and again in backward, so that its wide intermediate tensors exist for one tile at a time.
    Use it for long micro-batches, where these tensors are most of a block's bytes."""
    num_shards: PositiveInt = 4
    """Number of tiles into which the tokens of a micro-batch are cut."""


@dataclass(frozen=True)
class TiledMlpSettings:
    tiled_mlp: TiledMlp = field(default_factory=TiledMlp)
    """Whether each MLP runs over tiles of tokens, and over how many."""

    @property
    def mlp_tiles(self) -> int | None:
        return self.tiled_mlp.num_shards if self.tiled_mlp.enabled else None


KNOB = Knob(
    cost="MLP forward once more",
    settings={"model": TiledMlpSettings},
    unused_keys=(
        UnusedKey(
            f"{_KEY}.num_shards",
            lambda settings: settings.actor_rollout_ref.model.mlp_tiles is None,
            "model.tiled_mlp.enabled is false",
        ),
    ),
    claims=(Claim("update_actor", "activations", activation_saving),),
    row=LadderRow(70, on=(f"{_KEY}.enabled=true",), off=(f"{_KEY}.enabled=false",)),
)
