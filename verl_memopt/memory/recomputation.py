"""What functions share whose backward computes cheap values again: norms and gates, the tiles of their products, and sums.

A block with ``recompute_elementwise`` uses it, an MLP over tiles does, and so does attention that rotates queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from verl_memopt.memory.formulas import PRODUCT_ROWS
from verl_memopt.memory.fused import over_rows, runs_compiled

Tensors: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class RMSNorm:
    """RMS norm of x under a weight, with the same statements as transformers. Source: arXiv 1910.07467.

    Like :class:`SwiGLU` it says how a value [T, n] is computed from ``sources`` tensors [T, n] and from parameters [n], and how
    its gradient becomes theirs. ``overwrites``: the gradients of the sources overwrite the sources.
    """

    eps: float
    sources: int = 1
    overwrites: bool = False

    def compute(self, sources: Tensors, parameters: Tensors, out: Tensor | None = None) -> Tensor:
        """Return the value, written into ``out`` if that is not None. ``out`` may be a source."""
        (x,), (weight,) = sources, parameters
        out = torch.empty_like(x) if out is None else out
        over_rows(_norm, (x, out), weight, self.eps)
        return out

    def differentiate(
        self, grad: Tensor, sources: Tensors, parameters: Tensors, into: Tensors, sums: Sequence[Tensor | None]
    ) -> None:
        """Write the gradients of the sources into ``into``, and add those of the parameters to ``sums`` where it is not None."""
        (x,), (weight,) = sources, parameters
        total = sums[0]
        if total is not None and runs_compiled(grad):
            # Compiled, the sum over rows has to be a statement of its own. It could otherwise run after `grad` was
            # overwritten.
            over_rows(norm_weight_gradient, (grad, x), self.eps, total)
            total = None
        over_rows(norm_gradient, (grad, x, into[0]), weight, self.eps, total)


@dataclass(frozen=True)
class SwiGLU:
    """silu(gate) * up. Source: arXiv 2002.05202."""

    sources: int = 2
    overwrites: bool = True

    def compute(self, sources: Tensors, parameters: Tensors, out: Tensor | None = None) -> Tensor:
        """Return the value, as :meth:`RMSNorm.compute` does."""
        gate, up = sources
        out = torch.empty_like(gate) if out is None else out
        over_rows(_gate, (gate, up, out), narrow=True)
        return out

    def differentiate(
        self, grad: Tensor, sources: Tensors, parameters: Tensors, into: Tensors, sums: Sequence[Tensor | None]
    ) -> None:
        """Write gradients, as :meth:`RMSNorm.differentiate` does."""
        over_rows(_gate_gradient, (grad, *sources, *into), narrow=True)


Recomputable: TypeAlias = RMSNorm | SwiGLU


def product_tiles(tensor: Tensor, least: int = 1) -> list[slice]:
    """Return at least so many slices of a tensor's rows for products, as equal as they can be; one where there are no rows."""
    rows = tensor.shape[0]
    count = max(-(-rows // PRODUCT_ROWS.get(tensor.device.type, 8192)), least)
    size = max(-(-rows // count), 1)
    return [slice(start, start + size) for start in range(0, max(rows, 1), size)]


def normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x [..., n] over its root mean square in fp32 or wider, and the inverse of that root [..., 1]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    # If x is fp32 already, `wide` is x itself, which belongs to the caller and must not change.
    return (wide * inverse if wide is x else wide.mul_(inverse)), inverse


def norm_gradient(grad: Tensor, x: Tensor, into: Tensor, weight: Tensor, eps: float, sums: Tensor | None) -> None:
    """Write the gradient of the norm's input x [..., n] into ``into``, and add that of its weight [n] to ``sums``.

    ``grad`` [..., n] is that of the norm's output; ``into`` may be it. ``sums`` is [n] in fp32 or wider; None where the weight's
    gradient is not needed.
    """
    normal, inverse = normalized(x, eps)
    above = grad.to(normal.dtype)
    product = above * normal
    if sums is not None:
        sums.add_(product.flatten(0, -2).sum(0))
    shared = product.mul_(weight).mean(-1, keepdim=True).neg_()
    del product  # before there is another tensor of its size
    # Without a cast `above` is the caller's gradient, and only a copy of it may be overwritten.
    weighted = above * weight if above is grad else above.mul_(weight)
    into.copy_(weighted.addcmul_(normal, shared).mul_(inverse))


def norm_weight_gradient(grad: Tensor, x: Tensor, eps: float, sums: Tensor) -> None:
    """Add the gradient of the norm's weight alone to ``sums``; arguments as in :func:`norm_gradient`."""
    normal, _ = normalized(x, eps)
    sums.add_((grad.to(normal.dtype) * normal).flatten(0, -2).sum(0))


def _norm(x: Tensor, out: Tensor, weight: Tensor, eps: float) -> None:
    normal, _ = normalized(x, eps)
    # The weight multiplies what is rounded already, because transformers does so. The other order gives other last bits.
    torch.mul(normal.to(x.dtype), weight, out=out)


def _gate(gate: Tensor, up: Tensor, out: Tensor) -> None:
    torch.mul(silu(gate), up, out=out)


def _gate_gradient(grad: Tensor, gate: Tensor, up: Tensor, into_gate: Tensor, into_up: Tensor) -> None:
    # Both are computed before anything is written, because `into_gate` and `into_up` may be gate and up themselves.
    active, above = silu(gate), grad * up
    torch.mul(grad, active, out=into_up)
    torch.ops.aten.silu_backward.grad_input(above, gate, grad_input=active)
    into_gate.copy_(active)


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor, in order: int64 [R], on the device of the tensor and (``places``) on the host."""

    index: Tensor
    places: np.ndarray

    def within(self, tile: slice) -> tuple[slice, Tensor]:
        """Return the slice of these rows that lie in a tile, and their places in the tile, int64."""
        first, end = np.searchsorted(self.places, (tile.start, tile.stop)).tolist()
        return slice(first, end), self.index[first:end] - tile.start


def keep(first: Tensor, *others: Tensor | None) -> tuple[Tensor] | None:
    """Save tensors in the graph for the backward of another node, which reads them with :func:`kept`.

    An autograd function saves its tensors after its forward. A node of their own saves them before anything is computed from
    them. So the second forward of a checkpointed block stops before the product, if nothing is saved after these.

    Args:
        first: A tensor.
        others: More tensors; None stays None.

    Returns:
        The output of that node, of no elements, in a tuple, so that the other node does not take it for an input. Before torch
        2.13 a node drops its tensors once no tensor refers to it. None where none of the tensors needs a gradient.
    """
    output = _Keep.apply(first, *others)
    return None if output.grad_fn is None else (output,)


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor | None) -> Tensor:
        ctx.save_for_backward(first, *others)
        return first.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing is computed from this node's output")


def kept(ctx: Any) -> tuple[Tensor, ...]:
    """Return the tensors of ``ctx.kept``, and drop them there. A second backward is an assertion error."""
    assert ctx.kept is not None, "this graph runs backward once"
    (output,), ctx.kept = ctx.kept, None
    return output.grad_fn.saved_tensors


class WeightSum:
    """The gradient of a weight [m, n], summed over tiles of rows. The first tile allocates it."""

    def __init__(self, weight: Tensor) -> None:
        """Start without a gradient for ``weight``."""
        self.dtype, self.total = weight.dtype, weight.new_empty(0)
        self.wide = torch.promote_types(weight.dtype, torch.float32)

    def add(self, grad: Tensor, value: Tensor, alone: bool) -> None:
        """Add the product of a tile's gradient [t, m] and value [t, n]. ``alone``: there is no other tile."""
        if not self.total.numel():
            product = torch.mm(grad.t(), value)
            # One tile needs no sum, so it stays in the dtype of the product and is rounded once.
            self.total = product if alone else product.to(self.wide)
        elif self.wide == self.dtype:
            torch.addmm(self.total, grad.t(), value, out=self.total)  # counted by torch's FLOP counter
        else:
            # addmm cannot add a product in half precision to an fp32 sum.
            self.total.add_(torch.mm(grad.t(), value))

    def gradient(self) -> Tensor:
        """Return the sum in the weight's dtype."""
        return self.total.to(self.dtype)


def zeros_to_sum(parameter: Tensor) -> Tensor:
    """Return zeros of a parameter's shape in fp32 or wider, to sum its gradient in."""
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


# Some rows of a tensor that is also used whole, with one gradient of the whole instead of two.


def select_rows(x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x [T, n] and its rows [R, n] at ``rows``, int64 [R], none twice; None returns x twice.

    The gradient of the rows is added in place to the gradient of the whole. So the first result may be used by one function only,
    and this function must return a gradient that nothing else uses.
    """
    return (x, x) if rows is None else _SelectRows.apply(x, rows)


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        return x.view_as(x), x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_whole: Tensor, of_rows: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return of_whole.index_add_(0, rows, of_rows), None
