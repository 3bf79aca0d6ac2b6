"""A table of the parts that must be on the device in each phase, and the code that moves them.

Outside the phases that need them, the parameters of a model rest in a host buffer, which is reused at every move. Bytes saved:
b_w x N / W bytes of device memory in each phase that does not need the model, such as rollout, log-probs of another model,
rewards and saving. b_w is 4 for fp32 master weights and 2 for bfloat16, N counts the parameters and W the ranks in the shard
group.

Memory is allocated and freed at the start of a phase, but the copies run beside the computation. Units of a model arrive in the
order of its forward, and each unit computes as soon as its own parameters are there. Parameters that an update has changed are
copied to the host during the weight sync. Unchanged parameters are not copied.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from verl_memopt.distributed.device import CopyStream, Done, empty_cache, gather_stream, wait_for, wait_on_host
from verl_memopt.memory.host_buffers import host_buffer, whole_storage
from verl_memopt.memory.streamed_params_torch import StreamedParams, without_arguments
from verl_memopt.observe.byte_tracker import mark
from verl_memopt.observe.phase import MIB

KIND = "params"


@dataclass
class _OffloadedStorage:
    flat: Tensor  # uint8, on the device
    frozen: bool
    slot: Tensor | None = None  # uint8, on the host; None before the first move
    copied: bool = False
    """Whether the host already has its present values."""


class OffloadedParams:
    """The parameters of one model, and their memory on the host.

    Whole storages are moved. A storage that has left is resized to zero bytes, so tensors that share it (views of FSDP2, an
    earlier state dict) keep no memory alive. They are valid again when the storage is back.
    """

    def __init__(
        self,
        name: str,
        parameters: Iterable[Tensor],
        device: torch.device,
        mapped: Sequence[Tensor] | None = None,
        units: Sequence[nn.Module] = (),
        ahead: int = 0,
    ) -> None:
        """Record the storages of a model's parameters, which are on the device.

        Args:
            name: Name of this part in the residency table.
            parameters: All parameters of the model.
            device: Device on which they compute.
            mapped: For a wholly frozen model: the values of each parameter in a memory-mapped file. They are used instead of a
                host buffer, and the parameters may be uninitialised.
            units: The model and modules inside it, in forward order. Before its forward, each waits only for its own parameters
                (those in no unit inside it), and for those of the next ``ahead`` units. Without units, :meth:`to_device` waits
                for all parameters.
            ahead: Number of following units to wait for as well.
        """
        self.name = name
        self.on_device = True
        self._device = device
        self._parameters = list(parameters)
        self._places = _places(self._parameters)
        self._leaving, self._arriving = CopyStream(device), CopyStream(device)
        self._units, self._has_hooks = self._by_unit(units), bool(units)
        # Number of a unit -> event at the end of its copies, for copies that nobody has waited for.
        self._left, self._coming = dict[int, Done](), dict[int, Done]()
        # Weak references, so that the hooks keep neither the model nor this object alive, and a dropped model is freed at once.
        weak = weakref.ref(self)
        for number, module in enumerate(units):
            enter = partial(_enter, weak, weakref.ref(module), range(number, number + 1 + ahead))
            # Prepended, because FSDP2's own hook, which reads the shards, must run later.
            module.register_forward_pre_hook(without_arguments(enter), prepend=True)
        for module in units[:1]:
            module.register_forward_hook(without_arguments(partial(_enter, weak, weakref.ref(module), range(len(units)))))
        if mapped is not None:
            for parameter, part in zip(self._parameters, mapped, strict=True):
                place = self._places.get(_storage_key(parameter))
                if place is not None:
                    assert place.frozen, name
                    assert part.is_contiguous(), part.shape
                    place.slot, place.copied = part.reshape(-1).view(torch.uint8), True

    @property
    def num_bytes(self) -> int:
        return _size(self._places.values())

    def to_host(self) -> int:
        """Move the parameters to the host and return the bytes freed. On a HostMemoryError they stay on the device.

        Work that is queued from here on waits for the copies, and may reuse the memory. The host waits only in :meth:`readable`.
        """
        return sum(self.to_host_by_unit())

    def to_host_by_unit(self) -> Iterator[int]:
        """Like :meth:`to_host`, but unit by unit. Yield the bytes of each unit once freed. Exhaust the iterator."""
        if not self.on_device:
            return
        self.copy_to_host()
        self.arrive()
        for number, places in enumerate(self._units):
            self._leaving.wait(self._left.pop(number, None))
            for place in places:
                place.flat.untyped_storage().resize_(0)
            yield _size(places)
        self.on_device = False

    def to_device(self) -> int:
        """Move the parameters to the device and return the bytes moved. If this fails, none of them is on the device.

        A forward waits for them unit by unit. Code that reads or writes them earlier must call :meth:`arrive`.
        """
        return sum(self.to_device_by_unit())

    def to_device_by_unit(self) -> Iterator[int]:
        """Like :meth:`to_device`, but unit by unit. Yield the bytes of each unit before allocating it. Exhaust the iterator."""
        if self.on_device:
            return
        try:
            for number, places in enumerate(self._units):
                yield _size(places)
                for place in places:
                    place.flat.untyped_storage().resize_(place.flat.numel())
                self._bring(number)
        except BaseException:
            self._free()
            raise
        self._is_back()

    def take_over(self, other: OffloadedParams) -> int:
        """Replace the parameters of another model that uses the same storages by these. Return the bytes moved.

        ``other`` must be on the device, and rests on the host afterwards. No device memory is freed or allocated. If this fails,
        neither model is on the device. Otherwise it is like :meth:`to_device`.
        """
        assert other.on_device, other.name
        assert not self.on_device, self.name
        other.copy_to_host()
        other.arrive()
        other._have_left()
        try:
            for number in range(len(self._units)):
                self._bring(number)
            self._is_back()
        except BaseException:
            self._free()
            raise
        finally:
            other.on_device = False
        return self.num_bytes

    def arrive(self) -> None:
        while self._coming:
            self._arriving.wait(self._coming.popitem()[1])

    def copy_to_host(self) -> None:
        """Start copying values that the host lacks. They also stay on the device, and must not change before the copy ends.

        If the host limit is too small (HostMemoryError), nothing is copied.
        """
        if not self.has_changed:
            return
        self.arrive()
        self._take_slots()
        for number, places in enumerate(self._units):
            places = [place for place in places if not place.copied]
            if places:
                self._left[number] = self._leaving.copy(_slots(places), [place.flat for place in places])
            for place in places:
                place.copied = True

    @property
    def has_changed(self) -> bool:
        return not all(place.copied for place in self._places.values())

    def changed(self, but_frozen: bool = False) -> None:
        assert self.on_device, self.name
        self._have_left()
        for place in self._places.values():
            place.copied = place.copied and place.frozen and but_frozen

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Inside the body, let the parameters be read where they rest: their shards are views of the copy on the host.

        A collective on them runs on the host. If they are on the device, this has no effect.
        """
        if self.on_device:
            self.arrive()
            yield
            return
        # Copies may still be under way, in either direction. Queued work waits for them, and the host waits for that work.
        wait_on_host(self._device)
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
        # Offsets count from the start of the host buffer, which all parameters share.
        return typed.as_strided(shard.shape, shard.stride(), typed.storage_offset() + shard.storage_offset())

    def _have_left(self) -> None:
        while self._left:
            self._leaving.wait(self._left.popitem()[1])

    def _bring(self, number: int) -> None:
        # Start copying a unit to the device. The copy begins after all work that is queued so far, and after copies to the host
        # for which that work waits.
        places, slots = self._units[number], _slots(self._units[number])
        if places:
            targets = [place.flat[: slot.numel()] for place, slot in zip(places, slots, strict=True)]
            self._coming[number] = self._arriving.copy(targets, slots)

    def _is_back(self) -> None:
        self.on_device = True
        if not self._has_hooks:
            self.arrive()

    def _free(self) -> None:
        self.arrive()
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

    def _by_unit(self, units: Sequence[nn.Module]) -> list[list[_OffloadedStorage]]:
        unit_of_storage: dict[int, int] = {}
        for number, module in enumerate(units):
            for parameter in _own_parameters(module, units):
                # A storage that several units use is moved with the first of them. A storage in no unit is moved with the model.
                unit_of_storage.setdefault(_storage_key(parameter), number)
        found: list[list[_OffloadedStorage]] = [[] for _ in range(max(len(units), 1))]
        for key, place in self._places.items():
            found[unit_of_storage.get(key, 0)].append(place)
        return found


