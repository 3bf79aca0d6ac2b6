"""Go on after an out-of-memory error: cut the rows that are left into smaller micro-batches, and try again.

A pass without gradients keeps what it has computed and repeats the micro-batch that failed. An accumulation of gradients is void
after an error, since nobody knows which gradients were added: it starts again from the first micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from verl_memopt.distributed.device import empty_cache
from verl_memopt.memory.batching.row_tokens import RowTokens, pack_groups_under
from verl_memopt.memory.limits.out_of_memory import is_out_of_memory, release_frames
from verl_memopt.memory.parameters.resharding import abandon_pass, can_abandon

logger = logging.getLogger(__name__)

_active: list[Recutting] = []


class Recutting:
    """What happened to the micro-batches of one call.

    Attributes:
        cap: The lowest cap so far. None = no error.
        retries: Errors after which the call went on.
    """

    def __init__(self, device: torch.device) -> None:
        """Start without errors."""
        self.device = device
        self.cap: int | None = None
        self.retries = 0


@contextmanager
def recutting(device: torch.device, allowed: bool) -> Iterator[Recutting]:
    """Let the passes of the body go on after out-of-memory errors, if ``allowed``.

    Above one rank it must not be allowed: the other ranks wait in a collective of the micro-batch that failed.
    """
    record = Recutting(device)
    if not allowed:
        yield record
        return
    _active.append(record)
    try:
        yield record
    finally:
        _active.pop()


def cut_again(
    error: RuntimeError, model: nn.Module, tokens: RowTokens, micro_batches: Sequence[Sequence[int]], failed: Sequence[int]
) -> list[list[int]] | None:
    """Return smaller micro-batches of the same rows, or None where the error must be raised.

    The cap is half the tokens of the micro-batch that failed, but room for the longest row. Memory that the failed pass held is
    freed, and unused blocks of the allocator go back to the device.

    Args:
        error: What the pass raised.
        model: The model of the pass. One that FSDP2 shards can go on from torch 2.13 on.
        tokens: Tokens of all rows of the batch.
        micro_batches: Rows that are still to be computed.
        failed: Rows of the micro-batch that failed, or of the fullest one.
    """
    if not _active or not is_out_of_memory(error) or not can_abandon(model):
        return None
    record = _active[-1]
    rows = [row for each in micro_batches for row in each]
    cost, alone = tokens.cost(failed), tokens.each()
    cap = max(cost // 2, max(alone[row] for row in rows))
    if cap >= cost:
        return None
    again = pack_groups_under(tokens.select(rows), cap, [f"row {row}" for row in rows])
    record.cap, record.retries = min(cap, record.cap or cap), record.retries + 1
    # The traceback keeps the tensors of the failed pass alive, and empty_cache() could not give their memory back.
    release_frames(error)
    abandon_pass(model)
    empty_cache(record.device)
    logger.warning("out of device memory at %d tokens in a micro-batch: going on with at most %d", cost, cap)
    return [[rows[place] for place in places] for places in again]
