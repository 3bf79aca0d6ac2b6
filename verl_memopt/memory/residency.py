"""Which parts must be on the device in which phase, in one table, and the moves that make it so.

A model's parameters rest on the host outside the phases that need them, in one host buffer that is used again at every move.
Bytes saved: b_w x N / W bytes of device memory in every phase that does not need the model: rollout, the other model's
log-probs, rewards, saving. b_w is 4 for fp32 masters and 2 for bfloat16, N counts the parameters and W the ranks in the shard
group.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from verl_memopt.distributed.device import empty_cache, synchronize
from verl_memopt.memory.host_buffers import host_buffer, whole_storage
from verl_memopt.memory.streamed_params_torch import StreamedParams
from verl_memopt.observe.byte_tracker import mark
from verl_memopt.observe.phase import MIB

KIND = "params"


@dataclass
class _Place:
    """A storage (``flat``) and its place on the host (``slot``; None before the first move), both uint8."""

    flat: Tensor
    frozen: bool
    slot: Tensor | None = None
    copied: bool = False
    """The host has its values already."""


class OffloadedParams:
    """The parameters of one model and their place on the host.

    Whole storages are moved. A storage that has left is resized to nothing, so tensors that share it (FSDP2's own views, an
    earlier state dict) keep no byte of it alive, and all of them are valid again when the storage is back.
    """

    def __init__(
        self, name: str, parameters: Iterable[Tensor], device: torch.device, mapped: Sequence[Tensor] | None = None
    ) -> None:
        """Take note of the storages of all parameters of a model, on the device. Frozen ones are copied to the host once.

        ``mapped`` are the values of each parameter in a mapped file, for a model that is frozen as a whole. They are never copied
        to the host, and the parameters need not be filled.
        """
        self.name = name
        self.on_device = True
        self._device = device
        self._parameters = list(parameters)
        self._places = _places(self._parameters)
        if mapped is not None:
            for parameter, part in zip(self._parameters, mapped, strict=True):
                place = self._places.get(_storage_key(parameter))
                if place is not None:
                    assert place.frozen, name
                    assert part.is_contiguous(), part.shape
                    place.slot, place.copied = part.reshape(-1).view(torch.uint8), True

    @property
    def num_bytes(self) -> int:
        """Bytes that leave the device."""
        return sum(place.flat.numel() for place in self._places.values())

    def to_host(self) -> int:
        """Move the parameters to the host, and return the bytes freed. If the host limit refuses (HostMemoryError), they stay."""
        if not self.on_device:
            return 0
        self._copy_to_host()
        self._free()
        return self.num_bytes

    def to_device(self) -> int:
        """Move the parameters to the device, and return the bytes moved. If this fails, none of them is there."""
        if self.on_device:
            return 0
        try:
            for place in self._places.values():
                place.flat.untyped_storage().resize_(place.flat.numel())
            self._copy_to_device()
        except BaseException:
            self._free()
            raise
        return self.num_bytes

    def take_over(self, other: OffloadedParams) -> int:
        """Copy these parameters over those of another model that uses the same storages, and return the bytes moved.

        The other model, which is on the device now, then rests on the host. No device memory is freed or allocated. If it fails,
        neither is on the device.
        """
        assert other.on_device, other.name
        assert not self.on_device, self.name
        other._copy_to_host()
        try:
            self._copy_to_device()
        except BaseException:
            self._free()
            raise
        finally:
            other.on_device = False
        return self.num_bytes

    def changed(self) -> None:
        """Note that frozen parameters got other values on the device, so that they are copied to the host once more."""
        assert self.on_device, self.name
        for place in self._places.values():
            place.copied = False

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Let the parameters be read where they rest: inside the body their shards are views of the host's copy.

        A collective on them runs on the host. Nothing changes while they are on the device.
        """
        if self.on_device:
            yield
            return
        shards = [(parameter, _shard(parameter)) for parameter in self._parameters]
        try:
            for parameter, shard in shards:
                _set_shard(parameter, self._view(shard))
            yield
        finally:
            for parameter, shard in shards:
                _set_shard(parameter, shard)

    def _view(self, shard: Tensor) -> Tensor:
        place = self._places.get(_storage_key(shard))
        if place is None:
            return shard
        assert place.slot is not None
        typed = place.slot.view(shard.dtype)
        # Offsets count from the start of the host's storage, which all places share.
        return typed.as_strided(shard.shape, shard.stride(), typed.storage_offset() + shard.storage_offset())

    def _copy_to_host(self) -> None:
        """Give the host the present values. What is frozen and there already is not copied again."""
        self._take_slots()
        for place in self._places.values():
            if not place.copied:
                assert place.slot is not None
                place.slot.copy_(place.flat, non_blocking=True)
        # From here on the host may read its copy, and the device may reuse the memory.
        synchronize(self._device)
        for place in self._places.values():
            place.copied = place.frozen

    def _copy_to_device(self) -> None:
        for place in self._places.values():
            assert place.slot is not None
            place.flat[: place.slot.numel()].copy_(place.slot, non_blocking=True)
        self.on_device = True

    def _free(self) -> None:
        for place in self._places.values():
            place.flat.untyped_storage().resize_(0)
        self.on_device = False

    def _take_slots(self) -> None:
        places = [place for place in self._places.values() if place.slot is None]
        if places:
            sizes = [place.flat.numel() for place in places]
            buffer = host_buffer(sum(sizes), self._device, KIND)
            for place, slot in zip(places, buffer.split(sizes), strict=True):
                place.slot = slot