def _size(places: Iterable[_OffloadedStorage]) -> int:
    return sum(place.flat.numel() for place in places)


def _slots(places: Iterable[_OffloadedStorage]) -> list[Tensor]:
    return [place.slot for place in places if place.slot is not None]


def _own_parameters(module: nn.Module, units: Collection[nn.Module]) -> Iterator[Tensor]:
    # Yield the parameters of a module that belong to no unit inside it.
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    for child in module.children():
        if child not in units:
            yield from _own_parameters(child, units)


def _enter(weak: weakref.ref[OffloadedParams], unit: weakref.ref[nn.Module], numbers: Iterable[int]) -> None:
    # Make work that is queued from here on, and FSDP2's gather of the unit, wait for the units `numbers` that are on their way.
    home, module = weak(), unit()
    if home is not None and module is not None:
        for number in [number for number in numbers if number in home._coming]:
            done = home._coming.pop(number)
            wait_for(gather_stream(module), done)
            home._arriving.wait(done)


def _places(parameters: Iterable[Tensor]) -> dict[int, _OffloadedStorage]:
    # Each storage appears once, as a whole. Storages of wide elements come first, so that each starts at a multiple of its width.
    storages: dict[int, tuple[Tensor, bool]] = {}
    for parameter in parameters:
        for plain in _plain(parameter):
            if plain.untyped_storage().nbytes():
                storages.setdefault(plain.untyped_storage()._cdata, (plain, not parameter.requires_grad))
    mark(KIND, (plain for plain, _ in storages.values()))
    ordered = sorted(storages.items(), key=lambda item: -item[1][0].itemsize)
    return {key: _OffloadedStorage(whole_storage(plain), frozen) for key, (plain, frozen) in ordered}


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    # Yield the tensors that hold the bytes of a tensor: the tensor itself, or those inside a wrapper such as a DTensor.
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
"""Parameters of the model that scores: a reward model, or the frozen model of a recipe."""
TEACHER = "teacher params"
TEACHER_HEAD = "teacher head"
"""The LM head of a teacher whose divergence is exact, which the update of the policy reads."""

