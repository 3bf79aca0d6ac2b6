"""Rotate queries and keys by their positions, after the norm that some models apply. Backward recomputes both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from verl_memopt.memory import kernels
from verl_memopt.memory.fused import joined, launched, over_rows, runs_compiled
from verl_memopt.memory.kernels import has_kernel
from verl_memopt.memory.recompute_elementwise_torch import (
    norm_gradient,
    norm_weight_gradient,
    normalized,
    rounded_for,
    zeros_to_sum,
)


@dataclass(frozen=True)
class Rotary:
    """Norms and rotates queries and keys [T, heads, D], which are outputs of the projections (arXiv 2104.09864).

    Attention that gets a ``Rotary`` may overwrite queries, keys and values with their gradients, so nothing else may use them.

    If the tables have R columns, fewer than D, only the first R entries of each head rotate (partial rotary). The others are
    normed and pass through.

    Attributes:
        cos: [T, R].
        sin: [T, R].
        norms: Weights [D] of the norm of queries and of the norm of keys, as :func:`norm_and_weight` returns them. None = no
            norm.
        eps: Epsilon of both norms.
    """

    cos: Tensor
    sin: Tensor
    norms: tuple[Tensor | None, Tensor | None]
    eps: float

    def query(self, x: Tensor) -> Tensor:
        """Norm and rotate queries, as :func:`rotary_embedding` does."""
        return rotary_embedding(x, self.norms[0], self.eps, self.cos, self.sin)

    def key(self, x: Tensor) -> Tensor:
        return rotary_embedding(x, self.norms[1], self.eps, self.cos, self.sin)


def rotary_embedding(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Norm and rotate x [T, heads, D], differentiably.

    ``cos`` and ``sin`` are [T, R] with R <= D, as in :class:`Rotary`. ``weight`` [D] is the weight of the norm. None = no norm.
    With a norm it keeps ``x`` for backward. Without a norm it keeps nothing of that size.
    """
    return _RotaryEmbedding.apply(x, weight, eps, cos, sin)


