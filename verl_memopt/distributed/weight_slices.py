"""A stream of weights between models: whole tensors, or ranges of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightSlice:
    """Rows of the tensor ``name``, from ``start`` on. ``shape`` is that of the whole tensor."""

    name: str
    shape: torch.Size
    start: int
    tensor: Tensor

    @property
    def stop(self) -> int:
        """The row after the last."""
        return self.start + num_rows(self.tensor.shape)

    @property
    def whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.tensor.shape == self.shape


Weights = Iterable[tuple[str, Tensor] | WeightSlice]
"""A stream of whole tensors, or of slices that together make them up, in any order of rows."""


def num_rows(shape: torch.Size) -> int:
    """Return the length of the first dimension; 1 for a scalar."""
    return shape[0] if len(shape) else 1


def as_slice(item: tuple[str, Tensor] | WeightSlice) -> WeightSlice:
    """Return an item of a stream as a slice."""
    return item if isinstance(item, WeightSlice) else WeightSlice(item[0], item[1].shape, 0, item[1])


def joined(slices: Weights, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor of ``dtype``), holding one tensor at a time beyond what the stream holds."""
    pending: dict[str, tuple[Tensor, int]] = {}
    for item in slices:
        part = as_slice(item)
        if part.whole:
            yield part.name, part.tensor.to(dtype)
            continue
        if part.name not in pending:
            pending[part.name] = torch.empty(part.shape, dtype=dtype, device=part.tensor.device), part.shape[0]
        whole, missing = pending.pop(part.name)
        whole[part.start : part.stop].copy_(part.tensor)
        if part.stop - part.start < missing:
            pending[part.name] = whole, missing - (part.stop - part.start)
        else:
            yield part.name, whole
        # Otherwise this name would keep the tensor alive while the next one is allocated.
        del whole
    assert not pending, f"rows never came of {', '.join(pending)}"
