"""Where each row of each Hugging Face tensor is stored in an engine's own parameters, learnt from the engine's own loader.

The loader runs once on tensors without memory. It narrows them to the part of this rank and copies that into fused and padded
parameters. Each copy is recorded and not made. From then on any range of rows can be copied to its place: no whole tensor is
needed, even if tensors are fused, or split over tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verl_memopt.memory.weight_buckets_torch import WeightSlice, joined
from verl_memopt.rollout.engine import WeightComparison
from verl_memopt.rollout.weight_checks import BitComparison

Loader = Callable[[Iterator[tuple[str, Tensor]]], Any]
"""Copies (name, whole tensor) pairs into the engine's parameters."""


@dataclass(frozen=True)
class _Place:
    """A box of a tensor, and the part of a parameter that stores it. ``starts``: first index of the box in each dimension."""

    target: Tensor
    starts: tuple[int, ...]

    def pairs(self, part: WeightSlice) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield where rows of the slice are stored, with those rows; nothing where the box has none of them."""
        if not self.starts:
            yield self.target, part.tensor
            return
        first = self.starts[0]
        low, high = max(first, part.start), min(first + self.target.shape[0], part.stop)
        if low < high:
            source = part.tensor[low - part.start : high - part.start]
            for dim in range(1, len(self.starts)):
                source = source.narrow(dim, self.starts[dim], self.target.shape[dim])
            yield self.target[low - first : high - first], source


class WeightMap:
    """The place of every weight. Create it with :meth:`of`.

    It holds views of the engine's parameters, which must keep their memory. The loader gets names without places, in ``dtype``.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], places: dict[str, list[_Place]], load: Loader, dtype: torch.dtype
    ) -> None:
        """Store the places."""
        self._shapes = shapes
        self._places = places
        self._load = load
        self._dtype = dtype

    @classmethod
    def of(cls, shapes: Mapping[str, torch.Size], load: Loader, dtype: torch.dtype) -> WeightMap:
        """Learn the places of tensors with these shapes.

        A tensor that the loader does not simply copy has no place. It is passed to the loader as a whole tensor.
        """
        probes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        places = {}
        for name, probe in probes.items():
            with torch.no_grad(), _Copies(probe) as copies:
                load(iter([(name, probe)]))
            if copies.places is not None:
                places[name] = copies.places
        return cls(shapes, places, load, dtype)

    @torch.no_grad()
    def write(self, weights: Iterator[WeightSlice]) -> None:
        """Copy slices to their places, and cast them on the way."""
        for name, tensor in joined(self._straight(weights), self._dtype):
            self._load(iter([(name, tensor)]))

    def views(self) -> dict[str, Tensor]:
        """Return the tensors that lie in one piece in the engine's parameters, as views of them in their own shape."""
        return {
            name: target
            for name, places in self._places.items()
            for target in (place.target for place in places)
            if len(places) == 1 and target.shape == self._shapes[name] and target.dtype == self._dtype
        }

    @torch.no_grad()
    def compare(self, weights: Iterator[WeightSlice]) -> WeightComparison:
        """Compare slices with what is stored at their places. Names without a place are unknown."""
        bits, unknown = BitComparison(), set()
        for part in weights:
            if part.name not in self._places:
                unknown.add(part.name)
            for place in self._places.get(part.name, ()):
                for stored, source in place.pairs(part):
                    bits.add(part.name, stored, source)
        return bits.result(unknown)

    def _straight(self, weights: Iterator[WeightSlice]) -> Iterator[WeightSlice]:
        """Write the slices that have a place, and yield the others."""
        for part in weights:
            if part.name not in self._places:
                yield part
                continue
            for place in self._places[part.name]:
                for stored, source in place.pairs(part):
                    stored.copy_(source)


class _Copies(TorchDispatchMode):
    """Records the copies of boxes of ``probe``. ``places`` is None once it was used in any other way."""

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
        """Return the first index in each dimension if ``source`` is a box of the probe, else None."""
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
