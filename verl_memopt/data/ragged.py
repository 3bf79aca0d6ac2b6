"""Rows of unequal length in one flat tensor. Nothing is padded, neither on the driver nor in transfers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from tensordict import TensorClass
from torch import Tensor

from verl_memopt.models.pack import ranges


class Ragged(TensorClass):
    """Rows of unequal length.

    ``flat`` is [total, ...]: the rows one after another. ``lengths`` is int64 [rows].
    """

    flat: Tensor
    lengths: Tensor

    @staticmethod
    def from_rows(rows: Sequence[Sequence[int] | Sequence[float] | Tensor], dtype: torch.dtype) -> Ragged:
        """Return the ragged tensor of ``rows``. An empty list has no rows; an empty row has length 0."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        if rows and isinstance(rows[0], Tensor):
            return Ragged(flat=torch.cat([torch.as_tensor(row, dtype=dtype) for row in rows]), lengths=lengths, batch_size=[])
        return Ragged(flat=torch.tensor(list(chain.from_iterable(rows)), dtype=dtype), lengths=lengths, batch_size=[])

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.lengths.shape[0])

    def sizes(self) -> list[int]:
        """Return the row lengths as Python integers."""
        return self.lengths.tolist()

    def rows(self) -> tuple[Tensor, ...]:
        """Return each row as a view of ``flat``."""
        return self.flat.split(self.sizes())

    def select(self, indices: Sequence[int]) -> Ragged:  # type: ignore[override]
        """Return the chosen rows in the given order."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return Ragged(flat=self.flat[token_index(self.sizes(), indices)], lengths=self.lengths[index], batch_size=[])

    @staticmethod
    def join(parts: Sequence[Ragged]) -> Ragged:
        """Return the rows of all parts, one part after another."""
        flat = torch.cat([part.flat for part in parts])
        return Ragged(flat=flat, lengths=torch.cat([part.lengths for part in parts]), batch_size=[])


def token_index(lengths: Sequence[int], rows: Sequence[int]) -> Tensor:
    """Return int64 [sum of the chosen lengths]: the positions of the tokens of ``rows`` in the flat tensor of all rows."""
    sizes = np.asarray(lengths, dtype=np.int64)
    chosen = np.asarray(rows, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    return torch.from_numpy(ranges(starts[chosen], sizes[chosen]))
