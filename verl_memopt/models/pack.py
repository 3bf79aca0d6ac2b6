"""One micro-batch as the model sees it: sequences one after another in one row, and what is asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    rows = list(zip(prompts.split(list(prompt_sizes)), responses.split(list(response_sizes)), strict=True))
    present = [(p, r) for (p, r), size in zip(rows, response_sizes, strict=True) if size]
    pieces = [piece for p, r in present for piece in (p, r[:-1])] or [torch.zeros(1, dtype=torch.int64)]
    sizes = [(p, r) for p, r in zip(prompt_sizes, response_sizes, strict=True) if r]
    lengths = tuple(p + r - 1 for p, r in sizes) or (1,)
    starts = [0, *accumulate(lengths)]
    predicts = [torch.arange(start + p - 1, start + p - 1 + r) for start, (p, r) in zip(starts, sizes, strict=False)]
    row = [index for index, size in enumerate(response_sizes) for _ in range(size)]
    return Pack(
        input_ids=torch.cat(pieces)[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        lengths=lengths,
        starts=torch.tensor(starts, dtype=torch.int32),
        predicts=torch.cat(predicts) if predicts else torch.empty(0, dtype=torch.int64),
        targets=responses,
        row=torch.tensor(row, dtype=torch.int64),
        row_lengths=torch.tensor(list(response_sizes), dtype=torch.int64),
    )
