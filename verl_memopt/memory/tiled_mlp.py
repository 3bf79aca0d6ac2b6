"""Compute each MLP over tiles of tokens, again in backward, so that its wide tensors exist for one tile at a time.

Use it when: micro-batches are long and activations are the peak.
Saves: all but one tile of the gate, up and activation tensors of the MLP, which are most of a block's bytes.
Costs: the MLP's forward once more in backward; nothing extra with full activation checkpointing. Small tiles slow the products.
Works with: activation checkpointing, LoRA and sharding. With recomputed norms and checkpointing the MLP runs over tiles of 2,048
    tokens anyway, and this makes them smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_memopt.memory.knob import Claim, Knob, LadderRow, PositiveInt, UnusedKey, activation_saving

_KEY = "actor_rollout_ref.model.tiled_mlp"


@dataclass(frozen=True)
class TiledMlp:
    enabled: bool = False
    """Compute each MLP tile by tile, again in backward, so that its wide intermediates exist for one tile at a time.
    For long micro-batches, where they are most of a block's bytes."""
    num_shards: PositiveInt = 4
    """Tiles a micro-batch's tokens are cut into."""


@dataclass(frozen=True)
class TiledMlpSettings:
    tiled_mlp: TiledMlp = field(default_factory=TiledMlp)
    """The MLP of each block over tiles of tokens."""

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
