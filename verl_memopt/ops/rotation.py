"""Rotary positions of queries and keys, with the norm some models put before: made, and made again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_memopt.ops.discarded_values import norm_gradient, normalized, zeros_to_sum
from verl_memopt.ops.fused import over_rows


@dataclass(frozen=True)
class Rotary:
    """What turns queries and keys [T, heads, D] as they come from their products into those that attention reads.

    cos, sin: [T, D]. norms: weights [D] of the queries' and the keys' norm, or None where they have none; eps: of both norms.
    Attention that is given one may write the gradients of queries, keys and values over them, and no one else may read these.
    Source: arXiv 2104.09864.
    """

    cos: Tensor
    sin: Tensor
    norms: tuple[Tensor | None, Tensor | None]
    eps: float

    def query(self, x: Tensor) -> Tensor:
        """Gives queries turned, in a graph of their own; what is kept for backward is of the queries' size or nothing."""
        return rotated(x, self.norms[0], self.eps, self.cos, self.sin)

    def key(self, x: Tensor) -> Tensor:
        """Gives keys turned, as ``query`` does."""
        return rotated(x, self.norms[1], self.eps, self.cos, self.sin)


def rotated(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Gives x [T, heads, D] normed (where there is a weight [D]) and rotated by cos and sin [T, D].

    Keeps x where it is normed, and nothing of its size where it is not.
    """
    return _Rotated.apply(x, weight, eps, cos, sin)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(None if weight is None else x, weight, cos, sin)
        return turned(x, weight, eps, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        of_x = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        sums = weight_sums((weight,), ctx.needs_input_grad[1:2])[0]
        turned_back(grad, x, weight, ctx.eps, cos, sin, of_x, sums)
        return of_x, None if sums is None else sums.to(weight.dtype), None, None, None


def turning(rotary: Rotary | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, float]:
    """Gives cos, sin, the norms' weights and eps, as an autograd function takes them."""
    return (None, None, None, None, 0.0) if rotary is None else (rotary.cos, rotary.sin, *rotary.norms, rotary.eps)


def turned(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Gives what :func:`rotated` gives, in a tensor of its own and outside any graph; x itself where there are no tables.

    x may have any strides.
    """
    if cos is None or sin is None:
        return x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    over_rows(_turn, (x, cos, sin, out), weight, eps)
    return out


def turned_back(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    into: Tensor,
    sums: Tensor | None,
) -> None:
    """Writes x's gradient into ``into``, which may be x, from that of x turned; adds the weight's to ``sums``, where not None.

    grad, x, into: [T, heads, D] of one dtype; x is read only where there is a weight.
    """
    if cos is None or sin is None:
        into.copy_(grad)
        return
    over_rows(_turn_back, (grad, x, cos, sin, into), weight, eps, sums)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, weight: Tensor | None, eps: float) -> None:
    _rotate(x if weight is None else normalized(x, eps)[0].to(x.dtype).mul_(weight), cos, sin, out, 1)


def _turn_back(
    grad: Tensor, x: Tensor | None, cos: Tensor, sin: Tensor, into: Tensor, weight: Tensor | None, eps: float, sums: Tensor | None
) -> None:
    back = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    _rotate(grad, cos, sin, back, -1)
    if weight is None or x is None:
        into.copy_(back)
    else:
        norm_gradient(back, x, into, weight, eps, sums)


def weight_sums(weights: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Gives zeros in fp32 (or wider) of each weight whose gradient is needed, to sum it in."""
    return [zeros_to_sum(one) if one is not None and wanted else None for one, wanted in zip(weights, needed, strict=True)]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: int) -> None:
    """Writes x [T, heads, D] rotated by angles whose cos and sin [T, D] are given, or by minus them, into ``out``."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None], sin[:, None]
    torch.mul(x, cos, out=out)
    # The transpose reads the sine of the other half.
    first, second = (sin[..., :half], sin[..., half:]) if sign == 1 else (sin[..., half:], sin[..., :half])
    out[..., :half].addcmul_(x[..., half:], first, value=-sign)
    out[..., half:].addcmul_(x[..., :half], second, value=sign)
