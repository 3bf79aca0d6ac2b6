"""Run each decoder block over tiles of tokens. Only its input, output, keys and values are as long as the micro-batch.

Use it when: one long row does not fit, although the inputs of checkpointed blocks are offloaded and nothing else is left to
    lower.
Saves: in the block whose backward runs, all but one tile of the queries, the attention output, the residual sum and their
    gradients. With activation offload the memory peak is then about six tensors of all tokens, plus the tiles.
Costs: keys are computed once more in backward, and kernels are slower on short tiles. Attention is called once per tile, key head
    and sequence, so many short answers are slow.
Works with: activation offload, shared prompts, LoRA, pruned last blocks, tiled MLPs and sharding. Each block keeps only its input
    and recomputes its norms and activations, whatever the keys of checkpointing and ``recompute_elementwise`` say. Blocks with a
    sliding window are computed whole. Blocks of Gemma 3, which norm the outputs of attention and MLP, are refused. The keys and
    values of a prompt are not kept from one micro-batch to the next.
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
    """Tokens per tile, over which each whole block runs. Use it for rows of tens of thousands of tokens; null computes all tokens
    at once. 4096 is a good start."""


def _tiles(settings: Settings) -> bool:
    return settings.actor_rollout_ref.model.block_tile_tokens is not None


def _shares_tokens(role: SequenceRole) -> Refusal:
    # The role's key comes first, because a rule has a twin for the critic only if its first key has one. That is the actor's key.
    # Reference and reward model use the policy's tile size.
    return Refusal(
        (KEYS[role], _KEY),
        lambda settings: _tiles(settings) and is_built(settings, role) and sequence_ranks(settings, role) > 1,
        "a tiled block needs the keys of all tokens on one device",
        f"Set {KEYS[role]}=1, or {_KEY}=null.",
    )


KNOB = Knob(
    cost="short tiles are slower",
    settings={"model": TiledBlock},
    refuses=(
        Refusal(
            (_KEY, _ATTENTION),
            lambda settings: _tiles(settings) and settings.actor_rollout_ref.model.attn_implementation == "eager",
            "a tiled block needs fused attention kernels",
            f"Set {_ATTENTION}=auto, or {_KEY}=null.",
        ),
        _shares_tokens("actor"),
        _shares_tokens("ref"),
        _shares_tokens("reward_model"),
    ),
)
