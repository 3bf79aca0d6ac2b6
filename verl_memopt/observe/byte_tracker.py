"""Counts the live tensor bytes of a program by storage, without the help of an allocator.

The tracker sees the tensors of a program. It sees neither memory that an allocator reserves nor memory inside a kernel. Turn
torch.compile off while it is active: a compiled function runs eagerly under any dispatch mode, and stays eager afterwards.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_iter

from verl_memopt.distributed.device import is_gpu

DEVICE = "device"
HOST = "host"

_active: list[ByteTracker] = []
_declared: dict[int, weakref.ref[torch.UntypedStorage]] = {}


def declare_host(storage: torch.UntypedStorage) -> None:
    """Declare that a storage is on the host tier. Trackers that are entered later know this too."""
    key = storage._cdata
    _declared[key] = weakref.ref(storage, lambda _: _declared.pop(key, None))


class DeviceLimitError(torch.OutOfMemoryError):
    """Live bytes exceeded a tracker's limit, as on a full device.

    ``num_bytes`` and ``kinds`` include the new allocation, whose size is ``asked_bytes``.
    """

    def __init__(self, num_bytes: int, kinds: dict[str, int], op: str, asked_bytes: int) -> None:
        super().__init__(f"{op}: {num_bytes} bytes are past the limit")
        self.num_bytes, self.kinds, self.op, self.asked_bytes = num_bytes, kinds, op, asked_bytes


@dataclass
class Peak:
    """The moment when a tier held the most bytes: how many, of which kinds, and the op that reached it."""

    bytes: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    op: str = ""


@dataclass
class _Entry:
    bytes: int
    tier: str
    kind: str
    death: weakref.ref[torch.UntypedStorage]


class ByteTracker(TorchDispatchMode):
    """Counts live storage bytes by (tier, kind) while it is entered, and keeps the peak of each tier and of each kind.

    If ``device`` is a GPU, a storage on a GPU has the tier ``device``, and any other storage has the tier ``host``. On a CPU both
    tiers are on the device ``cpu``, so the innermost ``scope(tier=...)`` decides, and outside of any scope the tier is
    ``device``. The kind is set by ``mark`` or by the innermost ``scope(kind=...)``; outside of any scope it is ``default_kind``.

    The tracker does not know tensors that were created before it was entered, and counts a view of such a tensor as new. So
    ``mark`` these tensors first.

    To count fake tensors, enter a ``FakeTensorMode`` before the tracker. Without this mode, fake tensors are ignored, because
    DTensor creates some of full size when it first meets an op, to find the shape of its result. With this mode these are
    counted too, but only in the first step, so use the figures of the second step.

    Dispatch modes are per thread: the tracker does not see allocations of another thread.

    Args:
        device: Device of the program. None = the CPU.
        block_bytes: Sizes are rounded up to a multiple of this.
        default_kind: Kind outside of any scope.
        limit_bytes: Largest number of bytes of the device tier. The op that exceeds it raises DeviceLimitError. None = no limit.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        block_bytes: int = 1,
        default_kind: str = "activations",
        limit_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes
        self.totals: Counter[tuple[str, str]] = Counter()
        self.peaks = {DEVICE: Peak(), HOST: Peak()}
        self.kind_peaks: Counter[tuple[str, str]] = Counter()
        self.phase = ""
        self._device = device or torch.device("cpu")
        self._block_bytes = block_bytes
        self._scopes: list[tuple[str, str | None]] = [(default_kind, None)]
        self._entries: dict[int, _Entry] = {}
        self._tier_bytes = {DEVICE: 0, HOST: 0}
        self._op: Any = ""
        self._plans = False
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def total(self, tier: str = DEVICE) -> int:
        return self._tier_bytes[tier]

    def kinds(self, tier: str = DEVICE) -> dict[str, int]:
        # Kinds of 0 bytes are left out.
        return {kind: held for (where, kind), held in self.totals.items() if where == tier and held}

    def enter(self, phase: str) -> None:
        """Begin a phase. The peaks of both tiers and of each kind begin at the bytes that are live now."""
        self.phase = phase
        self.peaks = {tier: Peak(self.total(tier), self.kinds(tier), f"start of {phase}") for tier in (DEVICE, HOST)}
        self.kind_peaks = Counter(self.totals)

    def most(self, tier: str = DEVICE) -> dict[str, int]:
        """Return the peak bytes of each kind of a tier in the phase.

        Kinds reach their peaks at different moments, so the peaks do not add up.
        """
        return {kind: held for (where, kind), held in self.kind_peaks.items() if where == tier and held}

    def mark(self, kind: str, tensors: Iterable[torch.Tensor], tier: str | None = None) -> None:
        """Label the storages of tensors. A storage that the tracker has not seen is counted from now on."""
        for storage, device in _storages(tensors):
            entry = self._entries.get(storage._cdata)
            if entry is None:
                self._op = f"mark {kind}"
                self._remember(storage, tier or self._tier(storage, device), kind)
            else:
                self._add(entry.tier, entry.kind, -entry.bytes)
                entry.tier, entry.kind = tier or entry.tier, kind
                self._add(entry.tier, kind, entry.bytes)

    @contextmanager
    def scope(self, kind: str | None = None, tier: str | None = None) -> Iterator[None]:
        # Label the storages created in the body. None keeps the label of the enclosing scope.
        outer_kind, outer_tier = self._scopes[-1]
        self._scopes.append((kind or outer_kind, tier or outer_tier))
        try:
            yield
        finally:
            self._scopes.pop()

    def see(self, tensor: torch.Tensor) -> None:
        # A known storage that was resized is counted with its new size.
        for storage, device in _storages([tensor]):
            self._see_storage(storage, device)

    def _see_storage(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        entry = self._entries.get(storage._cdata)
        if entry is None:
            self._remember(storage, self._tier(storage, device), self._scopes[-1][0])
        elif entry.bytes != (size := self._rounded(storage.nbytes())):
            self._add(entry.tier, entry.kind, size - entry.bytes)
            entry.bytes = size

    def _remember(self, storage: torch.UntypedStorage, tier: str, kind: str) -> None:
        key, size = storage._cdata, self._rounded(storage.nbytes())
        self._entries[key] = _Entry(size, tier, kind, weakref.ref(storage, lambda _: self._forget(key)))
        self._add(tier, kind, size)

    def _forget(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._add(entry.tier, entry.kind, -entry.bytes)

    def _add(self, tier: str, kind: str, size: int) -> None:
        held = self.totals[tier, kind] = self.totals[tier, kind] + size
        if held > self.kind_peaks[tier, kind]:
            self.kind_peaks[tier, kind] = held
        self._tier_bytes[tier] += size
        if size > 0 and self._tier_bytes[tier] > self.peaks[tier].bytes:
            self.peaks[tier] = Peak(self._tier_bytes[tier], self.kinds(tier), str(self._op))
        if size > 0 and tier == DEVICE and self._limit_bytes is not None and self._tier_bytes[tier] > self._limit_bytes:
            raise DeviceLimitError(self._tier_bytes[tier], self.kinds(tier), str(self._op), size)

    def _rounded(self, size: int) -> int:
        return -(-size // self._block_bytes) * self._block_bytes

    def _tier(self, storage: torch.UntypedStorage, device: torch.device) -> str:
        if storage._cdata in _declared:
            return HOST
        if is_gpu(self._device):
            return DEVICE if device.type == self._device.type else HOST
        return self._scopes[-1][1] or DEVICE

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would make torch wrap each dispatch in a guard against compilation, which costs 50 microseconds per op.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        # A wrapper subclass runs its own dispatch, and the ops on its inner tensors come back here.
        if types and any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        result = func(*args, **kwargs) if kwargs else func(*args)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            # In a real run this op returns its argument. Fake and meta kernels create a second tensor that no real run holds.
            return args[0]
        self._op = func
        if type(result) is torch.Tensor and result.layout is torch.strided:
            # A fast path, because this method runs for every op, and nearly every op returns one plain tensor.
            if result.device.type != "meta":
                self._see_storage(result.untyped_storage(), result.device)
            return result
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and (self._plans or not isinstance(tensor, FakeTensor)):
                self.see(tensor)
        return result

    def __enter__(self) -> ByteTracker:
        assert not _active, "a ByteTracker is already active"
        super().__enter__()
        self._plans = active_fake_mode() is not None
        original = self._resize = torch.UntypedStorage.resize_

        # FSDP2 frees and refills its buffers with this method, which no dispatch mode sees.
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._op = "storage.resize_"
            if storage._cdata in self._entries or storage.device.type != "meta":
                self._see_storage(storage, storage.device)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        _active.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _active.remove(self)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)
        # Storages that outlive the tracker must neither keep it alive nor change its figures after the phase.
        self._entries.clear()


def active_tracker() -> ByteTracker | None:
    return _active[-1] if _active else None


@contextmanager
def scope(kind: str | None = None, tier: str | None = None) -> Iterator[None]:
    """Label the storages created in the body, if a tracker is active.

    A forward or backward pass opens a scope. The code of an autograd function may open another one inside it.
    """
    tracker = active_tracker()
    if tracker is None:
        yield
        return
    with tracker.scope(kind, tier):
        yield


def mark(kind: str, tensors: Iterable[torch.Tensor], tier: str | None = None) -> None:
    """Label the storages of tensors, if a tracker is active."""
    tracker = active_tracker()
    if tracker is not None:
        tracker.mark(kind, tensors, tier)


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    # The storages of a tensor, or those of its inner tensors if it is a wrapper.
    return [storage for storage, _ in _storages([tensor])]


def device_storages(tensor: torch.Tensor, device: torch.device) -> list[torch.UntypedStorage]:
    # The storages of a tensor that are on the tier of ``device``: no host buffers, and none of other devices.
    return [storage for storage, where in _storages([tensor]) if where.type == device.type and storage._cdata not in _declared]


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.UntypedStorage, torch.device]]:
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            # A DTensor lists its device mesh beside its local tensor. Only tensors hold bytes.
            inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            yield from _storages(part for part in inner if isinstance(part, torch.Tensor))
        elif tensor.layout is torch.strided and tensor.device.type != "meta":
            # A fake tensor reports the device that it imitates. A meta tensor holds nothing.
            yield tensor.untyped_storage(), tensor.device