def _places(parameters: Iterable[Tensor]) -> dict[int, _Place]:
    """Return each storage once, whole; wide elements first, so that each starts at a multiple of its width."""
    storages: dict[int, tuple[Tensor, bool]] = {}
    for parameter in parameters:
        for plain in _plain(parameter):
            if plain.untyped_storage().nbytes():
                storages.setdefault(plain.untyped_storage()._cdata, (plain, not parameter.requires_grad))
    mark(KIND, (plain for plain, _ in storages.values()))
    ordered = sorted(storages.items(), key=lambda item: -item[1][0].itemsize)
    return {key: _Place(whole_storage(plain), frozen) for key, (plain, frozen) in ordered}


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold a tensor's bytes: itself, or those inside a wrapper such as a DTensor."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor.detach()
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):
            yield from _plain(inner)


def _storage_key(tensor: Tensor) -> int:
    return next(_plain(tensor)).untyped_storage()._cdata


def _shard(parameter: Tensor) -> Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data


def _set_shard(parameter: Tensor, shard: Tensor) -> None:
    if isinstance(parameter, DTensor):
        parameter._local_tensor = shard
    else:
        parameter.data = shard


logger = logging.getLogger(__name__)


POLICY = "policy params"
REFERENCE = "reference params"
CRITIC = "critic params"
REWARD_MODEL = "reward model params"
"""Of the model that scores: a reward model, or a recipe's frozen model."""

NEEDS: dict[str, frozenset[str]] = {
    "gen": frozenset(),
    "testing": frozenset(),
    "reward": frozenset({REWARD_MODEL}),
    "old_log_prob": frozenset({POLICY}),
    "ref": frozenset({REFERENCE}),
    "values": frozenset({CRITIC}),
    "update_critic": frozenset({CRITIC}),
    "update_actor": frozenset({POLICY}),
    "update_weights": frozenset({POLICY}),
    "sync_ref": frozenset(),
    "save_checkpoint": frozenset(),
    "load_checkpoint": frozenset({POLICY}),
    "load_critic": frozenset({CRITIC}),
}
"""Phase -> the parts that must be on the device in it. Every other part that may rest on the host does.

The engine's weights and its KV cache are not here: the engine sleeps and wakes through methods of its own. Optimizer state is not
here either: it is needed inside an optimizer step only, never for a whole phase. A checkpoint is written from where parts rest,
and the reference follows the policy where both rest. A part that streams is never there for a whole phase: its blocks come and
go in its own pass.
"""


class Residency:
    """Moves the parts of one worker between the phases of a step.

    A part that the next phase also needs stays. What it does not need leaves before what it needs comes, so the two are never on
    the device together. A move that fails leaves every part wholly in one place.
    """

    def __init__(self, device: torch.device) -> None:
        """Start without parts."""
        self._device = device
        self._parts: list[tuple[OffloadedParams | StreamedParams, frozenset[str]]] = []
        self._turns: list[tuple[OffloadedParams, OffloadedParams]] = []
        self._logged: set[str] = set()

    def add(self, part: OffloadedParams | StreamedParams, also: Iterable[str] = ()) -> None:
        """Add a part. It is needed where the table says its name, or one of the names in ``also``."""
        self._parts.append((part, frozenset({part.name, *also})))

    def take_turns(self, one: OffloadedParams, other: OffloadedParams) -> None:
        """Note that two parts use the same storages. Where a phase needs the one that is away, it takes over from the other."""
        self._turns += [(one, other), (other, one)]

    def find(self, name: str) -> OffloadedParams | StreamedParams | None:
        """Return the part of that name; None where it never leaves the device."""
        return next((part for part, _ in self._parts if part.name == name), None)

    def rest(self) -> int:
        """Move every part to the host, and return the bytes moved."""
        return self._leave(frozenset())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Put exactly the parts that the phase needs on the device. Those that the next phase needs too stay afterwards.

        The bytes moved are logged the first time a phase moves any.
        """
        needed = NEEDS[name]
        # First, while the other part is still on the device: the two use the same storages, and one takes them over from the
        # other.
        exchanged = sum(one.take_over(other) for one, other in self._turns if one.name in needed and other.on_device)
        left = self._leave(needed)
        arrived = exchanged + sum(part.to_device() for part, names in self._parts if names & needed)
        if (left or arrived) and name not in self._logged:
            self._logged.add(name)
            logger.info("%s: %.1f MiB to the device, %.1f MiB off it, from now on once a step", name, arrived / MIB, left / MIB)
        yield

    def _leave(self, needed: frozenset[str]) -> int:
        left = sum(part.to_host() for part, names in self._parts if not names & needed)
        if left:
            # The freed memory must be available to the engine too, which allocates without this process's allocator.
            empty_cache(self._device)
        return left