NEEDS: dict[str, frozenset[str]] = {
    "gen": frozenset(),
    "testing": frozenset(),
    "reward": frozenset({REWARD_MODEL}),
    "old_log_prob": frozenset({POLICY}),
    "ref": frozenset({REFERENCE}),
    "values": frozenset({CRITIC}),
    "update_critic": frozenset({CRITIC}),
    "teacher": frozenset({TEACHER}),
    "teacher_log_probs": frozenset({TEACHER, TEACHER_HEAD}),
    "update_actor": frozenset({POLICY, TEACHER_HEAD}),
    "update_weights": frozenset({POLICY}),
    "sync_ref": frozenset(),
    "save_checkpoint": frozenset(),
    "load_checkpoint": frozenset({POLICY}),
    "load_critic": frozenset({CRITIC}),
}
"""Phase -> the parts that must be on the device in this phase. All other parts that can be offloaded rest on the host.

The table does not contain the engine's weights and KV cache, because the engine has its own methods to sleep and wake. It does
not contain optimizer state, which is needed only inside an optimizer step, never for a whole phase. A checkpoint is read from
where the parts rest, and a reference that follows the policy is updated where both rest. A streamed part is never on the device
for a whole phase: its blocks come and go during its own pass.
"""

PASSES = frozenset({"reward", "old_log_prob", "ref", "values", "teacher", "teacher_log_probs", "update_critic", "update_actor"})
"""Phases in which a forward is the first to read the parameters of the needed parts. It waits for them unit by unit. Code that
reads or writes them earlier must call :meth:`OffloadedParams.arrive`."""

