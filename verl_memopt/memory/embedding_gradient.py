"""The gradient of a token embedding, added in place: a tied head and embedding share one gradient matrix.

For every backward autograd would fill a [vocabulary, hidden] matrix with zeros, write the rows of a few tokens, and add it to the
existing gradient.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from verl_memopt.observe.byte_tracker import scope

COLUMNS = 256
"""Columns whose repeated tokens are summed in fp32 at once, where the gradient has a narrower dtype."""


class TrainedEmbedding(nn.Embedding):
    """An embedding that adds to its weight's gradient in place. It replaces a plain one, under the same name."""

    def __init__(self, base: nn.Embedding) -> None:
        """Take over the weight of a plain embedding."""
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim, self.padding_idx = base.num_embeddings, base.embedding_dim, base.padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self.weight = base.weight

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of the weight for token ids."""
        # Backward reads the ids and not the weight, so FSDP2 need not gather it again.
        gathered_for_forward(self, again_in_backward=False)
        return _LookUp.apply(input, self.weight, self.padding_idx)


def gathered_for_forward(unit: nn.Module, again_in_backward: bool) -> None:
    """Free the buffer through which a unit with a large weight was gathered. Call this in the unit's forward.

    FSDP2 would keep the buffer until the next gather, beside the weight itself. Nothing is done where it is no FSDP2 unit.
    ``again_in_backward``: backward reads the weight.
    """
    if not isinstance(unit, FSDPModule):
        return
    unit.set_unshard_in_backward(again_in_backward)
    context = unit._get_fsdp_state()._comm_ctx
    if context.all_gather_state is not None:
        for stream in (context.all_gather_copy_in_stream, context.all_gather_stream):
            # The copies out of the buffer must be over before its memory is used for something else.
            stream.wait_event(context.all_gather_state.event)
        context.all_gather_state = None


def is_plain(embedding: nn.Module) -> TypeGuard[nn.Embedding]:
    """Return whether :class:`TrainedEmbedding` can replace a module."""
    plain = type(embedding) is nn.Embedding
    return plain and embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        # The parameter itself, not a saved tensor: backward adds to its .grad.
        ctx.weight, ctx.padding_idx = weight, padding_idx
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        if ctx.padding_idx is not None:
            rows = rows.masked_fill((ids == ctx.padding_idx).reshape(-1, 1), 0)
        into, handed = room_for(ctx.weight, ctx.needs_input_grad[1], True)
        if into is not None:
            add_rows_(into, ids.reshape(-1), rows)
            added(ctx.weight)
        return None, handed, None


def add_rows_(into: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Add rows [T, h] to the rows at ids, int64 [T], of a matrix [V, h].

    The rows of a repeated id are summed in fp32, in the same order in every run.
    """
    if into.dtype == torch.float32:
        _add(into, ids, rows.float())
        return
    ids, order = ids.sort(stable=True)
    run = torch.cat([ids.new_zeros(1), (ids[1:] != ids[:-1]).cumsum(0)])[: ids.shape[0]]
    # Where there are fewer runs than tokens, the rest adds zeros to row 0.
    first = torch.zeros_like(ids).scatter_(0, run, ids)
    for start in range(0, rows.shape[1], COLUMNS):
        part = rows[:, start : start + COLUMNS].index_select(0, order).float()
        sums = torch.zeros_like(part)
        _add(sums, run, part)
        # Each row comes once, or is zero, so the order of sums does not matter. index_put_ would copy all rows of these columns.
        into[:, start : start + COLUMNS].index_add_(0, first, sums.to(into.dtype))


def _add(into: Tensor, ids: Tensor, rows: Tensor) -> None:
    if into.device.type == "cpu":
        into.index_add_(0, ids, rows)
    else:
        # index_put_ sorts the indices first; index_add_ would add in an order that varies with the threads.
        into.index_put_((ids,), rows, accumulate=True)


def room_for(parameter: Tensor | None, needed: bool, in_place: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the tensor to add a parameter's gradient to, and the gradient to return to autograd.

    The first is new zeros, or ``.grad`` where that may be used (``in_place``), or None where no gradient is needed or a layer has
    no such weight. The second is the same tensor, or None where it is ``.grad`` itself. Call :func:`added` once it is complete.
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
    """Where the gradient of a parameter rests outside of the device."""

    def bring(self, parameter: Tensor) -> None:
        """Put what is summed so far into ``.grad``."""

    def take(self, parameter: Tensor) -> None:
        """Add ``.grad``, if there is one, to what is summed so far, if it was not brought, and drop it."""


HOME = "gradient_home"
"""Attribute of a parameter: its :class:`GradientHome`, if its gradient has one."""


def added(parameter: Tensor | None) -> None:
    """Note that a gradient is complete for which :func:`room_for` gave room. Where it rests elsewhere, it leaves."""
    if parameter is not None and (home := _home(parameter)) is not None:
        home.take(parameter)


def _home(parameter: Tensor) -> GradientHome | None:
    return getattr(parameter, HOME, None)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient, which may have more digits than the parameter."""
    return (parameter.grad_dtype if parameter.is_leaf else None) or parameter.dtype


def adds_in_place(parameter: Tensor) -> bool:
    """Return whether a gradient may be added to ``.grad`` without autograd: the parameter is a leaf without hooks.

    The gathered parameter of an FSDP2 unit qualifies, because FSDP2 reads its ``.grad`` after the backward of the unit.
    """
    # Autograd calls these hooks only for gradients that it accumulates itself. A gradient that is added here would bypass
    # them.
    watched = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return parameter.is_leaf and parameter.requires_grad and not watched and type(parameter) in (Tensor, torch.nn.Parameter)
