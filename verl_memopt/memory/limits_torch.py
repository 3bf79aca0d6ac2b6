"""Limits of a process's device and host memory, and the allocators behind them.

Bytes saved: none by itself. ``memory.device_limit_gb`` makes a large card behave like a small one. On a GPU the caching allocator
refuses what goes beyond it (``set_per_process_memory_fraction``), and the engine's share is taken from it. On a CPU the byte
tracker refuses it, in the phases whose bytes are counted (``trainer.track_memory_every_steps``). Sleeping memory and the CUDA
context do not count. ``memory.host_limit_gb`` limits all host buffers of a worker, and ``memory.pinned_limit_gb`` the page-locked
ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl_memopt.config import schema
from verl_memopt.distributed.device import cap_device_memory, device_memory_cap, empty_cache, is_gpu, memory_info
from verl_memopt.memory.host_buffers import GIB, host_limits
from verl_memopt.observe.device_ledger import AsleepReader, ledger_of


def limit_bytes(gigabytes: float | None) -> int | None:
    """Return a limit of the settings in bytes."""
    return None if gigabytes is None else int(gigabytes * GIB)


@contextmanager
def memory_limits(memory: schema.Memory, device: torch.device) -> Iterator[None]:
    """Set this process's limits inside the body, and restore the earlier ones after it."""
    limit, *of_host = map(limit_bytes, (memory.device_limit_gb, memory.host_limit_gb, memory.pinned_limit_gb))
    with device_limit(device, limit), host_limits(*of_host):
        yield


@contextmanager
def device_limit(device: torch.device, limit: int | None) -> Iterator[None]:
    """Limit the allocator to ``limit`` bytes inside the body. Nothing is set on a CPU or without a limit."""
    if limit is None or not is_gpu(device):
        yield
        return
    before = device_memory_cap(device)
    # The cap is checked when memory is taken from the driver; blocks that an earlier job left in the cache would bypass it.
    empty_cache(device)
    cap_device_memory(device, limit + ledger_of(device).asleep.reserved_bytes)
    try:
        yield
    finally:
        cap_device_memory(device, before)


def available_bytes(device: torch.device, limit: int | None) -> int | None:
    """Return what this process may take of its device: the limit, on a GPU at most what it holds and what is free.

    None on a CPU without a limit.
    """
    if not is_gpu(device):
        return limit
    held_and_free = ledger_of(device).reserved() + memory_info(device)[0]
    return held_and_free if limit is None else min(limit, held_and_free)


class DeviceCap:
    """Keeps the ledger of a GPU right, and its process at its limit, while parts of an engine go to sleep and wake.

    The allocator counts what sleeps, so the cap is the limit plus what sleeps at that moment. It is computed anew each time.
    Waking maps memory without the allocator, past any cap, so the limit is compared with what is held afterwards.
    """

    def __init__(self, device: torch.device, limit: int | None) -> None:
        """Keep ``limit`` bytes of the device for this process; None for no limit. On a CPU nothing is done."""
        self._device, self._limit = device, limit

    @contextmanager
    def changing(self, read: AsleepReader, refuse: bool = True) -> Iterator[None]:
        """Wrap a part's going to sleep or waking.

        Args:
            read: Returns what sleeps afterwards.
            refuse: Raise where the process is over its limit afterwards.

        Raises:
            torch.OutOfMemoryError: the process holds more than its limit afterwards, and ``refuse``.
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
