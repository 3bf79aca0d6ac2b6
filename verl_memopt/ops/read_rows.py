"""Some rows of a tensor that is also read whole, with one gradient of the whole and no second one of zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def read_rows(x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gives x [T, n] and its rows [R, n] at ``rows`` (int64 [R], none twice); x twice where None.

    The gradient of the rows is added to that of the whole in place, so what is given as the whole must be read by one function
    whose gradient of it is a tensor of its own.
    """
    return (x, x) if rows is None else _ReadRows.apply(x, rows)


class _ReadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        return x.view_as(x), x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_whole: Tensor, of_rows: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return of_whole.index_add_(0, rows, of_rows), None
