"""Ragged rows for tests: random sizes, groups and tokens, and the padded form that naive definitions read."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tests.tensors import row_of_each_token


@dataclass(frozen=True)
class Ragged:
    """Rows of the given lengths, flat, with a generator for what they hold."""

    sizes: tuple[int, ...]
    seed: int

    @property
    def lengths(self):
        return torch.tensor(self.sizes, dtype=torch.int64)

    @property
    def row(self):
        return row_of_each_token(self.lengths, sum(self.sizes))

    def tokens(self, salt, scale=1.0):
        """Return fp64 numbers, one a token."""
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        return scale * torch.randn(sum(self.sizes), generator=generator, dtype=torch.float64)

    def rows(self, salt, values=(-1.0, 0.0, 0.25, 1.0)):
        """Return one of some values for each row, fp64, so that many are equal."""
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (len(self.sizes),), generator=generator)]

    def groups(self, salt, most=4):
        """Return a group for each row, some of one row."""
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        return torch.randint(most, (len(self.sizes),), generator=generator) * 7 - 3

    def lists(self, flat):
        """Return a list of numbers for each row."""
        return [part.tolist() for part in flat.split(list(self.sizes))]


def ragged(shortest=0, longest=9):
    """Return one to ten rows, some of them empty."""
    return st.builds(Ragged, st.lists(st.integers(shortest, longest), min_size=1, max_size=10).map(tuple), st.integers(0, 2**20))
