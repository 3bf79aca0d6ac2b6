"""The last block computes only what the head reads: the tokens that predict something, and keys and values of all tokens.

Bytes saved: nothing reads the last block's output at U of the T tokens: those of the prompts, except the last of each. The last
block skips queries, attention, its output product and the MLP of these tokens, forward and backward. With recomputed norms it
keeps U x b x (h + 2 x H x D + 2 x I) bytes less. With activation checkpointing the peak falls to that of the block before.
Where U is less than an eighth of T, nothing is skipped. ``memory/formulas.py`` has the whole formula.

Exact: no pass reads what is skipped. Gradients differ by the order of sums.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from verl_memopt.model.families import OWN_BLOCKS

KEY = "actor_rollout_ref.model.prune_last_block"

logger = logging.getLogger(__name__)


def can_prune(block: nn.Module, key: str = KEY) -> bool:
    """Return whether a block, as transformers made it, can skip the outputs that nothing uses; warn, naming ``key``, if not."""
    name = type(block).__name__
    if name not in OWN_BLOCKS:
        reason = f"{name} is not one of {', '.join(OWN_BLOCKS)}"
    elif (window := window_of(block.self_attn)) is not None:
        reason = f"attention of {name} slides over a window of {window} tokens"
    else:
        return True
    logger.warning("%s=true: %s; the last block computes all tokens", key, reason)
    return False


def window_of(attention: Any) -> int | None:
    """Return how many positions back a token sees in a known block's attention, itself included; None for all."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(attention.config, "sliding_window", None) if type(attention).__name__.startswith("Mistral") else None
