"""The gradient of a token embedding, added in place, so that a tied head and embedding share one gradient matrix.

In every backward autograd would fill a [vocabulary, hidden] matrix with zeros, write the rows of a few tokens into it, and add it
to the existing gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule

from verl_memopt.distributed.device import fetched_together
from verl_memopt.observe.byte_tracker import scope

COLUMNS = 256
"""Number of columns that are summed in fp32 at a time, where the gradient has a narrower dtype."""

CAST_UNIT = "cast_unit"
"""Attribute of a module: its :class:`~verl_memopt.memory.precision_torch.CastUnit`, if it is cast to compute."""


SCALED = tuple(f"{name}TextScaledWordEmbedding" for name in ("Gemma3", "Gemma4", "Gemma4Unified"))
"""Classes of transformers whose output is the embedding times a constant."""


class TrainedEmbedding(nn.Embedding):
    """Embedding that adds its weight's gradient in place. It takes over the weight of a plain one, under the same name.

    It also takes over the factor of a scaled one.
    """

    def __init__(self, base: nn.Embedding) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim, self.padding_idx = base.num_embeddings, base.embedding_dim, base.padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self.weight = base.weight
        self.factor: float | None = getattr(base, "scalar_embed_scale", None)

    def forward(self, input: Tensor) -> Tensor:
        # Backward reads the ids and not the weight, so FSDP2 need not gather it again.
        gathered_for_forward(self, again_in_backward=False)
        learns = torch.is_grad_enabled() and self.weight.requires_grad
        tiles = tiles_of(self.weight) if learns else None
        sorted_ids = None if tiles is None else _SortedIds(input, tiles)
        rows = _LookUp.apply(input, self.weight, self.padding_idx, sorted_ids)
        if self.factor is None:
            return rows
        # A number on the host, rounded to the dtype of the weight first, as in transformers.
        return rows * torch.tensor(self.factor, dtype=torch.float32).to(self.weight.dtype)


def gathered_for_forward(unit: nn.Module, again_in_backward: bool) -> None:
    """Free the buffer into which FSDP2 gathered a large weight. Call this in the unit's forward.

    FSDP2 would keep the buffer beside the weight itself until the next gather. A unit that one device casts has no such buffer.
    Other modules are left alone. ``again_in_backward``: backward reads the weight, so it is gathered or cast again.
    """
    cast_unit = getattr(unit, CAST_UNIT, None)
    if cast_unit is not None:
        cast_unit.again_in_backward = again_in_backward
    if not isinstance(unit, FSDPModule):
        return
    unit.set_unshard_in_backward(again_in_backward)
    context = unit._get_fsdp_state()._comm_ctx
    if context.all_gather_state is not None:
        for stream in (context.all_gather_copy_in_stream, context.all_gather_stream):
            # The copies out of the buffer must have ended before its memory is reused.
            stream.wait_event(context.all_gather_state.event)
        context.all_gather_state = None


def is_plain(embedding: nn.Module) -> TypeGuard[nn.Embedding]:
    kind = type(embedding)
    plain = kind is nn.Embedding or (kind.__name__ in SCALED and kind.__module__.startswith("transformers."))
    return plain and embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None, sorted_ids: _SortedIds | None) -> Tensor:
        ctx.save_for_backward(ids)
        # The parameter itself, not a saved tensor: backward adds to its .grad.
        ctx.weight, ctx.padding_idx, ctx.sorted_ids = weight, padding_idx, sorted_ids
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        if ctx.padding_idx is not None:
            rows = rows.masked_fill((ids == ctx.padding_idx).reshape(-1, 1), 0)
        if ctx.sorted_ids is not None:
            ctx.sorted_ids.add_rows(rows)
            return None, None, None, None
        into, handed = room_for(ctx.weight, ctx.needs_input_grad[1], True)
        if into is not None:
            add_rows_(into, ids.reshape(-1), rows)
            added(ctx.weight)
        return None, handed, None, None


class _SortedIds:
    def __init__(self, ids: Tensor, tiles: Tiles) -> None:
        self._tiles = tiles
        numbers, rows = tiles.places(ids.reshape(-1))
        numbers, self._order = numbers.sort(stable=True)
        self._rows = rows.index_select(0, self._order)
        ends = torch.searchsorted(numbers, torch.arange(tiles.count, device=ids.device), right=True)
        # fp32 is exact up to 2**24, which is more tokens than a micro-batch has. The copy to the host starts in the forward,
        # because backward needs the numbers there before it can queue its kernels.
        self._ends: Callable[[], list[Tensor]] = fetched_together([ends.float()], ids.device)

    def add_rows(self, rows: Tensor) -> None:
        # rows [T, h]
        (ends,), count = self._ends(), self._tiles.count
        # A fake tensor has no values. Then the tokens are divided evenly over the tiles.
        ends_on_host = (
            [rows.shape[0] * (at + 1) // count for at in range(count)] if isinstance(ends, FakeTensor) else ends.int().tolist()
        )
        starts = [0, *ends_on_host]
        for tile in self._tiles.passing([at for at in range(count) if starts[at] < starts[at + 1]]):
            part = slice(starts[tile.number], starts[tile.number + 1])
            add_rows_(tile.rows, self._rows[part], rows.index_select(0, self._order[part]))


def add_rows_(into: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Add rows [T, h] to the rows at ids, int64 [T], of a matrix [V, h]; repeated ids are summed in fp32, in a fixed order."""
    if into.dtype == torch.float32:
        _add(into, ids, rows.float())
        return
    ids, order = ids.sort(stable=True)
    run = torch.cat([ids.new_zeros(1), (ids[1:] != ids[:-1]).cumsum(0)])[: ids.shape[0]]
    # There may be fewer runs of equal ids than tokens. The remaining entries add zeros to row 0.
    first = torch.zeros_like(ids).scatter_(0, run, ids)
    for start in range(0, rows.shape[1], COLUMNS):
        part = rows[:, start : start + COLUMNS].index_select(0, order).float()
        sums = torch.zeros_like(part)
        _add(sums, run, part)
        # Each row occurs once, or is zero, so the order of the additions does not matter. index_put_ would copy these columns of
        # all rows.
        into[:, start : start + COLUMNS].index_add_(0, first, sums.to(into.dtype))


