"""Compares the weights of an engine with those of the policy, slice by slice and bit by bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from verl_memopt.rollout.engine import WeightComparison

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the dtype that shows its bits. As floats, NaN would differ from itself and 0 equal -0."""


class BitComparison:
    """Collects the results of slices. A weight is equal where all its slices are."""

    def __init__(self) -> None:
        """Start without any weight."""
        self._is_equal: dict[str, bool] = {}

    def add(self, name: str, own: Tensor, other: Tensor) -> None:
        """Compare a slice.

        Args:
            name: The weight it belongs to.
            own: The slice as the engine stores it.
            other: The slice as it should be, in any dtype.
        """
        is_equal = torch.equal(_bits(own), _bits(other.to(own.dtype)))
        self._is_equal[name] = is_equal and self._is_equal.get(name, True)

    def result(self, unknown: Iterable[str]) -> WeightComparison:
        """Return what was found.

        Args:
            unknown: Names that could not be compared.
        """
        different = [name for name, is_equal in self._is_equal.items() if not is_equal]
        return WeightComparison([name for name, is_equal in self._is_equal.items() if is_equal], different, sorted(set(unknown)))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().contiguous()
    return plain.view(INTEGERS[plain.itemsize])
