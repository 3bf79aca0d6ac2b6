"""Rows of which several are the same: each different row is stored once, with an index from row to stored row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorClass
from torch import Tensor

from verl_memopt.data.ragged import Ragged, token_index


class SharedRows(TensorClass):
    """Rows that share their storage. It answers as :class:`Ragged` does, and ``flat`` is computed when it is read.

    ``stored`` holds the different rows. ``index`` is int64 [rows]: the stored row of each row. Where each of b rows of P tokens
    appears k times, this holds b * ((k - 1) * P * 8 - 8) bytes fewer than :class:`Ragged`: k - 1 copies of the ids are not there,
    and b lengths come beside an index that replaces b * k lengths.
    """

    stored: Ragged
    index: Tensor

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.index.shape[0])

    @property
    def lengths(self) -> Tensor:
        """Return the length of each row, int64 [rows]."""
        return self.stored.lengths[self.index]

    @property
    def flat(self) -> Tensor:
        """Return the rows one after another, as a new tensor. Read it of a micro-batch, not of a whole batch."""
        return self.stored.flat[token_index(self.stored.sizes(), self.index.tolist())]

    def sizes(self) -> list[int]:
        """Return the row lengths as Python integers."""
        return self.lengths.tolist()

    def select(self, indices: Sequence[int]) -> SharedRows:  # type: ignore[override]
        """Return the chosen rows in the given order. Stored rows that none of them reads are left out."""
        # The index is renumbered, because the rows that stay move together.
        kept, index = torch.unique(self.index[torch.as_tensor(indices, dtype=torch.int64)], return_inverse=True)
        return SharedRows(stored=self.stored.select(kept.tolist()), index=index, batch_size=[])


def prompt_rows(rows: Sequence[list[int]]) -> Ragged | SharedRows:
    """Return prompt ids as tensors. Rows that are one and the same list object are stored once.

    Args:
        rows: Token ids of each row. The expansion ``lazy`` gives all rows of a prompt one list, the others give each row its own.

    Returns:
        Rows with an index where a list appears more than once, else plain rows.
    """
    places: dict[int, int] = {}  # identity of a list -> its place among the stored ones
    stored: list[list[int]] = []
    for row in rows:
        if id(row) not in places:
            places[id(row)] = len(stored)
            stored.append(row)
    different = Ragged.from_rows(stored, torch.int64)
    if len(stored) == len(rows):
        return different
    index = torch.tensor([places[id(row)] for row in rows], dtype=torch.int64)
    return SharedRows(stored=different, index=index, batch_size=[])
