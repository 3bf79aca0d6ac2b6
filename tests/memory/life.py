"""A worker's life on a simulated device: engine, policy and steps, each phase measured and compared with the truth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from tests.observe.simulated_device import MIB, SimulatedDevice
from tests.rollout.sleeping import SleepingWorker, sleeping_allocator
from verl_memopt.distributed import device as device_room
from verl_memopt.memory.out_of_memory import DeviceCap
from verl_memopt.observe.device_ledger import Asleep
from verl_memopt.observe.phase import MemoryProbe, PhaseMemory
from verl_memopt.rollout.vllm_process import asleep_in_vllm

GPU = torch.device("cuda", 0)
WEIGHTS = [700 * MIB] + [30 * MIB, 3 * MIB, 400 * 2**10] * 8
CACHE = [512 * MIB] * 6
PARAMS = [64 * MIB] * 24
SCRATCH = 900 * MIB


class Life:
    """Runs the phases. ``figures`` are reported, ``truths`` are the true (peak live, live, peak held) of the same phases."""

    def __init__(self, device: SimulatedDevice, monkeypatch: Any, limit: int | None = None, books: bool = True) -> None:
        """books: whether the engine's own books can be read; without them the driver's free memory is."""
        self.device = device
        self.allocator, self.extension = sleeping_allocator(device, monkeypatch)
        self.engine = SleepingWorker(device, self.allocator)
        self.probe = MemoryProbe(GPU, list, limit)
        self.cap = DeviceCap(GPU, limit)
        self.read = asleep_in_vllm if books else self._unread
        self.policy: list[Any] = []
        self.figures: list[PhaseMemory] = []
        self.truths: list[tuple[int, int, int]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.probe.phase(name, track=False) as report:
            self.device.forget_peaks()
            yield
            truth = (self.device.peak_live, self.device.live, self.device.peak_held)
        self.figures.append(report())
        self.truths.append(truth)

    def init(self) -> None:
        with self.phase("init"):
            with self.cap.changing(self.read):
                self.engine.load(WEIGHTS, scratch=SCRATCH)
                self.engine.take_cache(CACHE)
            self.sleep()
            self.policy = [self.device.empty(size) for size in PARAMS]

    def step(self) -> None:
        with self.phase("update_actor"):
            self.compute(3_000 * MIB)
        with self.phase("update_weights"):
            self.wake("weights")
            self.compute(500 * MIB)
        with self.phase("gen"):
            self.wake("kv_cache")
            self.compute(200 * MIB)
        with self.phase("sleep"):
            self.sleep()

    def compute(self, size: int) -> None:
        """Allocate tensors of odd sizes and free them. The cache keeps their segments."""
        taken = [self.device.empty(part) for part in (size // 2, size // 3 + 1, size // 7, 5_000)]
        taken.clear()

    def sleep(self) -> None:
        with self.cap.changing(self.read):
            self.engine.sleep()

    def wake(self, part: str) -> None:
        device_room.empty_cache(GPU)
        with self.cap.changing(self.read):
            self.engine.wake_up([part])

    def room(self) -> int:
        """Allocate blocks until the allocator refuses the smallest, return the bytes that the device then held, and free them."""
        device_room.empty_cache(GPU)
        taken: list[Any] = []
        for size in (512 * MIB, 32 * MIB, MIB):
            self._fill(size, taken)
        held = self.device.held
        taken.clear()
        device_room.empty_cache(GPU)
        return held

    def _fill(self, size: int, taken: list[Any]) -> None:
        with suppress(torch.OutOfMemoryError):
            while True:
                taken.append(self.device.empty(size))

    @staticmethod
    def _unread() -> Asleep | None:
        return None

    def reported(self) -> list[tuple[int | None, int | None, int | None]]:
        return [(memory.peak_allocated_bytes, memory.allocated_bytes, memory.peak_reserved_bytes) for memory in self.figures]
