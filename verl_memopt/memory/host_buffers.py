"""The one place that takes host memory for what is moved off the device.

Whatever rests on the host lies in a buffer of this file, so its bytes are counted as host bytes on any machine: on a CPU
both tiers are the same memory, and only where a buffer was born tells them apart. Code that moves tensors takes a buffer,
copies into it and lets go of the device tensor; ``.to("cpu")`` would give the same storage back on a CPU and move nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from verl_memopt.distributed.device import is_gpu
from verl_memopt.errors import ConfigError
from verl_memopt.observe.byte_tracker import HOST, declare_host, scope

logger = logging.getLogger(__name__)

LIMIT_KEY = "memory.host_limit_gb"
GIB = 2**30


class HostAllocator:
    """Gives host buffers and keeps count of them. One a process: :func:`host_allocator`.

    limit_bytes: most bytes held at once, None for no limit. pinned_limit_bytes: most of them page-locked; a buffer beyond
    it is ordinary memory, whose copies wait.
    """

    def __init__(self, limit_bytes: int | None = None, pinned_limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.pinned_limit_bytes = pinned_limit_bytes
        self.held_bytes = 0
        self.pinned_bytes = 0
        self.peak_bytes = 0

    def empty(self, num_bytes: int, device: torch.device, kind: str) -> Tensor:
        """Gives uint8 [num_bytes] on the host, uninitialised; page-locked where ``device`` is a GPU and the limit allows.

        kind: what it will hold, for the byte tracker. Its bytes count until the last tensor on it is gone.
        Errors: ConfigError naming the limit and what is held already.
        """
        if self.limit_bytes is not None and self.held_bytes + num_bytes > self.limit_bytes:
            raise ConfigError(
                f"{LIMIT_KEY}={self.limit_bytes / GIB:.4g}: {kind} needs {num_bytes / GIB:.4g} GiB on the host, where "
                f"{self.held_bytes / GIB:.4g} GiB are taken. Raise it to at least "
                f"{(self.held_bytes + num_bytes) / GIB:.4g}, or switch an offload off."
            )
        pinned = is_gpu(device) and (self.pinned_limit_bytes is None or self.pinned_bytes + num_bytes <= self.pinned_limit_bytes)
        with scope(kind=kind, tier=HOST):
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        declare_host(buffer.untyped_storage())
        self._count(num_bytes, pinned)
        weakref.finalize(buffer.untyped_storage(), self._count, -num_bytes, pinned)
        return buffer

    def reset_peak(self) -> None:
        """Makes what is held now the new peak."""
        self.peak_bytes = self.held_bytes

    def _count(self, num_bytes: int, pinned: bool) -> None:
        self.held_bytes += num_bytes
        self.pinned_bytes += num_bytes if pinned else 0
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


_allocator = HostAllocator()


def host_allocator() -> HostAllocator:
    """Gives this process's allocator."""
    return _allocator


@contextmanager
def host_limits(limit_bytes: int | None, pinned_limit_bytes: int | None) -> Iterator[HostAllocator]:
    """Sets this process's limits inside the body."""
    before = (_allocator.limit_bytes, _allocator.pinned_limit_bytes)
    _allocator.limit_bytes, _allocator.pinned_limit_bytes = limit_bytes, pinned_limit_bytes
    try:
        yield _allocator
    finally:
        _allocator.limit_bytes, _allocator.pinned_limit_bytes = before


def host_buffer(num_bytes: int, device: torch.device, kind: str) -> Tensor:
    """Gives uint8 [num_bytes] from this process's allocator, to hold ``kind`` of ``device`` while it rests on the host."""
    return _allocator.empty(num_bytes, device, kind)
