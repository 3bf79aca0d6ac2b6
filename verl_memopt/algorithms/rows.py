"""Places and scans inside flat rows: ``values [R]`` holds the tokens of all rows, row after row.

``row [R]`` int64 is the row of each token and does not decrease. ``lengths [rows]`` int64 is the number of tokens of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def positions(row: Tensor, lengths: Tensor) -> Tensor:
    """Return the place of each token in its row, int64 [R], from 0.

    Args:
        row: int64 [R].
        lengths: int64 [rows].
    """
    starts = lengths.cumsum(0) - lengths
    return torch.arange(row.shape[0], device=row.device) - starts[row]


def is_last(row: Tensor, lengths: Tensor) -> Tensor:
    """Return True for the last token of each row, bool [R].

    Args:
        row: int64 [R].
        lengths: int64 [rows].
    """
    return positions(row, lengths) == lengths[row] - 1


def reverse_scan(values: Tensor, row: Tensor, decay: float) -> Tensor:
    """Return ``s[t] = values[t] + decay * s[t + 1]`` inside each row, fp64 [R]. After its last token a row has 0.

    The scan doubles its reach: after step k, ``s[t]`` holds the terms of the next 2^k tokens. It takes log2(R) steps of whole
    tensors, no loop over tokens and no padding.

    Args:
        values: fp32 or fp64 [R].
        row: int64 [R].
        decay: Factor of one step, from 0 to 1.
    """
    sums, size, reach = values.double(), values.shape[0], 1
    while reach < size and decay**reach != 0:
        same_row = row[reach:] == row[:-reach]
        later = torch.where(same_row, sums[reach:], 0.0)
        sums = torch.cat([sums[:-reach] + decay**reach * later, sums[-reach:]])
        reach *= 2
    return sums


def dense_ids(keys: Tensor) -> Tensor:
    """Return ids 0, 1, ... that are equal where the keys are equal, int64 [N].

    No shape depends on the keys, so that it runs without a look at the data.

    Args:
        keys: int64 [N], in any order.
    """
    ordered, order = torch.sort(keys, stable=True)
    is_new = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.empty_like(keys).scatter(0, order, is_new.cumsum(0))
