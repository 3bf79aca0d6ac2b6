"""Where each row of each Hugging Face tensor lies in an engine's own parameters, learnt from the engine's own loader.

The loader is run once on tensors without memory. It narrows them to what this rank holds and copies that into fused and
padded parameters; each copy is noted instead of made. From then on any range of rows goes straight to its place: no whole
tensor is needed, whatever is fused or split over tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verl_memopt.memory.rollout.weight_buckets import WeightSlice, joined

Loader = Callable[[Iterator[tuple[str, Tensor]]], Any]
"""Takes (name, whole tensor) pairs and copies them into the engine's parameters."""


@dataclass(frozen=True)
class _Place:
    """A box of a tensor and the part of a parameter that holds it. starts: the box's first index in each dimension."""

    target: Tensor
    starts: tuple[int, ...]

    def write(self, part: WeightSlice) -> None:
        """Copies the rows of the box that the slice has."""
        if not self.starts:
            self.target.copy_(part.tensor)
            return
        first = self.starts[0]
        low, high = max(first, part.start), min(first + self.target.shape[0], part.stop)
        if low < high:
            source = part.tensor[low - part.start : high - part.start]
            for dim in range(1, len(self.starts)):
                source = source.narrow(dim, self.starts[dim], self.target.shape[dim])
            self.target[low - first : high - first].copy_(source)


class WeightMap:
    """Made by :meth:`of`. It holds views of the engine's parameters, which must stay where they are."""

    def __init__(self, places: dict[str, list[_Place]], load: Loader, dtype: torch.dtype) -> None:
        self._places = places
        self._load = load
        self._dtype = dtype

    @classmethod
    def of(cls, shapes: Mapping[str, torch.Size], load: Loader, dtype: torch.dtype) -> WeightMap:
        """Learns the places of tensors of these shapes. What is not plainly copied is left to the loader, as whole tensors.

        dtype: of the tensors the loader is given.
        """
        probes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        places = {name: found for name, probe in probes.items() if (found := _places_of(name, probe, load)) is not None}
        return cls(places, load, dtype)

    @torch.no_grad()
    def write(self, weights: Iterator[WeightSlice]) -> None:
        """Copies slices to their places, cast as they are copied."""
        for name, tensor in joined(self._straight(weights), self._dtype):
            self._load(iter([(name, tensor)]))

    def _straight(self, weights: Iterator[WeightSlice]) -> Iterator[WeightSlice]:
        """Writes what has a place, and gives the rest."""
        for part in weights:
            if part.name not in self._places:
                yield part
                continue
            for place in self._places[part.name]:
                place.write(part)


def _places_of(name: str, probe: Tensor, load: Loader) -> list[_Place] | None:
    with torch.no_grad(), _Copies(probe) as copies:
        load(iter([(name, probe)]))
    return copies.places


class _Copies(TorchDispatchMode):
    """Notes the copies that are made of boxes of ``probe``; ``places`` is None once something else was made of it."""

    def __init__(self, probe: Tensor) -> None:
        super().__init__()
        self.places: list[_Place] | None = []
        self._probe = probe
        self._storage = probe.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not torch.ops.aten.copy_.default or args[1].device.type != "meta":
            return func(*args, **(kwargs or {}))
        target, source = args[0], args[1]
        if self.places is not None:
            starts = self._starts(source)
            same = starts is not None and source.shape == target.shape
            self.places = [*self.places, _Place(target.detach(), starts or ())] if same else None
        return target

    def _starts(self, source: Tensor) -> tuple[int, ...] | None:
        """Gives the first index of a box of the probe in each dimension; None for anything but such a box."""
        if source.untyped_storage()._cdata != self._storage or source.ndim != self._probe.ndim:
            return None
        pairs = zip(source.stride(), self._probe.stride(), source.shape, strict=True)
        if any(own != whole and size != 1 for own, whole, size in pairs):
            return None
        starts, offset = [], source.storage_offset()
        for stride in self._probe.stride():
            starts.append(offset // max(stride, 1))
            offset %= max(stride, 1)
        return tuple(starts)
