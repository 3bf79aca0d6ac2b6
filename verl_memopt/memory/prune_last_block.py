"""The last block computes what is read of it: the tokens from whose state something is predicted, and keys and values of all.

Saves: with U of a micro-batch's T computed tokens unread (those of prompts but for the last; none where U < T / 8), queries,
    attention, its output product and the MLP of U tokens in the last block, forward and backward, which is U / (T x L) of what
    blocks compute but for keys and values. With recomputed norms that block keeps U x b x (h + 2 x H x D + 2 x I) less. That
    is what the peak falls by without activation checkpointing, or less where its backward holds least; with it the peak falls to
    that of the block before, with the input of one block less beside it: by T x h x b.
Costs: where prompts are not shared, two calls of attention in that block in place of one.
Pairs with: every knob. A last block whose attention slides over a window computes all tokens, as does one of an unknown class;
    both with a warning.
Exact: what it leaves out is read by nothing, in no pass; gradients differ by the order of sums.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from verl_memopt.memory.knob import Claim, Knob
from verl_memopt.memory.recompute_elementwise import KNOWN, attended, window_of

KEY = "actor_rollout_ref.model.prune_last_block"

logger = logging.getLogger(__name__)


def prune_last_block(decoder: Any, recomputed: bool) -> bool:
    """Makes a decoder's last block, given ``read_trees``, compute these: [1, T, h] -> [1, T', h]. Gives whether it will.

    decoder: has ``layers``. recomputed: ``recompute_elementwise`` has replaced the block's forward. Names, classes and state
    stay. To be called before blocks are checkpointed and sharded.
    """
    block = decoder.layers[-1]
    reason = _unlike(block)
    if reason is not None:
        logger.warning("%s=true: %s; the last block computes all tokens", KEY, reason)
        return False
    block.forward = functools.partial(_pruned, block.forward, block.forward if recomputed else functools.partial(_block, block))
    return True


def _unlike(block: Any) -> str | None:
    name = type(block).__name__
    if name not in KNOWN:
        return f"{name} is not one of {', '.join(KNOWN)}"
    window = window_of(block.self_attn)
    return None if window is None else f"attention of {name} slides over a window of {window} tokens"


def _pruned(
    whole: Callable[..., Tensor], reading: Callable[..., Tensor], hidden_states: Tensor, read_trees: Any = None, **others: Any
) -> Tensor:
    if read_trees is None:
        return whole(hidden_states, **others)
    return reading(hidden_states, **{**others, "pack_trees": read_trees})


def _block(block: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **others: Any) -> Tensor:
    """Gives what is read of a known block's output, computed by the block's own modules."""
    attention, normal = block.self_attn, block.input_layernorm(hidden_states[0])
    hidden, read = others["pack_trees"].at_queries(hidden_states[0], normal)
    query, key, value = attention.q_proj(read), attention.k_proj(normal), attention.v_proj(normal)
    hidden = hidden[None] + attended(attention, query, key, value, position_embeddings, others)[None]
    return hidden + block.mlp(block.post_attention_layernorm(hidden))


KNOB = Knob(
    name="prune_last_block",
    keys=(KEY,),
    on=(f"{KEY}=true",),
    off=(f"{KEY}=false",),
    claims=(Claim("update_actor", "activations", lambda before, after: before.activation_bytes - after.activation_bytes),),
)
