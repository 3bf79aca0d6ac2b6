"""The last block computes what is read of it: the tokens from whose state something is predicted, and keys and values of all.

Bytes saved: with U of a micro-batch's T computed tokens unread (those of prompts but for the last; none where U < T / 8),
queries, attention, its output product and the MLP of U tokens in the last block, forward and backward, which is U / (T x L) of
what blocks compute but for keys and values. With recomputed norms that block keeps U x b x (h + 2 x H x D + 2 x I) less. That is
what the peak falls by without activation checkpointing, or less where its backward holds least; with it the peak falls to that of
the block before, with the input of one block less beside it: by T x h x b.

Exact: what it leaves out is read by nothing, in no pass; gradients differ by the order of sums.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from verl_memopt.memory.activations.recompute_elementwise import KNOWN

KEY = "actor_rollout_ref.model.prune_last_block"

logger = logging.getLogger(__name__)


def can_prune(block: nn.Module) -> bool:
    """Return whether a Hugging Face model's last block can skip the outputs that nothing uses; warn where it cannot."""
    reason = _unlike(block)
    if reason is not None:
        logger.warning("%s=true: %s; the last block computes all tokens", KEY, reason)
    return reason is None


def _unlike(block: Any) -> str | None:
    name = type(block).__name__
    if name not in KNOWN:
        return f"{name} is not one of {', '.join(KNOWN)}"
    window = window_of(block.self_attn)
    return None if window is None else f"attention of {name} slides over a window of {window} tokens"


def window_of(attention: Any) -> int | None:
    """Return how many positions back a token sees in a known block's attention, itself included; None for all."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(attention.config, "sliding_window", None) if type(attention).__name__.startswith("Mistral") else None