CHANGES = frozenset({"update_critic", "update_actor", "load_checkpoint", "load_critic"})
"""Phases that change the parameters of the needed parts, if these are trained."""


class Residency:
    """Moves the parts of one worker between the phases of a step.

    A part that the next phase also needs stays. An arriving unit takes the memory of units that have left, so leaving and
    arriving parts are never whole on the device together. If a move fails, each part is wholly on the device or wholly on the
    host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[tuple[OffloadedParams | StreamedParams, frozenset[str]]] = []
        self._turns: list[tuple[OffloadedParams, OffloadedParams]] = []
        self._logged: set[str] = set()

    def add(self, part: OffloadedParams | StreamedParams, also: Iterable[str] = ()) -> None:
        self._parts.append((part, frozenset({part.name, *also})))

    def take_turns(self, one: OffloadedParams, other: OffloadedParams) -> None:
        """Declare that two parts use the same storages. A phase that needs the absent part lets it take over from the other."""
        self._turns += [(one, other), (other, one)]

    def find(self, name: str) -> OffloadedParams | StreamedParams | None:
        return next((part for part, _ in self._parts if part.name == name), None)

    def rest(self) -> int:
        return self._move([part for part, _ in self._parts], [])[0]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Move exactly the parts that the phase needs to the device. They stay there until a phase that does not need them.

        The first time that a phase moves bytes, their number is logged.
        """
        needed = NEEDS[name]
        # This comes first, because a part can take over storages only while the other part is still on the device.
        exchanged = sum(
            absent.take_over(present) for absent, present in self._turns if absent.name in needed and present.on_device
        )
        used = [part for part, names in self._parts if names & needed]
        left, arrived = self._move([part for part, names in self._parts if not names & needed], used)
        arrived += exchanged
        for part in used:
            if isinstance(part, OffloadedParams) and name not in PASSES:
                part.arrive()
            if isinstance(part, OffloadedParams) and name in CHANGES:
                part.changed(but_frozen=True)
        if (left or arrived) and name not in self._logged:
            self._logged.add(name)
            logger.info("%s: %.1f MiB to the device, %.1f MiB off it, from now on once per step", name, arrived / MIB, left / MIB)
        yield

    def copy_out(self) -> None:
        """Start copying changed parameters to the host. Until the phase that frees them, work may only read them."""
        for part, _ in self._parts:
            if isinstance(part, OffloadedParams) and part.on_device:
                part.copy_to_host()

    def _move(
        self, leaving: Sequence[OffloadedParams | StreamedParams], coming: Sequence[OffloadedParams | StreamedParams]
    ) -> tuple[int, int]:
        copied = [part for part in leaving if isinstance(part, OffloadedParams) and part.on_device and part.has_changed]
        left, arrived = sum(part.to_host() for part in leaving if part not in copied), 0
        if left:
            # The freed memory must also be available to the engine, which does not allocate from this process's allocator.
            empty_cache(self._device)
        for part_leaving in copied:
            part_leaving.copy_to_host()  # before anything is freed, because the host limit may be too small
        going, freed = (num_bytes for part_leaving in copied for num_bytes in part_leaving.to_host_by_unit()), 0
        try:
            for part in coming:
                for num_bytes in part.to_device_by_unit() if isinstance(part, OffloadedParams) else [part.to_device()]:
                    arrived += num_bytes
                    while freed < arrived and (unit_bytes := next(going, None)) is not None:
                        freed += unit_bytes
        finally:
            freed += sum(going)
        if freed and not arrived:
            # Not if parts arrived: they took the memory, and emptying the cache would wait for their copies.
            empty_cache(self._device)
        return left + freed, arrived
