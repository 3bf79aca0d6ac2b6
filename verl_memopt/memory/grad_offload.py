"""Keep gradients in host memory: each leaves the device as soon as backward has it, and the optimizer reads it from there.

Use it when: gradients are the peak, and you sum them over micro-batches, which ``optim.in_backward`` cannot do, or clip them
    without its second pass.
Saves: all gradients but those of two blocks. That of a matrix of the vocabulary passes in tiles: ``optim.bucket_megabytes`` of it
    are on the device at once.
Costs: as many bytes of host memory. Each gradient crosses the bus once per micro-batch, the sum so far comes back for every
    micro-batch after the first, and the optimizer reads it once more. For its tiles the head computes its logits once more: 1.6 %
    of the products of an update of Qwen3-8B, 7 % of Qwen3-0.6B. It does not where ``model.logprob_chunk_tokens`` is as large as a
    micro-batch.
Works with: clipping, any number of micro-batches, several devices (each keeps its shard), ``optimizer_offload`` and
    ``split_master_weights``, with which ``mixed_precision.reduce_dtype=bfloat16`` halves the gradients. It changes no number but
    the rounding of what passes in tiles. On several devices with ``gradient_sync=last`` the matrix stays whole. It refuses
    ``optim.in_backward`` and ``offload_policy``.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from verl_memopt.memory.bucketed_adamw import SLOTS, only_with_adamw
from verl_memopt.memory.knob import Advice, Claim, Knob, LadderRow, Refusal

if TYPE_CHECKING:
    from verl_memopt.plan.formulas import Shapes

_ACTOR = "actor_rollout_ref.actor"
KEY = f"{_ACTOR}.fsdp_config.grad_offload"
_IN_BACKWARD, _NATIVE = f"{_ACTOR}.optim.in_backward", f"{_ACTOR}.fsdp_config.offload_policy"


@dataclass(frozen=True)
class GradOffload:
    grad_offload: bool = False
    """A gradient leaves the device as soon as backward has it, and is summed over micro-batches in host memory: 4 bytes a
    parameter (fp32) leave the device. The optimizer clips it and reads it from there, bucket by bucket."""


_offloads = attrgetter(KEY)


LEAST_ROWS = 64
"""Fewest rows of a tile on a rank, so that products with it are worth their launch; more are a multiple of it."""


def tile_rows(bucket_bytes: int, row_bytes: int) -> int:
    """Rows of a tile on each rank. ``row_bytes``: bytes of one row on every rank together."""
    return max(bucket_bytes // SLOTS // row_bytes // LEAST_ROWS, 1) * LEAST_ROWS


def tile_params(shapes: Shapes, ranks: int = 1) -> int | None:
    """Elements of one gradient tile of the vocabulary's matrix, over all ranks; None if it is not tiled."""
    fsdp, bucket = shapes.settings.actor.fsdp_config, int(shapes.settings.actor.optim.bucket_megabytes * 2**20)
    element_bytes = shapes.gradient_bytes
    summed_whole = ranks > 1 and fsdp.gradient_sync == "last"
    if not fsdp.grad_offload or summed_whole or element_bytes * shapes.vocab * shapes.hidden <= bucket:
        return None
    row = ranks * shapes.hidden
    return row * min(tile_rows(bucket, row * max(element_bytes, shapes.compute_bytes)), -(-shapes.vocab // ranks))


def matrix_params(shapes: Shapes, ranks: int = 1) -> int:
    whole, tile = shapes.vocab * shapes.hidden, tile_params(shapes, ranks)
    return whole if tile is None else min(whole, SLOTS * tile)


def _saved(_: Shapes, after: Shapes) -> float:
    # If copies take no time, only the vocabulary's matrix or one block's gradients are there.
    return after.gradient_bytes * (after.params - max(matrix_params(after), after.block_params))


KNOB = Knob(
    cost="host memory, copies per micro-batch",
    settings={"trained_fsdp": GradOffload},
    refuses=(
        *only_with_adamw(KEY, _offloads),
        Refusal(
            (KEY, _IN_BACKWARD),
            lambda settings: _offloads(settings) and attrgetter(_IN_BACKWARD)(settings),
            "each gradient is used and freed inside backward already",
            f"Set {_IN_BACKWARD}=false, or {KEY}=false.",
        ),
        Refusal(
            (KEY, _NATIVE),
            lambda settings: _offloads(settings) and attrgetter(_NATIVE)(settings),
            "FSDP2 keeps gradients on the host already",
            f"Set {_NATIVE}=false, or {KEY}=false.",
        ),
    ),
    advice=(Advice("grads", KEY, True),),
    claims=(Claim("update_actor", "grads", _saved),),
    row=LadderRow(195, on=(f"{KEY}=true",), off=(f"{KEY}=false",)),
)
