"""Some rows of a tensor that is also used whole, with one gradient of the whole instead of two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def select_rows(x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x [T, n] and its rows at ``rows``, [R, n].

    The gradient of the rows is added in place to the gradient of the whole. So the first result may be used by one function only,
    and this function must return a gradient that nothing else uses.

    Args:
        x: [T, n].
        rows: int64 [R], none twice; None returns x twice.
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
