"""Activation offload: tensors that a forward saves for backward rest in host buffers until backward needs them.

Bytes saved: let k be ``activation_offload_in_flight``. With activation checkpointing, the inputs of L - 1 - k of the L blocks
leave the device, T x h x b bytes each: tokens x hidden size x bytes per element. Nothing is saved if an optimizer step is one
small micro-batch, because gradients then set the peak. Without checkpointing, everything that the blocks keep leaves the device,
except what is fetched ahead for the backward of an MLP.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from verl_memopt.distributed.device import CopyStream, fsdp_units
from verl_memopt.memory.host_buffers import CHUNK_BYTES, HostArena, Slot, whole_storage

BYTES_MOVED = "memory/activation_offload/bytes_moved"
"""Metric: bytes that an update of the policy copied, in both directions."""
CRITIC_BYTES_MOVED = "memory/activation_offload/critic_bytes_moved"
"""Metric: the same for the critic."""


class ActivationOffload:
    """Moves tensors that the forwards of one model save to the host, and back before backward needs them.

    A storage is moved whole and only once, even if several saved tensors are views of it. Weights are not moved.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        min_bytes: int,
        in_flight: int,
        chunk_bytes: int = CHUNK_BYTES,
        metric: str = BYTES_MOVED,
        stay_bytes: int = 0,
    ) -> None:
        """Prepare the host memory, in chunks of ``chunk_bytes``, and one copy stream for each direction.

        Storages below ``min_bytes`` stay on the device. So do the first storages of each forward, as long as they fit in
        ``stay_bytes``. At most ``in_flight`` copies run at once in each direction.
        """
        self.arena = HostArena(device, "activations", chunk_bytes)
        self.leaving, self.arriving = CopyStream(device), CopyStream(device)
        self.bytes_moved, self.metric = 0, metric
        self._model, self._device = model, device
        self._min_bytes, self._in_flight, self._stay_bytes = min_bytes, in_flight, stay_bytes
        self._leaving: deque[weakref.ref[_Stored]] = deque()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Offload what the body saves for backward. The backward may run at any later time, or never.

        After the body, the storage saved last is still on the device, because backward needs it first.
        """
        record = _Forward(self)
        with ExitStack() as hooks:
            gathering: Sequence[Any] = fsdp_units(self._model) or [self._model]
            for module in gathering:
                hooks.callback(module.register_forward_pre_hook(record.note_weights).remove)
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(record.pack, record.unpack))
            try:
                yield
            except BaseException:
                record.abandon()
                self.arena.shrink()
                raise
        # Backward starts with the storage that was saved last. Moving it to the host would waste two copies.
        self._free_oldest(keep=1)

    def take_bytes_moved(self) -> int:
        moved, self.bytes_moved = self.bytes_moved, 0
        return moved

    def metrics(self) -> dict[str, float]:
        return {self.metric: float(self.take_bytes_moved())}

    def close(self) -> None:
        self.arena.shrink()

    def stays(self, tensor: Tensor) -> bool:
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided or tensor.device.type != self._device.type:
            return True
        return tensor.untyped_storage().nbytes() < max(self._min_bytes, 1)

    def send(self, tensor: Tensor) -> _Stored:
        # Older storages are freed first, so that never more than ``in_flight`` storages wait on the device.
        self._free_oldest(keep=self._in_flight - 1)
        stored = _Stored(self, whole_storage(tensor))
        self._leaving.append(weakref.ref(stored))
        return stored

    def _free_oldest(self, keep: int) -> None:
        while len(self._leaving) > keep:
            stored = self._leaving.popleft()()
            if stored is not None and not stored.used:
                stored.leave_device()


class _Stored:
    def __init__(self, offload: ActivationOffload, source: Tensor) -> None:
        self.offload = offload
        self.num_bytes = source.numel()
        self.used = False  # True once backward has asked for it
        # Set first, because __del__ reads it even if the next line raises an error for lack of host memory.
        self.slot: Slot | None = None
        self.slot = offload.arena.take(self.num_bytes)
        self.on_device: Tensor | None = source  # uint8, while there is a copy on the device
        self._version = source._version
        self._stream = offload.leaving
        self._copy(self.slot.parts, self._cut(source))

    def fetch(self) -> None:
        assert self.slot is not None, "the forward that saved this tensor has failed; it has no backward"
        if self.on_device is None:
            self.on_device = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.offload._device)
            # The new memory may still be in use by queued work, and the copy to the host may still run. The copy stream waits for
            # both.
            self._stream = self.offload.arriving
            self._copy(self._cut(self.on_device), self.slot.parts)
            self._version = self.on_device._version

    def ready(self) -> Tensor:
        # Return the bytes on the device, for work that is queued from here on. Fetch them if they are on the host.
        self.fetch()
        self.used = True
        held = self._unchanged()
        assert held is not None
        # Bytes that have not left yet can be read while they are copied to the host; :meth:`release` waits for that copy.
        if self._stream is self.offload.arriving:
            self._wait()
        return held

    def leave_device(self) -> None:
        if self._unchanged() is not None:
            self._wait()
            self.on_device = None

    def release(self) -> None:
        if self.slot is not None:
            self._wait()
            self.on_device = None
            self.offload.arena.give_back(self.slot)
            self.slot = None

    __del__ = release

    def _unchanged(self) -> Tensor | None:
        if self.on_device is not None:
            # The copy to the host may run as late as now, so a write would change what it copies. Autograd forbids such writes
            # too.
            assert self.on_device._version == self._version, "a tensor saved for backward was written to in place"
        return self.on_device

    def _cut(self, flat: Tensor) -> tuple[Tensor, ...]:
        assert self.slot is not None
        return flat.split([part.numel() for part in self.slot.parts])

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.offload.bytes_moved += self.num_bytes
        self._done = self._stream.copy(targets, sources)

    def _wait(self) -> None:
        self._stream.wait(self._done)
        self._done = None


@dataclass(frozen=True)
class _Saved:
    stored: _Stored
    place: int  # in the order of saving
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Forward:
    def __init__(self, offload: ActivationOffload) -> None:
        self._offload = offload
        self._weights: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sent: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], weakref.ref[_Stored]]] = {}
        self._order: list[weakref.ref[_Stored]] = []  # in the order of saving; backward goes through it in reverse
        self._staying: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._room = offload._stay_bytes

    def note_weights(self, module: nn.Module, _: Any) -> None:
        # Remember the storages of gathered weights. Views of them must stay on the device too, but do not look like weights to
        # autograd.
        for weight in (*module.parameters(), *module.buffers()):
            if not is_traceable_wrapper_subclass(weight):
                storage = weight.untyped_storage()
                self._weights[storage._cdata] = weakref.ref(storage)

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        # Detached, because a node that saves its own output would otherwise keep itself alive.
        if self._offload.stays(tensor) or self._is_weight(tensor) or self._has_room(tensor):
            return tensor.detach()
        stored = self._stored(tensor)
        # A weak reference: the bytes are freed together with the part of the graph that needs them.
        self._order.append(weakref.ref(stored))
        place, offset = len(self._order) - 1, int(tensor.storage_offset())
        return _Saved(stored, place, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        flat = saved.stored.ready()
        self._prefetch(saved.place)
        # Another view of the storage may have had another dtype, so its bytes need not be a multiple of this dtype's width.
        typed = flat[: flat.numel() // saved.dtype.itemsize * saved.dtype.itemsize].view(saved.dtype)
        return typed.as_strided(saved.shape, saved.stride, saved.offset)

    def abandon(self) -> None:
        for stored in filter(None, (reference() for reference in self._order)):
            # Released here, because an exception that keeps the graph alive would also keep these bytes.
            stored.release()

    def _is_weight(self, tensor: Tensor) -> bool:
        base = tensor if tensor._base is None else tensor._base
        storage = tensor.untyped_storage()
        weight = self._weights.get(storage._cdata)
        return isinstance(base, nn.Parameter) or (weight is not None and weight() is storage)

    def _has_room(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        staying = self._staying.get(storage._cdata)
        if staying is not None and staying() is storage:
            return True
        if storage.nbytes() > self._room:
            # After the first storage that does not fit, none stays. So the storages that stay are the first ones, whose backward
            # runs last.
            self._room = 0
            return False
        self._room -= storage.nbytes()
        self._staying[storage._cdata] = weakref.ref(storage)
        return True

    def _stored(self, tensor: Tensor) -> _Stored:
        # The version changes if the storage is written to, and it is then saved again.
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        owner, reference = self._sent.get(key, (None, None))
        # A new storage may get the address of a freed one, so the owner is compared too.
        stored = reference() if owner is not None and reference is not None and owner() is storage else None
        if stored is None:
            stored = self._offload.send(tensor)
            self._sent[key] = (weakref.ref(storage), weakref.ref(stored))
        return stored

    def _prefetch(self, place: int) -> None:
        # Backward goes through the storages in reverse order of saving.
        num_fetched = 0
        while place > 0 and num_fetched < self._offload._in_flight:
            place -= 1
            stored = self._order[place]()
            if stored is not None and not stored.used:
                stored.fetch()
                num_fetched += 1
