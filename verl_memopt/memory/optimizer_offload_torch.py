"""The layout of optimizer state in flat ranges, which are cut into buckets, and how buckets pass over the device.

Parameters that are updated alike form one flat range, one after another. Offloaded state rests in one host buffer, and passes
over the device bucket by bucket inside ``step()``.

Bytes saved: outside the step the whole state, b_o x N / W bytes, where b_o is 8 for fp32 moments, N counts the parameters and W
the ranks in the shard group. Inside the step all but three buckets: one is arriving, one is being updated, one is leaving. The
state is allocated on the host, so the first step needs no more device memory than later steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from verl_memopt.distributed.device import Done, copy_stream, current_stream, mark_done, on_stream, wait_for
from verl_memopt.memory.bucketed_adamw import SLOTS
from verl_memopt.memory.optimizer_state_dtype_torch import (
    MOMENTS,
    REMAINDER,
    MomentFormat,
    Plane,
    moment_format,
)
from verl_memopt.observe.byte_tracker import scope

GRADIENT = "gradient"
"""Name of the plane of gradients that rest on the host, beside the planes of the state."""
LEAST_CUT = 64
"""Tensors are cut at multiples of this many elements, so that a kernel has a partial vector only at the end of a tensor."""
ALIGNMENT = 64
"""Each part of the state buffer starts at a multiple of this many bytes."""


@dataclass(frozen=True)
class SectionMember:
    parameter: nn.Parameter
    start: int  # in elements of the section
    numel: int  # local elements


@dataclass(frozen=True)
class Slice:
    member: SectionMember
    first: int  # in elements of the member's local shard
    last: int  # end, exclusive


@dataclass(eq=False)
class Section:
    """Parameters of one group that share a dtype and a format of moments: one flat range of elements.

    ``members`` are the parameters in order. ``planes`` are the flat tensors of their state, by name.
    """

    group: dict[str, Any]
    format: MomentFormat
    dtype: torch.dtype
    splits: bool = False
    """The parameters are the high half of fp32 master weights."""
    members: list[SectionMember] = field(default_factory=list)
    planes: dict[str, Tensor] = field(default_factory=dict)
    gradients: Tensor | None = None
    """The gradients of the members, one after another, on the host. None = the gradients are in ``.grad`` of the parameters."""

    @property
    def numel(self) -> int:
        return self.members[-1].start + self.members[-1].numel if self.members else 0

    @property
    def resting(self) -> tuple[Plane, ...]:
        return (*self.format.planes, REMAINDER) if self.splits else self.format.planes

    @property
    def cut(self) -> int:
        # A multiple of the quantisation block and of LEAST_CUT.
        return -(-LEAST_CUT // self.format.block) * self.format.block


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def cut_buckets(members: Sequence[SectionMember], elements: int, cut: int) -> list[list[Slice]]:
    """Cut members into consecutive buckets of at most ``elements`` elements, at multiples of ``cut`` elements of a member.

    Each bucket is one unbroken range of the section, with as many members as fit.
    """
    buckets: list[list[Slice]] = []
    room, following = 0, -1
    for member in members:
        first = 0
        while first < member.numel:
            left = member.numel - first
            size = left if left <= room else room - room % cut
            # A bucket is one unbroken range, so a gap (a skipped member) ends it.
            if size == 0 or member.start + first != following:
                buckets.append([])
                room = elements
                size = left if left <= room else room - room % cut
            buckets[-1].append(Slice(member, first, first + size))
            first, room, following = first + size, room - size, member.start + first + size
    return buckets


def sections(
    groups: Sequence[dict[str, Any]],
    state_dtype: str,
    split: bool = False,
    moments_of: Callable[[dict[str, Any]], tuple[str, ...]] = lambda _: MOMENTS,
) -> list[Section]:
    """Group an optimizer's parameters into sections, in the order of their first parameters.

    ``split``: bfloat16 parameters are the high half of fp32 master weights. ``moments_of`` returns the names of a group's
    moments.
    """
    by_key: dict[tuple[int, torch.dtype, int], Section] = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            # Shards hold whole rows, so no quantisation block crosses ranks.
            assert all(isinstance(placement, Replicate) or placement == Shard(0) for placement in placements), placements
            rows = parameter.shape[0] if parameter.ndim else 1
            kind = moment_format(state_dtype, parameter.numel() // max(rows, 1), moments_of(group))
            # One kernel call updates a whole bucket, so all members of a section must agree in these three.
            key = (number, parameter.dtype, kind.block)
            section = by_key.setdefault(key, Section(group, kind, parameter.dtype, split and parameter.dtype == torch.bfloat16))
            section.members.append(SectionMember(parameter, section.numel, local(parameter).numel()))
    return list(by_key.values())


def shard_place(parameter: Tensor) -> tuple[int, ...]:
    if not isinstance(parameter, DTensor):
        return (0,)
    # Replicas of a shard have the same place.
    place: Sequence[int] = parameter.device_mesh.get_coordinate() or []
    return tuple(at for at, placement in zip(place, parameter.placements, strict=True) if isinstance(placement, Shard))


def shown(member: SectionMember, plane: Plane, flat: Tensor) -> Tensor:
    """View a member's part of a plane in the parameter's shape. Rows are shorter if one entry belongs to several elements."""
    parameter = member.parameter
    part = flat[member.start // plane.per_entry : (member.start + member.numel) // plane.per_entry]
    shape = _stored_shape(parameter.shape, plane.per_entry)
    values = part.view(_stored_shape(local(parameter).shape, plane.per_entry))
    return sharded_as(parameter, values, shape)


def sharded_as(parameter: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Wrap this rank's values as its part of a tensor of ``shape``, sharded like ``parameter``. No effect if that is plain."""
    if not isinstance(parameter, DTensor):
        return values
    # Only the strides are needed, and a meta tensor takes no memory.
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=TensorMeta(shape, stride, values.dtype))
    # Not from_local, which would copy host tensors to the mesh's device.
    return DTensor(values, spec, requires_grad=False)