class _RotaryEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.eps = eps
        # The gradient of a rotation needs only the gradient of its output. The gradient of a norm also needs its input.
        ctx.save_for_backward(None if weight is None else x, weight, cos, sin)
        return apply_rotary(x, weight, eps, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        # Not empty_like, because it would keep the strides of a gradient that is a transposed view.
        x_grad = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        sums = weight_sums((weight,), ctx.needs_input_grad[1:2])[0]
        rotary_backward(grad, x, weight, ctx.eps, cos, sin, x_grad, sums)
        return x_grad, None if sums is None else sums.to(weight.dtype), None, None, None


def rotary_arguments(rotary: Rotary | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, float]:
    return (None, None, None, None, 0.0) if rotary is None else (rotary.cos, rotary.sin, *rotary.norms, rotary.eps)


def apply_rotary(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Do as :func:`rotary_embedding`, but without autograd. The result is a new tensor.

    ``x`` may have any strides. If ``cos`` or ``sin`` is None, ``x`` is returned unchanged.
    """
    if cos is None or sin is None:
        return x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    over_rows(_forward_statement, (x, cos, sin, out), weight, eps)
    return out


Tables = tuple[Tensor | None, Tensor | None]
"""Cosines and sines of some tokens, [T, R] each. None = do not rotate."""
Norms = tuple[Tensor | None, Tensor | None]
"""Weights [D] of the norm of queries and of the norm of keys. None = no norm."""


def apply_rotary_to_both(
    query: Tensor, key: Tensor, norms: Norms, eps: float, query_tables: Tables, tables: Tables
) -> tuple[Tensor, Tensor]:
    alike = query_tables[0] is tables[0] and (norms[0] is None) is (norms[1] is None)
    if alike and tables[0] is not None and _are_few(query) and not runs_compiled(query):
        # A copy side by side takes less time than to prepare each statement twice.
        pair, weight = torch.cat((query, key), 1), _stacked(norms, query.shape[1], key.shape[1])
        over_rows(_forward_statement, (pair, *tables, out := torch.empty_like(pair)), weight, eps)
        return out[:, : query.shape[1]], out[:, query.shape[1] :]
    if query_tables[0] is tables[0] and tables[0] is not None:
        query_out, key_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
        if launched(_both_statement, (query, key, *tables, query_out, key_out), *norms, eps):
            return query_out, key_out
    # If queries and keys are side by side in memory, one kernel launch is enough.
    both = joined((query, key), 1) if query_tables[0] is tables[0] else None
    if both is None or tables[0] is None or (norms[0] is None) is not (norms[1] is None):
        return apply_rotary(query, norms[0], eps, *query_tables), apply_rotary(key, norms[1], eps, *tables)
    # Write to a new tensor, because the outputs of the projections are kept for backward.
    out = torch.empty(both.shape, dtype=both.dtype, device=both.device)
    over_rows(_forward_statement, (both, *tables, out), norms[0], eps, norms[1], query.shape[1])
    return out[:, : query.shape[1]], out[:, query.shape[1] :]


FEW_ELEMENTS = {"cpu": 2**15, "cuda": 0}
"""Most elements of queries that are copied beside the keys."""


def _are_few(query: Tensor) -> bool:
    return query.numel() <= FEW_ELEMENTS.get(query.device.type, 0)


def _stacked(norms: Norms, queries: int, keys: int) -> Tensor | None:
    # Norm weights [heads, D]: the weight of the query norm for all query heads, then that of the key norm.
    if norms[0] is None or norms[1] is None:
        return None
    return torch.cat((norms[0].expand(queries, -1), norms[1].expand(keys, -1)))


def rotary_backward_to_all(
    grads: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    norms: Norms,
    eps: float,
    query_tables: Tables,
    tables: Tables,
    sums: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values. ``grads`` are the gradients of rotated queries, rotated keys and values.

    The gradients of queries and keys overwrite ``inputs``. If the three are side by side in memory and the statement is compiled,
    one call computes everything, and the gradient of values overwrites its input too. The weight gradients of both norms are
    added to ``sums``, as in :func:`rotary_backward`.
    """
    (dq, dk, dv), (query, key, _) = grads, inputs
    together = runs_compiled(dq) and query_tables[0] is tables[0] and tables[0] is not None
    whole = joined(inputs, 1) if together else None
    if together:
        values = (None, None) if whole is None else (dv, inputs[2])
        if launched(_both_back_statement, (dq, dk, query, key, *tables, *values), *norms, eps, *sums):
            return query, key, dv if whole is None else inputs[2]
    if whole is None or (norms[0] is None) is not (norms[1] is None):
        # Overwrite queries and keys, because they are not read again.
        rotary_backward(dq, query, norms[0], eps, *query_tables, query, sums[0])
        rotary_backward(dk, key, norms[1], eps, *tables, key, sums[1])
        return query, key, dv
    for grad, x, total in zip((dq, dk), (query, key), sums, strict=True):
        if total is not None:
            over_rows(_weight_statement, (grad, x, *tables), eps, total)
    over_rows(_backward_to_all_statement, (dq, dk, dv, whole, *tables), *norms, eps)
    return inputs


def rotary_backward(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    into: Tensor,
    sums: Tensor | None,
) -> None:
    """Compute the gradient of the input of :func:`apply_rotary` from the gradient ``grad`` of its output. Write it into ``into``.

    ``x`` is read only if there is a norm, and may be the same tensor as ``into``. The gradient of the norm's weight is added to
    ``sums`` [D], fp32 or longer. None = it is not needed. The other arguments are as in :func:`apply_rotary`.
    """
    if cos is None or sin is None:
        into.copy_(grad)
        return
    if sums is not None and x is not None and runs_compiled(grad):
        if launched(_backward_statement, (grad, x, cos, sin, into), weight, eps, sums):
            return
        # In compiled code the sum over rows needs a separate statement. Otherwise it could run after `grad` is overwritten.
        over_rows(_weight_statement, (grad, x, cos, sin), eps, sums)
        sums = None
    over_rows(_backward_statement, (grad, x, cos, sin, into), weight, eps, sums)


@has_kernel(kernels.rotate, "rrrw", dims=3, takes=kernels.has_one_norm)
def _forward_statement(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    weight: Tensor | None,
    eps: float,
    key_weight: Tensor | None = None,
    queries: int = 0,
) -> None:
    if weight is not None and key_weight is not None:
        weight = _weights(x.shape[1], queries, weight, key_weight)
    if weight is not None:
        x = rounded_for(weight, normalized(x, eps)[0], x.dtype).mul_(weight).to(x.dtype)
    _rotate(x, cos, sin, out, 1)


@has_kernel(kernels.rotate_both, "rrrrww", dims=3, takes=kernels.has_halves)
def _both_statement(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_out: Tensor,
    key_out: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
) -> None:
    _forward_statement(query, cos, sin, query_out, query_weight, eps)
    _forward_statement(key, cos, sin, key_out, key_weight, eps)


def _weights(heads: int, queries: int, weight: Tensor, key_weight: Tensor) -> Tensor:
    # Norm weights [heads, D]: the weight of the query norm for the first `queries` heads, of the key norm for the others.
    return torch.where(torch.arange(heads, device=weight.device)[:, None] < queries, weight, key_weight)


def _backward_to_all_statement(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    whole: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
) -> None:
    # Overwrite queries, keys and values with their gradients. `whole` [T, heads, D] contains all three.
    queries, keys, values = (grads.shape[1] for grads in (dq, dk, dv))
    # Pad and add instead of concatenating, because the compiler makes one kernel per part of a concatenation.
    grad = pad(dq, (0, 0, 0, keys + values)) + pad(dk, (0, 0, queries, values)) + pad(dv, (0, 0, queries + keys, 0))
    back = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    _rotate(grad, cos, sin, back, -1)
    if query_weight is not None and key_weight is not None:
        turned, back = back, torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        norm_gradient(turned, whole, back, _weights(whole.shape[1], queries, query_weight, key_weight), eps, None)
    rotated = torch.arange(whole.shape[1], device=dq.device)[:, None] < queries + keys
    whole.copy_(torch.where(rotated, back, grad))


@has_kernel(kernels.rotate_back_both, "rrbbrrrw", dims=3, sums=(3, 4), takes=kernels.has_halves)
def _both_back_statement(
    dq: Tensor,
    dk: Tensor,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    dv: Tensor | None,
    value: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    query_sums: Tensor | None,
    key_sums: Tensor | None,
) -> None:
    # Queries and keys are overwritten with their gradients, and values with `dv`, if there is one.
    _backward_statement(dq, query, cos, sin, query, query_weight, eps, query_sums)
    _backward_statement(dk, key, cos, sin, key, key_weight, eps, key_sums)
    if dv is not None and value is not None:
        value.copy_(dv)


@has_kernel(kernels.rotate_back, "rrrrw", dims=3, sums=(2,), takes=kernels.has_halves)
def _backward_statement(
    grad: Tensor, x: Tensor | None, cos: Tensor, sin: Tensor, into: Tensor, weight: Tensor | None, eps: float, sums: Tensor | None
) -> None:
    back = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    _rotate(grad, cos, sin, back, -1)
    if weight is None or x is None:
        into.copy_(back)
    else:
        norm_gradient(back, x, into, weight, eps, sums)


def _weight_statement(grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, eps: float, sums: Tensor) -> None:
    back = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    _rotate(grad, cos, sin, back, -1)
    norm_weight_gradient(back, x, eps, sums)


def weight_sums(weights: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    return [zeros_to_sum(norm) if norm is not None and wanted else None for norm, wanted in zip(weights, needed, strict=True)]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: int) -> None:
    # Rotate the first R entries of x [T, heads, D] by the angles of cos and sin [T, R] times `sign`, into `out`.
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        out[..., rotated:].copy_(x[..., rotated:])
        x, out = x[..., :rotated], out[..., :rotated]
    (low, high), (low_sin, high_sin), (low_out, high_out) = x.chunk(2, -1), sin[:, None].chunk(2, -1), out.chunk(2, -1)
    torch.mul(x, cos[:, None], out=out)
    # The transposed rotation (sign -1) needs the sine of the other half.
    if sign < 0:
        low_sin, high_sin = high_sin, low_sin
    low_out.addcmul_(high, low_sin, value=-sign)
    high_out.addcmul_(low, high_sin, value=sign)
