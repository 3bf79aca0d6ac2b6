"""Limits of a process's device and host memory, and the allocators behind them.

Bytes saved: nothing by itself. ``memory.device_limit_gb`` makes any card as small as the one that is meant: on a GPU the caching
    allocator refuses what goes beyond (``set_per_process_memory_fraction``) and the engine's share is taken from the limit;
    on a CPU the byte tracker refuses it in the phases whose bytes are counted (``trainer.track_memory_every_steps``). What
    sleeps is not inside the limit, nor is the CUDA context. ``memory.host_limit_gb`` bounds all host buffers of a worker, and
    ``memory.pinned_limit_gb`` the page-locked ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl_memopt.config import schema
from verl_memopt.distributed.device import cap_device_memory, device_memory_cap, empty_cache, is_gpu
from verl_memopt.memory.host.host_buffers import GIB, host_limits
from verl_memopt.observe.device_ledger import AsleepReader, ledger_of


def limit_bytes(gigabytes: float | None) -> int | None:
    """Gives a limit of the settings in bytes."""
    return None if gigabytes is None else int(gigabytes * GIB)


@contextmanager
def memory_limits(memory: schema.Memory, device: torch.device) -> Iterator[None]:
    """Sets this process's limits inside the body; after it, those that were there before hold again."""
    limit = limit_bytes(memory.device_limit_gb)
    with device_limit(device, limit), host_limits(limit_bytes(memory.host_limit_gb), limit_bytes(memory.pinned_limit_gb)):
        yield


@contextmanager
def device_limit(device: torch.device, limit: int | None) -> Iterator[None]:
    """Lets the allocator hold at most ``limit`` bytes inside the body; nothing to set on a CPU or without a limit."""
    if limit is None or not is_gpu(device):
        yield
        return
    before = device_memory_cap(device)
    # The cap is asked when memory is taken from the driver; blocks that an earlier job left in the cache would pass it.
    empty_cache(device)
    cap_device_memory(device, limit + ledger_of(device).asleep.reserved_bytes)
    try:
        yield
    finally:
        cap_device_memory(device, before)


def engine_share(utilization: float, total: int, limit: int | None) -> float:
    """Gives the share of a device's ``total`` bytes that is ``utilization`` of the limit, where there is one."""
    return utilization if limit is None or limit >= total else utilization * limit / total


class DeviceCap:
    """Keeps the ledger of a GPU right, and its process at its limit, while an engine's parts go to sleep and wake.

    The allocator counts what sleeps, so the cap is the limit and what sleeps at that moment. It is computed afresh each time.
    What wakes is mapped behind the allocator's back, past any cap: the limit is compared with what is held after it.
    """

    def __init__(self, device: torch.device, limit: int | None) -> None:
        """limit: bytes that the process may take of the device; None for no limit. On a CPU there is nothing to keep."""
        self._device = device
        self._limit = limit

    @contextmanager
    def changing(self, read: AsleepReader, refuse: bool = True) -> Iterator[None]:
        """Around a part's going to sleep or waking. read: gives what sleeps after it.

        Raises:
            torch.OutOfMemoryError: the process holds more than its limit after it, and ``refuse``.
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