def _stored_shape(shape: torch.Size, per_entry: int) -> torch.Size:
    return shape if per_entry == 1 else torch.Size((shape[0], shape[1:].numel() // per_entry))


def entries(section: Section, bucket: Sequence[Slice]) -> dict[str, slice]:
    start = bucket[0].member.start + bucket[0].first
    stop = start + count(bucket)
    ranges = {plane.name: slice(start // plane.per_entry, stop // plane.per_entry) for plane in section.resting}
    return ranges if section.gradients is None else ranges | {GRADIENT: slice(start, stop)}


def count(bucket: Sequence[Slice]) -> int:
    return sum(part.last - part.first for part in bucket)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


Ranges = Mapping[str, slice]


class StateLanes:
    """Moves buckets of host tensors to the device and back, on two side streams on a GPU."""

    def __init__(self, device: torch.device, kind: str | None = None) -> None:
        self._device, self._arriving, self._leaving = device, copy_stream(device), copy_stream(device)
        # Kind under which the byte tracker counts the buckets on the device. None = the kind of the surrounding scope.
        self._kind = kind

    def passing(
        self, resting: Mapping[str, Tensor], buckets: Sequence[Ranges], one_way: Collection[str] = (), from_zero: bool = False
    ) -> Iterator[dict[str, Tensor]]:
        """Yield each bucket of the flat host tensors on the device, and write its values back afterwards.

        The next bucket arrives and the previous one leaves while the caller computes. After the last bucket the current stream
        waits for every write.

        Args:
            resting: Flat tensors on the host, by name.
            buckets: For each bucket, the range of each tensor.
            one_way: Names of tensors that are read but not written back.
            from_zero: Read nothing: each bucket starts as zeros.
        """
        compute_stream = current_stream(self._device)
        # The slots are allocated once and reused. Each has the size of the largest bucket.
        slots = [self._slot(resting, buckets) for _ in range(min(SLOTS, len(buckets)))]
        # A new slot may be written to once the work queued so far is done, because that work may still use its memory.
        left = [mark_done(compute_stream)] * len(slots)
        arrived = self._fetch(resting, buckets[0], slots[0], left[0]) if buckets and not from_zero else None
        try:
            for number, ranges in enumerate(buckets):
                # A slot is filled again only after its last bucket has been copied out. ``left`` marks that moment for each slot.
                place, following = number % SLOTS, (number + 1) % SLOTS
                wait_for(compute_stream, left[place] if from_zero else arrived)
                if number + 1 < len(buckets) and not from_zero:
                    # The next bucket arrives while the caller computes on this one.
                    arrived = self._fetch(resting, buckets[number + 1], slots[following], left[following])
                views = _filled(slots[place], ranges)
                if from_zero:
                    for view in views.values():
                        view.zero_()
                yield views
                # Marked after the yield, so that the event covers the work that the caller has queued on the bucket.
                wait_for(self._leaving, mark_done(compute_stream))
                with on_stream(self._leaving):
                    for name, view in views.items():
                        if name not in one_way:
                            resting[name][ranges[name]].copy_(view, non_blocking=True)
                left[place] = mark_done(self._leaving)
        finally:
            # Also after an error in the caller: the memory of the slots must not be reused while a copy runs.
            for event in (*left, arrived):
                wait_for(compute_stream, event)

    def _slot(self, resting: Mapping[str, Tensor], buckets: Sequence[Ranges]) -> dict[str, Tensor]:
        longest = {name: max(_length(ranges[name]) for ranges in buckets) for name in resting}
        with scope(kind=self._kind):
            return {name: torch.empty(longest[name], dtype=plane.dtype, device=self._device) for name, plane in resting.items()}

    def _fetch(self, resting: Mapping[str, Tensor], ranges: Ranges, slot: Mapping[str, Tensor], free: Done) -> Done:
        # The last bucket must have been copied out of the slot before the next one overwrites it.
        wait_for(self._arriving, free)
        with on_stream(self._arriving):
            for name, view in _filled(slot, ranges).items():
                view.copy_(resting[name][ranges[name]], non_blocking=True)
        return mark_done(self._arriving)


def _filled(slot: Mapping[str, Tensor], ranges: Ranges) -> dict[str, Tensor]:
    return {name: tensor[: _length(ranges[name])] for name, tensor in slot.items()}


def _length(part: slice) -> int:
    return int(part.stop - part.start)
