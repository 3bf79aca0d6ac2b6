"""One micro-batch as the model sees it: sequences one after another in one row, and what is asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Pack:
    """The packed tokens of some rows.

    input_ids, position_ids: int64 [1, T]. lengths: tokens of each sequence, a host tuple. starts: int32 [sequences + 1].
    predicts: int64 [R], where in T the hidden state lies that predicts each response token. targets: int64 [R].
    row: int64 [R], the row of each response token; row_lengths: int64 [rows], response tokens of each row.
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    starts: Tensor
    predicts: Tensor
    targets: Tensor
    row: Tensor
    row_lengths: Tensor

    @property
    def num_rows(self) -> int:
        return int(self.row_lengths.shape[0])

    def to(self, device: torch.device) -> Pack:
        """Gives the pack on a device; the copies do not wait."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in TENSORS}
        return Pack(lengths=self.lengths, **moved)


TENSORS = ("input_ids", "position_ids", "starts", "predicts", "targets", "row", "row_lengths")


def pack_rows(prompts: Tensor, prompt_sizes: Sequence[int], responses: Tensor, response_sizes: Sequence[int]) -> Pack:
    """Gives the pack of rows whose tokens lie one row after another in ``prompts`` and ``responses``.

    prompts, responses: int64, flat. A response's last token predicts nothing and is left out; a row with an empty response
    is left out whole. With nothing to compute, one token stands in, so that ranks in step run the same collectives.
    No shape depends on the tokens' values, so fake tensors pass through.
    """
    p, r = np.asarray(prompt_sizes, dtype=np.int64), np.asarray(response_sizes, dtype=np.int64)
    present = r > 0
    lengths = (p + r - 1)[present]
    first = np.cumsum(lengths) - lengths
    # A row's tokens: its prompt from the one tensor, then its response but for the last from the other, which lies behind.
    prompt_start, response_start = np.cumsum(p) - p, len(prompts) + np.cumsum(r) - r
    pieces = np.stack([prompt_start[present], response_start[present]], axis=1).reshape(-1)
    sizes = np.stack([p[present], r[present] - 1], axis=1).reshape(-1)
    if not len(lengths):
        return _nothing(responses, len(r))
    return Pack(
        input_ids=torch.cat([prompts, responses])[_host(ranges(pieces, sizes))][None],
        position_ids=_host(ranges(np.zeros_like(lengths), lengths))[None],
        lengths=tuple(lengths.tolist()),
        starts=_host(np.append(first, lengths.sum()), torch.int32),
        predicts=_host(ranges(first + p[present] - 1, r[present])),
        targets=responses,
        row=_host(np.repeat(np.arange(len(r)), r)),
        row_lengths=_host(r),
    )


def _nothing(responses: Tensor, num_rows: int) -> Pack:
    none = _host(np.zeros(0, dtype=np.int64))
    token = _host(np.zeros((1, 1), dtype=np.int64))
    starts, row_lengths = _host(np.array([0, 1]), torch.int32), _host(np.zeros(num_rows, dtype=np.int64))
    return Pack(token, token, (1,), starts, none, responses, none, row_lengths)


def _host(values: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Gives int64 [sum of sizes]: for each pair the integers from its start on, as many as its size, one pair after another."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(sizes.sum())
