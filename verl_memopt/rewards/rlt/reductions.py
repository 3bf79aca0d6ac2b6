"""Reductions over the rows of a flat tensor: ``values [R]`` holds the tokens of all rows, row after row.

Arithmetic is fp64. A row without tokens gives 0, which its caller replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Rows = tuple[Tensor, Tensor]
"""int64 [R], the row of each token, and int64 [N], the tokens of each row."""


def reduce_rows(name: str, values: Tensor, lengths: Tensor) -> Tensor:
    """Return one number for each row, fp64 [N].

    Args:
        name: A key of ``REDUCTIONS``.
        values: [R], in any floating dtype.
        lengths: int64 [N], the tokens of each row.
    """
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return REDUCTIONS[name](values.double(), (row, lengths))


def _sum(values: Tensor, rows: Rows) -> Tensor:
    row, lengths = rows
    return values.new_zeros(len(lengths)).index_add(0, row, values)


def _mean(values: Tensor, rows: Rows) -> Tensor:
    return _sum(values, rows) / rows[1].clamp(min=1)


def _extreme(kind: str, values: Tensor, rows: Rows) -> Tensor:
    row, lengths = rows
    return values.new_zeros(len(lengths)).scatter_reduce(0, row, values, kind, include_self=False)


def _quantile(share: float, values: Tensor, rows: Rows) -> Tensor:
    """Return a quantile with linear interpolation between neighbours, as ``torch.quantile`` gives it."""
    _, lengths = rows
    place = share * (lengths - 1).clamp(min=0).double()
    below = place.floor().long()
    low, high = _ordered(values, rows, below), _ordered(values, rows, (below + 1).minimum((lengths - 1).clamp(min=0)))
    return torch.lerp(low, high, place - below)


def _median(values: Tensor, rows: Rows) -> Tensor:
    """Return the lower median, as ``torch.median`` gives it: the smaller one of two middle values."""
    return _ordered(values, rows, (rows[1] - 1).clamp(min=0) // 2)


def _ordered(values: Tensor, rows: Rows, place: Tensor) -> Tensor:
    """Return the value at a place of each row in ascending order, fp64 [N]; 0 for an empty row."""
    row, lengths = rows
    by_value = values.argsort(stable=True)
    ascending = values[by_value[row[by_value].argsort(stable=True)]]
    index = (lengths.cumsum(0) - lengths + place).clamp(max=max(len(values) - 1, 0))
    picked = ascending[index] if len(values) else values.new_zeros(len(lengths))
    return torch.where(lengths > 0, picked, 0.0)


REDUCTIONS: dict[str, Callable[[Tensor, Rows], Tensor]] = {
    "mean": _mean,
    "sum": _sum,
    "min": partial(_extreme, "amin"),
    "max": partial(_extreme, "amax"),
    "median": _median,
    "first_quartile": partial(_quantile, 0.25),
    "last_quartile": partial(_quantile, 0.75),
}
"""Reductions by their name in the settings."""
