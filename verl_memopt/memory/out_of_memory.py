"""Recognise out-of-memory errors, write snapshots of the memory, and limit the memory of a process."""

from __future__ import annotations

import gc
import json
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from verl_memopt.distributed.device import (
    cap_device_memory,
    device_memory_cap,
    empty_cache,
    is_gpu,
    memory_info,
    record_allocations,
    write_allocations,
)
from verl_memopt.memory.host_buffers import GIB, host_limits
from verl_memopt.observe.byte_tracker import DeviceLimitError, device_storages
from verl_memopt.observe.device_ledger import AsleepReader, ledger_of
from verl_memopt.observe.phase import host_rss_bytes

if TYPE_CHECKING:
    from verl_memopt.config.schema import Memory

OUT_OF_MEMORY = re.compile(r"CUDA (driver )?error: out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
"""Messages of libraries that allocate directly from the driver. vLLM's sleeping allocator says ``CUDA Error: out of memory``."""


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY.search(str(error)) is not None


class PartDoesNotFitError(torch.OutOfMemoryError):
    """A part of the engine (``num_bytes`` of a kind) could not wake beside ``held_bytes`` of live tensors."""

    def __init__(self, kind: str, num_bytes: int, held_bytes: int, cause: str) -> None:
        super().__init__(f"waking {kind}, {three_digits(num_bytes / GIB)} GiB: {cause}")
        self.kind, self.num_bytes, self.held_bytes = kind, num_bytes, held_bytes


def three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


@contextmanager
def wake_report(kind: str, num_bytes: int, device: torch.device) -> Iterator[None]:
    held = ledger_of(device).allocated() if is_gpu(device) else 0
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise PartDoesNotFitError(kind, num_bytes, held, str(error)) from error


def release_frames(error: BaseException | None) -> None:
    # Clear the frames of an error and of its causes. They would keep their tensors alive as long as the error itself.
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


# A snapshot of the device memory at the moment when it runs out. It lists live tensors, largest first.

MOST_TENSORS = 200
"""Most tensors that a snapshot lists."""
MOST_FRAMES = 40
"""Most entries of the traceback that a snapshot keeps: the last ones."""

logger = logging.getLogger(__name__)


class MemorySnapshot:
    """Writes a snapshot of this process to a folder when memory runs out inside :meth:`on_out_of_memory`.

    ``resident`` returns (kind, tensor) pairs of the tensors that exist between phases. On a GPU the history of the allocator is
    recorded too.
    """

    def __init__(
        self, folder: Path, rank: int, device: torch.device, resident: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    ) -> None:
        self.path = folder / f"out_of_memory_rank{rank}.json"  # on a GPU a .pickle beside it has the allocator's history
        self._device = device
        self._resident = resident
        if is_gpu(device):
            record_allocations()

    @contextmanager
    def on_out_of_memory(self, phase: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._write(phase, error)
            raise

    def _write(self, phase: str, error: RuntimeError) -> None:
        kinds = {storage._cdata: kind for kind, tensor in self._resident() for storage in device_storages(tensor, self._device)}
        tensors = _live_tensors(self._device, kinds)
        snapshot: dict[str, Any] = {
            "phase": phase,
            "error": str(error),
            "host_rss_bytes": host_rss_bytes(),
            "live_bytes": sum(tensor["bytes"] for tensor in tensors),
            "kinds": error.kinds if isinstance(error, DeviceLimitError) else {},
            "traceback": traceback.format_exception(error)[-MOST_FRAMES:],
            "tensors": tensors[:MOST_TENSORS],
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(snapshot, indent=2) + "\n", encoding="utf-8")
            if is_gpu(self._device):
                write_allocations(self.path.with_suffix(".pickle"))
        except OSError as refusal:
            # Only logged, because a full disk must not hide the first error.
            logger.warning("%s: the memory snapshot cannot be written (%s)", self.path, refusal)
            return
        logger.warning("%s: out of device memory; what lives on the device is in %s", phase, self.path)


def _live_tensors(device: torch.device, kinds: dict[int, str]) -> list[dict[str, Any]]:
    by_storage: dict[int, dict[str, Any]] = {}
    # gc.get_objects leaves out frozen objects. vLLM freezes the whole heap when it starts, weights included.
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    objects = gc.get_objects()
    if frozen:
        gc.freeze()
    # torch.compile keeps fake tensors, which hold no memory.
    without = FakeTensor if active_fake_mode() is None else ()
    for tensor in objects:
        # Not isinstance(), which looks up the target of a weak proxy, and that may be gone.
        if not issubclass(type(tensor), torch.Tensor) or isinstance(tensor, without):
            continue
        for storage in device_storages(tensor, device):
            row = {
                "bytes": storage.nbytes(),
                "kind": kinds.get(storage._cdata, "other"),
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype),
            }
            # A storage counts only once, even if several tensors are views of it.
            by_storage.setdefault(storage._cdata, row)
    return sorted(by_storage.values(), key=lambda row: -row["bytes"])


# Limits of a process's memory. ``memory.device_limit_gb`` makes a large card behave like a small one. On a GPU the caching
# allocator refuses memory beyond the limit (``set_per_process_memory_fraction``), and the engine's share is a share of the limit.
# On a CPU the byte tracker refuses it. Sleeping memory and the CUDA context do not count.


def limit_bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * GIB)


@contextmanager
def memory_limits(memory: Memory, device: torch.device) -> Iterator[None]:
    limit, *host_bytes = map(limit_bytes, (memory.device_limit_gb, memory.host_limit_gb, memory.pinned_limit_gb))
    with device_limit(device, limit), host_limits(*host_bytes):
        yield


@contextmanager
def device_limit(device: torch.device, limit: int | None) -> Iterator[None]:
    if limit is None or not is_gpu(device):
        yield
        return
    before = device_memory_cap(device)
    # The cap is checked only when memory is taken from the driver. Blocks that an earlier job left in the cache would bypass it.
    empty_cache(device)
    cap_device_memory(device, limit + ledger_of(device).asleep.reserved_bytes)
    try:
        yield
    finally:
        cap_device_memory(device, before)


def available_bytes(device: torch.device, limit: int | None) -> int | None:
    if not is_gpu(device):
        return limit
    held_and_free = ledger_of(device).reserved() + memory_info(device)[0]
    return held_and_free if limit is None else min(limit, held_and_free)


class DeviceCap:
    """Keeps the ledger of a GPU correct, and the process within ``limit``, when parts of an engine go to sleep or wake.

    The allocator also counts sleeping memory, so the cap is the limit plus the bytes that sleep at that moment. It is computed
    again at each change. Waking maps memory without the allocator, so no cap can stop it; the limit is checked afterwards.
    """

    def __init__(self, device: torch.device, limit: int | None) -> None:
        self._device, self._limit = device, limit

    @contextmanager
    def changing(self, read: AsleepReader, refuse: bool = True) -> Iterator[None]:
        """Wrap the sleeping or waking of a part. ``read`` returns the bytes that sleep afterwards.

        Raises:
            torch.OutOfMemoryError: The process holds more than its limit afterwards, and ``refuse`` is true.
        """
        if not is_gpu(self._device):
            yield
            return
        ledger = ledger_of(self._device)
        try:
            with ledger.changing(read):
                yield
        finally:
            if self._limit is not None:
                cap_device_memory(self._device, self._limit + ledger.asleep.reserved_bytes)
        if refuse and self._limit is not None and ledger.reserved() > self._limit:
            raise torch.OutOfMemoryError(f"the allocator holds {ledger.reserved()} bytes of {self._limit}")
