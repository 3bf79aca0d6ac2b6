"""Values that are cheap to make again: products keep what they were made from, and make them once more in backward.

A norm's output and a gated activation are as wide as what they come from and cost no product. Autograd would keep them, and what
lies between, until backward; here the product that reads them keeps their sources instead. Megatron-Core calls it
output-discarding recomputation (``recompute_modules=[layernorm, mlp_act]``; selective recomputation is arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from verl_memopt.knobs.shapes import ROWS_OF_BACKWARD
from verl_memopt.ops.fused import over_rows

PRODUCT_ROWS = {"cpu": ROWS_OF_BACKWARD, "cuda": 8192}
"""Rows of a tile of backward: enough for its products to be as fast as whole ones."""

Some: TypeAlias = tuple[Tensor, ...]


class Maker(Protocol):
    """How a value [T, n] is made from sources [T, n] and parameters [n], and how its gradient becomes theirs.

    sources: how many there are. overwrites: their gradients are written over them.
    """

    @property
    def sources(self) -> int: ...

    @property
    def overwrites(self) -> bool: ...

    def make(self, sources: Some, parameters: Some, out: Tensor | None = None) -> Tensor:
        """Gives the value, in ``out`` where given, which may be a source."""
        ...

    def differentiate(self, grad: Tensor, sources: Some, parameters: Some, into: Some, sums: Sequence[Tensor | None]) -> None:
        """Writes the sources' gradients into ``into`` and adds the parameters' to ``sums``, where not None."""
        ...


@dataclass(frozen=True)
class Normed:
    """x, weight -> the RMS norm of x, in the statements of transformers. Source: arXiv 1910.07467."""

    eps: float
    sources: int = 1
    overwrites: bool = False

    def make(self, sources: Some, parameters: Some, out: Tensor | None = None) -> Tensor:
        (x,), (weight,) = sources, parameters
        out = torch.empty_like(x) if out is None else out
        over_rows(_norm, (x, out), weight, self.eps)
        return out

    def differentiate(self, grad: Tensor, sources: Some, parameters: Some, into: Some, sums: Sequence[Tensor | None]) -> None:
        (x,), (weight,) = sources, parameters
        over_rows(norm_gradient, (grad, x, into[0]), weight, self.eps, sums[0])


@dataclass(frozen=True)
class Gated:
    """gate, up -> silu(gate) * up. Source: arXiv 2002.05202."""

    sources: int = 2
    overwrites: bool = True

    def make(self, sources: Some, parameters: Some, out: Tensor | None = None) -> Tensor:
        gate, up = sources
        out = torch.empty_like(gate) if out is None else out
        over_rows(_gate, (gate, up, out), narrow=True)
        return out

    def differentiate(self, grad: Tensor, sources: Some, parameters: Some, into: Some, sums: Sequence[Tensor | None]) -> None:
        over_rows(_gate_gradient, (grad, *sources, *into), narrow=True)


def product_tiles(tensor: Tensor, least: int = 1) -> list[slice]:
    """Gives slices of a tensor's rows for products, ``least`` or more; as equal as they can be; one where there are no rows."""
    rows = tensor.shape[0]
    count = max(-(-rows // PRODUCT_ROWS.get(tensor.device.type, 8192)), least)
    size = max(-(-rows // count), 1)
    return [slice(start, start + size) for start in range(0, max(rows, 1), size)]


def normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gives x [..., n] over its root mean square in fp32 (or wider), and one over that root [..., 1]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    return (wide * inverse if wide is x else wide.mul_(inverse)), inverse


def norm_gradient(grad: Tensor, x: Tensor, into: Tensor, weight: Tensor, eps: float, sums: Tensor | None) -> None:
    """Writes x's gradient into ``into``, which may be ``grad``, that of x's norm; adds the weight's to ``sums``."""
    normal, inverse = normalized(x, eps)
    above = grad.to(normal.dtype)
    product = above * normal
    if sums is not None:
        sums.add_(product.flatten(0, -2).sum(0))
    shared = product.mul_(weight).mean(-1, keepdim=True).neg_()
    del product  # before there is another tensor of its size
    weighted = above * weight if above is grad else above.mul_(weight)
    into.copy_(weighted.addcmul_(normal, shared).mul_(inverse))


def _norm(x: Tensor, out: Tensor, weight: Tensor, eps: float) -> None:
    normal, _ = normalized(x, eps)
    torch.mul(normal.to(x.dtype), weight, out=out)


def _gate(gate: Tensor, up: Tensor, out: Tensor) -> None:
    torch.mul(silu(gate), up, out=out)


def _gate_gradient(grad: Tensor, gate: Tensor, up: Tensor, into_gate: Tensor, into_up: Tensor) -> None:
    active, above = silu(gate), grad * up
    torch.mul(grad, active, out=into_up)
    torch.ops.aten.silu_backward.grad_input(above, gate, grad_input=active)
    into_gate.copy_(active)


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor, in order: int64 [R] on its device and on the host."""

    index: Tensor
    places: np.ndarray

    def within(self, tile: slice) -> tuple[slice, Tensor]:
        """Gives which of them lie in a tile of rows, and where in the tile."""
        first, end = np.searchsorted(self.places, (tile.start, tile.stop)).tolist()
        return slice(first, end), self.index[first:end] - tile.start


def products(
    maker: Maker,
    sources: Some,
    parameters: Some,
    weights: Sequence[Tensor],
    rows: Rows | None = None,
    of_rows: Sequence[bool] = (),
) -> Some:
    """Gives the value's product with each of some weights [m, n]: [T, m], or [R, m] of ``rows`` for those that ``of_rows`` marks.

    At least one is of all rows. Keeps sources, parameters and weights for backward, not the value. Sources that the maker
    overwrites may be read by nothing else. A weight's gradient is summed over tiles of rows, in fp32 where the dtype is narrower.
    """
    tensors, marked = (*sources, *parameters, *weights), tuple(of_rows) if rows is not None else (False,) * len(weights)
    assert len(marked) == len(weights), (marked, len(weights))
    assert not all(marked)
    return _Products.apply(maker, len(parameters), rows, marked, keep(*tensors), *tensors)


@dataclass(frozen=True)
class Kept:
    """Tensors that a node of the graph holds for another node's backward.

    The node's own output stands for it: before torch 2.13 a node gives up its tensors once no tensor refers to it, whoever else
    holds the node.
    """

    output: Tensor  # of no elements, so that it costs nothing

    def tensors(self) -> tuple[Tensor, ...]:
        node: Any = self.output.grad_fn
        return node.saved_tensors


def keep(first: Tensor, *others: Tensor | None) -> Kept | None:
    """Gives tensors that the graph holds for another node's backward; None where none needs a gradient.

    A node saves its tensors after its forward. Saved by one of their own they are there before anything is computed from them,
    so that the second forward of a checkpointed block stops before the product, if no more is saved after.
    """
    output = _Keep.apply(first, *others)
    return None if output.grad_fn is None else Kept(output)


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor | None) -> Tensor:
        ctx.save_for_backward(first, *others)
        return first.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing is computed from this node's output")


def kept(ctx: Any) -> tuple[Tensor, ...]:
    """Gives the tensors that ``ctx.kept`` holds, for good: a second backward is an assertion error."""
    assert ctx.kept is not None, "this graph runs backward once"
    held, ctx.kept = ctx.kept, None
    return held.tensors()


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, maker: Maker, parameters: int, rows: Rows | None, marked: Sequence[bool], node: Any, *tensors: Tensor
    ) -> Some:
        ctx.maker, ctx.parameters, ctx.rows, ctx.marked, ctx.kept = maker, parameters, rows, marked, node
        first, second = maker.sources, maker.sources + parameters
        value = maker.make(tensors[:first], tensors[first:second])
        part = value if rows is None else value[rows.index]
        return tuple(torch.mm(part if some else value, weight.t()) for weight, some in zip(tensors[second:], marked, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        maker, tensors, needed = ctx.maker, kept(ctx), ctx.needs_input_grad[5:]
        first, second = maker.sources, maker.sources + ctx.parameters
        sources, parameters, weights = tensors[:first], tensors[first:second], tensors[second:]
        further = any(needed[:second])
        into = sources if maker.overwrites else tuple(torch.empty_like(source) for source in sources if further)
        sums = [zeros_to_sum(one) if wanted else None for one, wanted in zip(parameters, needed[first:second], strict=True)]
        of_weights = [WeightSum(weight) if wanted else None for weight, wanted in zip(weights, needed[second:], strict=True)]
        cuts = product_tiles(sources[0])
        for rows in cuts:
            cut = tuple(source[rows] for source in sources)
            value = maker.make(cut, parameters)
            here, places = (rows, None) if ctx.rows is None else ctx.rows.within(rows)
            above = [grad[here if some else rows] for grad, some in zip(grads, ctx.marked, strict=True)]
            for grad, total, some in zip(above, of_weights, ctx.marked, strict=True):
                if total is not None:
                    total.add(grad, value[places] if some else value, alone=len(cuts) == 1)
            if further:
                _through(above, weights, ctx.marked, places, value)
                maker.differentiate(value, cut, parameters, tuple(one[rows] for one in into), sums)
            del value, above  # the next tile's are not to lie beside them
        given = into if further else (None,) * first
        of_parameters = (None if one is None else one.to(like.dtype) for one, like in zip(sums, parameters, strict=True))
        return *(None,) * 5, *given, *of_parameters, *(None if one is None else one.given() for one in of_weights)


def _through(
    grads: Sequence[Tensor], weights: Sequence[Tensor], marked: Sequence[bool], places: Tensor | None, out: Tensor
) -> None:
    """Writes the sum of each gradient's product with its weight into ``out``; of marked ones it is of the rows at ``places``."""
    pairs = list(zip(grads, weights, marked, strict=True))
    whole, part = ([(grad, weight) for grad, weight, some in pairs if some is wanted] for wanted in (False, True))
    torch.mm(*whole[0], out=out)
    for grad, weight in whole[1:]:
        torch.addmm(out, grad, weight, out=out)
    if part:
        added = out[places]
        for grad, weight in part:
            torch.addmm(added, grad, weight, out=added)
        out[places] = added


class WeightSum:
    """The gradient of a weight [m, n], from tiles of rows."""

    def __init__(self, weight: Tensor) -> None:
        self.dtype, self.total = weight.dtype, weight.new_empty(0)
        self.wide = torch.promote_types(weight.dtype, torch.float32)

    def add(self, grad: Tensor, value: Tensor, alone: bool) -> None:
        """Adds grad [t, m] and value [t, n]'s product. alone: there is no other tile."""
        if not self.total.numel():
            product = torch.mm(grad.t(), value)
            self.total = product if alone else product.to(self.wide)
        elif self.wide == self.dtype:
            torch.addmm(self.total, grad.t(), value, out=self.total)  # counted by torch's FLOP counter
        else:
            self.total.add_(torch.mm(grad.t(), value))

    def given(self) -> Tensor:
        """Gives the whole, in the weight's dtype."""
        return self.total.to(self.dtype)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gives the RMS norm of x [T, n]; keeps x alone."""
    return _NormedAlone.apply(x, weight, eps)


class _NormedAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        return Normed(eps).make((x,), (weight,))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        into, sums = torch.empty_like(x), zeros_to_sum(weight) if ctx.needs_input_grad[1] else None
        Normed(ctx.eps).differentiate(grad, (x,), (weight,), (into,), (sums,))
        return into, None if sums is None else sums.to(weight.dtype), None


def zeros_to_sum(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
