"""Embedding and LM head are FSDP units of their own: each is gathered while it computes, not for the whole pass.

Bytes saved: in a log-prob pass b_c x (V x h + N_l) bytes, twice that where several ranks gather, less a chunk of logits. V is the
vocabulary, h the hidden size, N_l the parameters of a block, and b_c is 2 for bfloat16 compute. That is 9 % of the log-prob peak
of an 8B model over 8 devices (predicted by a run on fake tensors). In an update b_c x (4 x V x h + N_l) -
V x h x (b_c + b_r + b_r / W) bytes, if the gather of both matrices was the peak and the reduction of the head's gradient is the
peak after it (b_r is 4 for fp32 reduction over W ranks). The chunked head is gathered once an update, not once a chunk. So is the
embedding. Backward reads neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def sharding_units(
    embedding: nn.Module, blocks: Sequence[nn.Module], head: nn.Module | None, tied: bool, own_units: bool
) -> list[nn.Module]:
    """Return the modules to shard before the root, in the order of the forward. The head is None where it is no large matrix."""
    if tied or not own_units:
        return list(blocks)
    return [embedding, *blocks, *([] if head is None else [head])]
