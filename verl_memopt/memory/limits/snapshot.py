"""A snapshot of the memory at the moment when it runs out: what lives on the device, largest first."""

from __future__ import annotations

import gc
import json
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from verl_memopt.distributed.device import is_gpu, record_allocations, write_allocations
from verl_memopt.memory.limits.out_of_memory import is_out_of_memory
from verl_memopt.observe.byte_tracker import DeviceLimitError, device_storages
from verl_memopt.observe.phase import host_rss_bytes

MOST_TENSORS = 200
"""Tensors that a snapshot lists."""
MOST_FRAMES = 40
"""Lines of the traceback that a snapshot keeps: the last ones."""

logger = logging.getLogger(__name__)


def snapshot_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's snapshot. The allocator's history of a GPU lies beside it, as ``.pickle``."""
    return folder / f"out_of_memory_rank{rank}.json"


class MemorySnapshot:
    """Writes a snapshot when memory runs out inside :meth:`on_out_of_memory`.

    Args:
        folder: Where to write.
        rank: Of this process.
        device: Of this process.
        resident: Returns (kind, tensor) pairs of what exists between phases.
    """

    def __init__(
        self, folder: Path, rank: int, device: torch.device, resident: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    ) -> None:
        """Start to record the allocator's history on a GPU."""
        self.path = snapshot_path(folder, rank)
        self._device = device
        self._resident = resident
        if is_gpu(device):
            record_allocations()

    @contextmanager
    def on_out_of_memory(self, phase: str) -> Iterator[None]:
        """Write the snapshot when the body runs out of device memory, and let the error pass.

        Args:
            phase: Phase of the step.
        """
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._write(phase, error)
            raise

    def _write(self, phase: str, error: RuntimeError) -> None:
        """Write the snapshot. A disk that refuses is no second error."""
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
            logger.warning("%s: the memory snapshot cannot be written (%s)", self.path, refusal)
            return
        logger.warning("%s: out of device memory; what lives on the device is in %s", phase, self.path)


def _live_tensors(device: torch.device, kinds: dict[int, str]) -> list[dict[str, Any]]:
    """Return the tensors on a device, the largest first, each storage once."""
    by_storage: dict[int, dict[str, Any]] = {}
    for tensor in gc.get_objects():
        if not isinstance(tensor, torch.Tensor):
            continue
        for storage in device_storages(tensor, device):
            row = {
                "bytes": storage.nbytes(),
                "kind": kinds.get(storage._cdata, "other"),
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype),
            }
            # Views of one storage would count its bytes again.
            by_storage.setdefault(storage._cdata, row)
    return sorted(by_storage.values(), key=lambda row: -row["bytes"])
