"""Run each decoder block over tiles of tokens, so that only its input, output, keys and values are as long as the micro-batch.

Use it when: one long row alone does not fit, with checkpoints offloaded and nothing else left to lower.
Saves: all but one tile of the queries, attention output, residual sum and their gradients of the block whose backward runs. With
    activation offload the peak is then about six tensors of all tokens, and the tiles.
Costs: the product of keys once more in backward, and slower kernels where tiles are short. Each tile is one call of attention for
    each key head and sequence, so many short answers are slow.
Works with: activation offload, shared prompts, LoRA, pruned last blocks, tiled MLPs and sharding. Each block keeps its input
    alone and computes its norms and activations again, whatever the keys of checkpointing and recomputed values say. Blocks with
    a sliding window are computed whole. A prompt is not carried from one micro-batch to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from verl_memopt.memory.knob import POSITIVE, Knob, Refusal, SequenceRole, sequence_ranks
from verl_memopt.memory.sequence_parallel import KEYS, is_built

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

_MODEL = "actor_rollout_ref.model"
_KEY, _ATTENTION = f"{_MODEL}.block_tile_tokens", f"{_MODEL}.attn_implementation"


@dataclass(frozen=True)
class TiledBlock:
    block_tile_tokens: Annotated[int | None, POSITIVE] = None
    """Tokens of a tile over which each whole block runs, for rows of ten thousands of tokens; null computes all tokens at once.
    4096 is a good start."""


def _tiles(settings: Settings) -> bool:
    return settings.actor_rollout_ref.model.block_tile_tokens is not None


def _shares_tokens(role: SequenceRole) -> Refusal:
    # The role's key comes first: only the actor's has a twin of the critic. The others' models have the policy's tiles.
    return Refusal(
        (KEYS[role], _KEY),
        lambda settings: _tiles(settings) and is_built(settings, role) and sequence_ranks(settings, role) > 1,
        "a block over tiles needs all tokens of its keys on one device",
        f"Set {KEYS[role]}=1, or {_KEY}=null.",
    )


KNOB = Knob(
    cost="short tiles are slower",
    settings={"model": TiledBlock},
    refuses=(
        Refusal(
            (_KEY, _ATTENTION),
            lambda settings: _tiles(settings) and settings.actor_rollout_ref.model.attn_implementation == "eager",
            "a block over tiles takes fused kernels of attention",
            f"Set {_ATTENTION}=auto, or {_KEY}=null.",
        ),
        _shares_tokens("actor"),
        _shares_tokens("ref"),
        _shares_tokens("reward_model"),
    ),
)