def _add(into: Tensor, ids: Tensor, rows: Tensor) -> None:
    if into.device.type == "cpu":
        into.index_add_(0, ids, rows)
    else:
        # index_put_ sorts the indices first; index_add_ would add in an order that varies with the threads.
        into.index_put_((ids,), rows, accumulate=True)


def room_for(parameter: Tensor | None, needed: bool, in_place: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the tensor to add a parameter's gradient to, and the gradient to return to autograd.

    The first is ``.grad`` if ``in_place`` allows it, otherwise a new tensor of zeros, or None if no gradient is needed. The
    second is that new tensor, or None if the first is ``.grad``. Call :func:`added` when the gradient is complete.
    """
    if parameter is None or not needed:
        return None, None
    home = _home(parameter) if in_place else None
    with scope(kind="grads"):
        if home is not None:
            home.bring(parameter)
        elif not (in_place and adds_in_place(parameter)):
            room = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
            return room, room
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    return parameter.grad, None


class GradientHome(Protocol):
    """A place outside the device where a parameter's gradient rests."""

    def bring(self, parameter: Tensor) -> None:
        """Load the sum of earlier gradients into ``.grad``."""

    def take(self, parameter: Tensor) -> None:
        """Store ``.grad`` and drop it. It replaces the stored sum if ``bring`` loaded that sum; otherwise it is added to it."""

    def tiles(self, parameter: Tensor) -> Tiles | None:
        """Return the tiles in which the gradient is loaded. None = it is loaded whole."""


@dataclass(frozen=True)
class GradientTile:
    number: int
    rows: Tensor  # [n, h]
    parts: Sequence[tuple[slice, Tensor]]
    """Ranges of rows of the matrix, in order, each with its view of ``rows``."""


class Tiles(Protocol):
    """The gradient of a matrix [V, h], which is loaded on the device tile by tile. Each row is in one of ``count`` tiles."""

    count: int

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tile number of each row in ``ids``, and its row within that tile, int64 [T] each."""

    def passing(self, needed: Collection[int] | None = None) -> Iterator[GradientTile]:
        """Yield the tiles in order, each with the sum of earlier gradients, and store each tile afterwards.

        ``needed``: numbers of the tiles that the caller adds to. Other tiles may be left out and keep their sums. None = all
        tiles.
        """


HOME = "gradient_home"
"""Name of the attribute of a parameter that holds its :class:`GradientHome`, if there is one."""


def added(parameter: Tensor | None) -> None:
    """Mark the gradient from :func:`room_for` as complete. If it rests elsewhere, it leaves the device now."""
    if parameter is not None and (home := _home(parameter)) is not None:
        home.take(parameter)


def tiles_of(parameter: Tensor) -> Tiles | None:
    """Return the tiles of a parameter's gradient, or None. If there are tiles, do not call :func:`room_for`."""
    home = _home(parameter)
    return None if home is None else home.tiles(parameter)


def _home(parameter: Tensor) -> GradientHome | None:
    return getattr(parameter, HOME, None)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    return (parameter.grad_dtype if parameter.is_leaf else None) or parameter.dtype


def adds_in_place(parameter: Tensor) -> bool:
    """Return whether a gradient may be added to ``.grad`` without autograd: the parameter is a leaf without hooks.

    This is true for the gathered parameter of an FSDP2 unit, because FSDP2 reads its ``.grad`` after the backward of the unit.
    """
    # Autograd calls these hooks only for gradients that it accumulates itself. An addition to ``.grad`` would bypass them.
    watched = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    # A fake tensor takes the place of one of the other two classes.
    plain = type(parameter) in (Tensor, nn.Parameter, FakeTensor)
    return plain and parameter.is_leaf and parameter.requires_grad and not watched
