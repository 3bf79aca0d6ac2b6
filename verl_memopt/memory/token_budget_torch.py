"""Continue after an out-of-memory error: cut the remaining rows into smaller micro-batches and try again, on all ranks.

A pass without gradients keeps its results and repeats the micro-batch that failed. A pass with gradients starts again from the
first micro-batch, because after an error it is unknown which gradients were already added.

On several ranks, the other ranks do not know of the error. They wait in the collectives of the micro-batch that failed, and still
have all later micro-batches to run. So the rank that failed frees its memory and runs the whole attempt again on micro-batches of
one token. It skips the collectives that it has already issued, and takes part in the others. The parameters that it sends are
correct, so the results of the other ranks are correct too. At the end of the attempt the ranks ask whether one of them failed.
This takes one small collective between hosts per mini-batch or pass, for which no device waits. docs/decisions/micro_batches.md
says why other ways do not work.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import active_fake_mode

from verl_memopt.distributed.device import empty_cache
from verl_memopt.memory.out_of_memory import is_out_of_memory, release_frames
from verl_memopt.memory.pass_order import Cut, InParts
from verl_memopt.memory.resharding_torch import abandon_pass, can_abandon
from verl_memopt.memory.token_packing import RowTokens, alike, largest_pass, pack_groups_under
from verl_memopt.observe.byte_tracker import HOST, scope

logger = logging.getLogger(__name__)

_active: list[OomRetry] = []


@dataclass
class OomRetry:
    """What happened to the micro-batches of one call.

    ``cap`` is the lowest cap, the same on all ranks; None = no rank had an error. ``retries`` counts the errors of this rank
    after which the call continued.
    """

    device: torch.device
    cap: int | None = None
    retries: int = 0


@contextmanager
def oom_retry(device: torch.device, allowed: bool) -> Iterator[OomRetry]:
    """Let passes in the body continue after out-of-memory errors, if ``allowed``. All ranks must pass the same ``allowed``.

    It must be false where ranks share the tokens of a micro-batch, because the sizes of their exchanges depend on the tokens.
    """
    record = OomRetry(device)
    if not allowed:
        yield record
        return
    # A stack, because calls may nest. The innermost record is used.
    _active.append(record)
    try:
        yield record
    finally:
        _active.pop()


class OtherRankError(RuntimeError):
    """Another rank is out of memory and cannot continue."""


MicroBatches: TypeAlias = Sequence[Sequence[int]]
"""The rows of each micro-batch."""


class _Attempt:
    def __init__(self, micro_batches: MicroBatches) -> None:
        self.micro_batches = micro_batches
        self.error: RuntimeError | None = None

    def __enter__(self) -> MicroBatches:
        return self.micro_batches

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self.error = error if isinstance(error, RuntimeError) and is_out_of_memory(error) else None
        return self.error is not None


def attempts(
    model: nn.Module,
    tokens_of: Callable[[], RowTokens],
    micro_batches: MicroBatches,
    allowed: bool = True,
    kept: Callable[[], int] | None = None,
) -> Iterator[AbstractContextManager[MicroBatches]]:
    """Yield attempts to run micro-batches, until an attempt ends without an out-of-memory error on any rank.

    Use each attempt as a context: ``for attempt in attempts(...): with attempt as rows: run(rows)``. The body must hold its
    tensors inside a function, such as ``run``, because variables of the loop itself are not freed after an error.

    The first attempt has the given micro-batches. After an out-of-memory error the next attempt has smaller micro-batches of the
    remaining rows, equally many on each rank. Their cap is half the tokens of the micro-batch that failed (without ``kept``, of
    the fullest one), on the rank where that is most, but at least the longest row of any rank. Longer conversations are
    computed in parts instead (:class:`InParts`), if the model can do so. The memory of the failed attempt is freed, and unused
    blocks of the allocator go back to the device. On several ranks, a rank that failed first gets an attempt with empty
    micro-batches, which only takes part in the collectives.

    All ranks call this function in step, with equally many micro-batches. Outside of :func:`oom_retry` there is only one attempt.
    A model that FSDP2 shards can continue only with torch 2.13 or later.

    Args:
        model: The model that runs.
        tokens_of: Returns the tokens of all rows.
        micro_batches: The rows of each micro-batch.
        allowed: False = there may be no second attempt.
        kept: Returns how many micro-batches have results that stay valid after an error. None = an error makes all results void.

    Raises:
        RuntimeError: The out-of-memory error itself, if the micro-batches cannot be smaller.
        OtherRankError: The same case, on ranks that had no error.
    """
    if not (allowed and _active and can_abandon(model)):
        yield nullcontext(micro_batches)
        return
    record, ranks, tokens = _active[-1], dist.get_world_size() if dist.is_initialized() else 1, tokens_of()
    while True:
        if ranks > 1:
            # Which parameters FSDP2 gathers ahead depends on earlier passes. After this reset it is the same in each attempt.
            abandon_pass(model)
        before = 0 if kept is None else kept()
        with _counted_collectives() as calls:
            yield (attempt := _Attempt(micro_batches))
            error, attempt.error = attempt.error, None
            left = micro_batches[0 if kept is None else kept() - before :]
            if ranks > 1 and error is not None:
                _free(error, model, record.device)
                # The other ranks have already taken part in the collectives issued so far. This rank must join the remaining
                # ones.
                calls.leave_out, calls.issued = calls.issued, 0
                cut = micro_batches if isinstance(micro_batches, Cut) else Cut(list(rows) for rows in micro_batches)
                yield nullcontext(cut.placeholders())
                assert not calls.leave_out, f"{calls.leave_out} collectives fewer than before the error"
        if not _on_any_rank(error is not None, ranks):
            return
        failed = None
        if error is not None:
            failed = max(largest_pass(tokens, rows) for rows in (left if kept is None else left[:1]))
        # All ranks exchange their remaining rows, so that each computes the same cut for all ranks.
        in_parts = tokens.paths is not None and bool(getattr(model, "supports_prefix_kv", False))
        again = _cut_again(failed, tokens, [row for rows in left for row in rows], record, in_parts)
        if again is None:
            assert error is not None
            raise error
        if ranks == 1 and error is not None:
            _free(error, model, record.device)
        abandon_pass(model)
        micro_batches = again


def _free(error: RuntimeError, model: nn.Module, device: torch.device) -> None:
    # The traceback keeps the tensors of the failed pass alive, so empty_cache() could not free their memory. Even a cleared frame
    # holds the closure of its function, such as the arguments of a module that failed. So only the text of the traceback is kept.
    error.add_note("".join(traceback.format_tb(error.__traceback__)))
    release_frames(error)
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    abandon_pass(model)
    empty_cache(device)


SMALLEST_PASS = 16
"""Rows are not computed in parts of fewer tokens. Other memory than that of tokens is then too much."""


def _cut_again(
    failed: int | None, tokens: RowTokens, rows: Sequence[int], record: OomRetry, in_parts: bool
) -> list[list[int]] | None:
    """Return smaller micro-batches of these rows. None = the micro-batch of this rank that failed cannot be smaller.

    ``failed``: tokens of this rank's failed micro-batch; None = none failed. ``in_parts``: longer rows may be cut into parts.
    """
    per_rank = _gathered((failed, tokens.select(rows)))
    own = dist.get_rank() if len(per_rank) > 1 else 0
    # The rank with the largest failed micro-batch is named in the error.
    cost, worst = max((cost, rank) for rank, (cost, _) in enumerate(per_rank) if cost is not None)
    longest = max((length for _, share in per_rank for length in share.row_lengths()), default=0)
    # Half the tokens, but at least those of the longest row if it cannot be cut.
    cap = max(cost // 2, min(longest, SMALLEST_PASS) if in_parts else longest)
    if cap >= cost:
        if failed is None:
            raise OtherRankError(
                f"worker {worst} is out of device memory at {cost} tokens in a micro-batch, and no smaller one has room for the "
                "longest row. Its own error says what to set."
            )
        return None
    cuts = [
        pack_groups_under(share, cap, [f"row {row}" for row in range(len(share))], in_parts=in_parts) for _, share in per_rank
    ]
    cut = alike(cuts, [share for _, share in per_rank])[own]
    record.cap, record.retries = min(cap, record.cap or cap), record.retries + (failed is not None)
    where = "" if len(per_rank) == 1 else f" on worker {worst}"
    logger.warning("out of device memory at %d tokens in a micro-batch%s: going on with at most %d", cost, where, cap)
    chosen = [places.of(rows) if isinstance(places, InParts) else [rows[place] for place in places] for places in cut]
    return Cut(chosen, cut.spans) if isinstance(cut, Cut) else chosen


def _on_any_rank(happened: bool, ranks: int) -> bool:
    if ranks == 1 or active_fake_mode() is not None:  # fake tensors have no values, and never run out of memory
        return happened
    with scope(tier=HOST):
        flag = torch.tensor(int(happened), dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())


def _gathered(own: Any) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    per_rank: list[Any] = [None] * dist.get_world_size()
    with scope(tier=HOST):
        dist.all_gather_object(per_rank, own)
    return per_rank


# The collectives of a pass, by the names that FSDP2 and this package call. Each attempt has the same collectives, whatever its
# micro-batches hold.


COLLECTIVES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
    "all_to_all_single",
)
"""Functions of torch.distributed. Before torch 2.13 the first and the third do not exist."""


@dataclass
class _Calls:
    issued: int = 0  # number of collectives that this process has issued
    leave_out: int = 0  # number of next collectives to skip
    inside: bool = False


@contextmanager
def _counted_collectives() -> Iterator[_Calls]:
    calls = _Calls()
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    for name, original in originals.items():
        setattr(dist, name, _counted(original, calls))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _counted(collective: Callable[..., Any], calls: _Calls) -> Callable[..., Any]:
    @wraps(collective)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if calls.inside:  # one collective calls another
            return collective(*args, **kwargs)
        if calls.leave_out:
            calls.leave_out -= 1
            # The results are void, so the output needs no values. Zeros keep later work from computing with denormal numbers.
            (args[0] if args else next(iter(kwargs.values()))).zero_()
            return None
        calls.inside = True
        try:
            work = collective(*args, **kwargs)
        finally:
            calls.inside = False
        calls.issued += 1
        return work

    return counted
