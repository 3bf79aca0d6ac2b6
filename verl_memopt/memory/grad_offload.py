"""Keep gradients in host memory: each gradient leaves the device as soon as backward has computed it.

The optimizer reads the gradients from there.

Use it when: gradients set the memory peak, and you sum them over several micro-batches, which ``optim.in_backward`` cannot do, or
    clip them, for which ``optim.in_backward`` needs a second pass.
Saves: all gradients except those of two blocks. The gradient of the vocabulary matrix (embedding or LM head) passes over the
    device in tiles: at most ``optim.bucket_megabytes`` of it are there at once.
Costs: as much host memory as it saves on the device. Each gradient is copied to the host once per micro-batch. For every
    micro-batch after the first, the sum so far is copied back. The optimizer reads the sum once more. Because of the tiles, the
    LM head computes its logits once more: 1.6 % of the matrix products of an update of Qwen3-8B, 7 % with Qwen3-0.6B. This is not
    needed if ``model.logprob_chunk_tokens`` is at least as large as a micro-batch.
Works with: clipping, any number of micro-batches, several devices (each keeps its shard), ``optimizer_offload`` and
    ``split_master_weights``. With the last one, ``mixed_precision.reduce_dtype=bfloat16`` halves the gradients. Results change
    only by the rounding of gradients that pass in tiles. On several devices with ``gradient_sync=last`` the gradient of the
    vocabulary matrix is not tiled. It refuses ``optim.in_backward`` and ``offload_policy``.
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
    """Copy each gradient to host memory as soon as backward has computed it, and keep the sum over micro-batches there. This
    saves 4 bytes per parameter (fp32) on the device. The optimizer clips the gradients and reads them from the host, bucket by
    bucket."""


_offloads = attrgetter(KEY)


LEAST_ROWS = 64
"""Fewest rows of a tile on each rank, so that products with the tile are worth a kernel launch. Larger tiles have a multiple of
it."""


def tile_rows(bucket_bytes: int, row_bytes: int) -> int:
    """Rows of a tile on each rank. ``row_bytes``: bytes of one row, summed over ranks."""
    return max(bucket_bytes // SLOTS // row_bytes // LEAST_ROWS, 1) * LEAST_ROWS


def tile_params(shapes: Shapes, ranks: int = 1) -> int | None:
    """Elements of one tile of the vocabulary matrix's gradient, summed over ranks; None if that gradient is not tiled."""
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
    # If copies take no time, the device holds only the gradient of the vocabulary matrix, or the gradients of one block.
    return after.gradient_bytes * (after.params - max(matrix_params(after), after.block_params))


KNOB = Knob(
    cost="host memory, copies per micro-batch",
    settings={"trained_fsdp": GradOffload},
    refuses=(
        *only_with_adamw(KEY, _offloads),
        Refusal(
            (KEY, _IN_BACKWARD),
            lambda settings: _offloads(settings) and attrgetter(_IN_BACKWARD)(settings),
            "in_backward already uses and frees each gradient inside backward",
            f"Set {_IN_BACKWARD}=false, or {KEY}=false.",
        ),
        Refusal(
            (KEY, _NATIVE),
            lambda settings: _offloads(settings) and attrgetter(_NATIVE)(settings),
            "offload_policy already keeps gradients on the host",
            f"Set {_NATIVE}=false, or {KEY}=false.",
        ),
    ),
    advice=(Advice("grads", KEY, True),),
    claims=(Claim("update_actor", "grads", _saved),),
    row=LadderRow(195, on=(f"{KEY}=true",), off=(f"{KEY}=false",)),
)
