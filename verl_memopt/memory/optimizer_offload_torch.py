"""Optimizer state rests in one host buffer and passes over the device bucket by bucket inside ``step()``.

Bytes saved: outside the step all of the state, b_o x N / W bytes, where b_o is 8 for fp32 moments, N counts the parameters and W
the ranks in the shard group. Inside the step all but three buckets: one arrives, one is updated, one leaves. The state is
allocated on the host, so the first step costs no more than the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from verl_memopt.distributed.device import Done, copy_stream, current_stream, mark_done, on_stream, wait_for

SLOTS = 3
"""Buckets on the device at once. With two, an arriving bucket would wait for the leaving one."""

Ranges = Mapping[str, slice]


class StateLanes:
    """Moves buckets of host tensors to the device and back, on two side streams on a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Create the side streams of a device."""
        self._device = device
        self._arriving = copy_stream(device)
        self._leaving = copy_stream(device)

    def passing(
        self, resting: Mapping[str, Tensor], buckets: Sequence[Ranges], one_way: Collection[str] = ()
    ) -> Iterator[dict[str, Tensor]]:
        """Yield each bucket of ``resting`` as tensors on the device, and write their values back afterwards.

        The next bucket arrives and the previous one leaves while the caller computes. After the last bucket the current stream
        waits for every write.

        Args:
            resting: Flat host tensors by name.
            buckets: The range of each tensor, for each bucket.
            one_way: Names of tensors that are read alone. What the caller writes into their buckets is lost.
        """
        here = current_stream(self._device)
        slots = [self._slot(resting, buckets) for _ in range(min(SLOTS, len(buckets)))]
        left = [mark_done(here)] * len(slots)
        arrived = self._fetch(resting, buckets[0], slots[0], left[0]) if buckets else None
        for number, ranges in enumerate(buckets):
            place, following = number % SLOTS, (number + 1) % SLOTS
            wait_for(here, arrived)
            if number + 1 < len(buckets):
                arrived = self._fetch(resting, buckets[number + 1], slots[following], left[following])
            views = _filled(slots[place], ranges)
            yield views
            # Marked after the yield, so that the event covers the work that the caller has queued on the bucket.
            wait_for(self._leaving, mark_done(here))
            with on_stream(self._leaving):
                for name, view in views.items():
                    if name not in one_way:
                        resting[name][ranges[name]].copy_(view, non_blocking=True)
            left[place] = mark_done(self._leaving)
        for event in left:
            wait_for(here, event)

    def _slot(self, resting: Mapping[str, Tensor], buckets: Sequence[Ranges]) -> dict[str, Tensor]:
        longest = {name: max(_length(ranges[name]) for ranges in buckets) for name in resting}
        return {name: torch.empty(longest[name], dtype=tensor.dtype, device=self._device) for name, tensor in resting.items()}

    def _fetch(self, resting: Mapping[str, Tensor], ranges: Ranges, slot: Mapping[str, Tensor], free: Done) -> Done:
        wait_for(self._arriving, free)
        with on_stream(self._arriving):
            for name, view in _filled(slot, ranges).items():
                view.copy_(resting[name][ranges[name]], non_blocking=True)
        return mark_done(self._arriving)


def _filled(slot: Mapping[str, Tensor], ranges: Ranges) -> dict[str, Tensor]:
    return {name: tensor[: _length(ranges[name])] for name, tensor in slot.items()}


def _length(part: slice) -> int:
    return int(part.stop - part.start)
