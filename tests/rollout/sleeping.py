"""vLLM's own sleeping allocator on a simulated device: its Python half is the real one, its C half is written here.

The C half follows vLLM's csrc/cumem_allocator.cpp, faults included: an error of the driver stays until a call from Python
reports it, and while it stays every allocation fails.
"""

import dataclasses
from types import SimpleNamespace

import torch

from tests.observe.simulated_device import GRANULARITY, MIB
from verl_memopt.memory.out_of_memory import DeviceCap
from verl_memopt.rollout.vllm_process import asleep_in_vllm


class CumemExtension:
    """The functions of ``vllm.cumem_allocator``, and the pluggable allocator that torch calls."""

    def __init__(self, device):
        self._device = device
        self._driver = device.driver
        self.error = ""
        """What the driver said last; whatever is asked while it is there fails."""

    def init_module(self, on_malloc, on_free):
        self._on_malloc, self._on_free = on_malloc, on_free

    def malloc(self, size):
        if self.error:
            return None
        size = -(-size // GRANULARITY) * GRANULARITY
        address = self._driver.reserve(size)
        self._on_malloc((0, size, address, address))
        self._map(address)
        if not self.error:
            return address
        self._driver.release(address)
        return None

    def free(self, address):
        try:
            self._on_free(address)
        except KeyError:
            # vLLM's trim gave the memory back before; the C half says so and returns.
            return
        self._unmap(address)
        self._driver.release(address)

    def create_and_map(self, device, size, address, handle):
        self._map(address)
        self._raise()

    def unmap_and_release(self, device, size, address, handle):
        self._unmap(address)
        self._raise()

    def _map(self, address):
        if not self.error and not self._driver.map(address):
            self.error = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:128"

    def _unmap(self, address):
        if not self.error and not self._driver.unmap(address):
            self.error = "CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:174"

    def _raise(self):
        error, self.error = self.error, ""
        if error:
            raise RuntimeError(error)


class MemPool:
    """torch.cuda.MemPool: the pool is released with the last reference to this object."""

    def __init__(self, device, extension):
        self._device = device
        self.pool = device.private_pool(extension.malloc, extension.free)

    def snapshot(self):
        return self._device.snapshot(self.pool)

    def __del__(self):
        self.pool.in_use = False
        self._device.empty_cache()


def sleeping_allocator(device, monkeypatch):
    """Return a new CuMemAllocator of vLLM on a simulated device, and its C half."""
    from vllm.device_allocator import cumem

    extension = CumemExtension(device)
    for name, value in {
        "init_module": extension.init_module,
        "python_create_and_map": extension.create_and_map,
        "python_unmap_and_release": extension.unmap_and_release,
        "cumem_available": True,
        "libcudart": SimpleNamespace(cudaMemcpy=lambda target, source, size: None),
        "current_alloc_conf": lambda: "",
        # A full collection of this process takes longer than all the rest, and there is nothing to collect.
        "gc": SimpleNamespace(collect=lambda: None),
    }.items():
        monkeypatch.setattr(cumem, name, value)
    monkeypatch.setattr(cumem, "PIN_MEMORY", False)
    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", lambda *_: SimpleNamespace(_allocator=extension))
    monkeypatch.setattr(torch.cuda.memory, "MemPool", lambda allocator: MemPool(device, allocator))
    monkeypatch.setattr(torch.cuda.memory, "use_mem_pool", lambda pool: device.using(pool.pool))
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", cumem.CuMemAllocator())
    return cumem.CuMemAllocator.instance, extension


class SleepingWorker:
    """Uses the allocator as vLLM's GPU worker does: loads weights, allocates a KV cache, sleeps and wakes."""

    def __init__(self, device, allocator):
        self._device, self._allocator = device, allocator
        self.weights = []
        self.kv = []

    def load(self, sizes, scratch=0):
        """Allocate tensors for the weights. ``scratch``: bytes that loading allocates and frees, and vLLM returns itself."""
        assert self._allocator.get_current_usage() == 0, "CuMem allocator can only be used for one instance per process."
        with self._allocator.use_memory_pool(tag="weights"):
            passing = self._device.empty(scratch) if scratch else None
            self.weights = [self._device.empty(size) for size in sizes]
            del passing

    def take_cache(self, sizes):
        with self._allocator.use_memory_pool(tag="kv_cache"):
            self.kv = [self._device.empty(size) for size in sizes]

    def sleep(self, level=2):
        self._allocator.sleep(offload_tags=("weights", "runtime") if level == 1 else ("runtime",))

    def wake_up(self, tags=None):
        self._allocator.wake_up(tags)

    def shutdown(self):
        self.weights.clear()
        self.kv.clear()
        self._allocator.release_pools()
        self._device.empty_cache()


GPU = torch.device("cuda", 0)


def simulated_gpu_worker(device, allocator, monkeypatch):
    """Let vLLM's CPU worker treat the simulated device as vLLM's GPU worker treats a real one.

    Its tensors on the device belong to the model runner, as a model's do.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker

    load_model, initialize, shutdown = CPUWorker.load_model, CPUWorker.initialize_from_config, CPUWorker.shutdown

    def load(worker, **options):
        worker.model_runner.simulated = SleepingWorker(device, allocator)
        worker.model_runner.simulated.load([200 * MIB, 30 * MIB, 5 * MIB], scratch=64 * MIB)
        load_model(worker, **options)

    def take_cache(worker, config):
        worker.model_runner.simulated.take_cache([512 * MIB] * 2)
        initialize(worker, config)

    def shut_down(worker):
        shutdown(worker)
        worker.model_runner.simulated.shutdown()

    monkeypatch.setattr(CPUWorker, "load_model", load)
    monkeypatch.setattr(CPUWorker, "initialize_from_config", take_cache)
    monkeypatch.setattr(CPUWorker, "sleep", lambda worker, level=1: worker.model_runner.simulated.sleep(level))
    monkeypatch.setattr(CPUWorker, "wake_up", lambda worker, tags=None: worker.model_runner.simulated.wake_up(tags))
    monkeypatch.setattr(CPUWorker, "discard", lambda worker, tags: allocator.discard(tags))
    monkeypatch.setattr(CPUWorker, "shutdown", shut_down)


def on_simulated_gpu(engine, limit=None):
    """Let a started engine sleep and wake as on a GPU."""
    engine._can_sleep = True
    engine._place = dataclasses.replace(engine._place, device=GPU, device_limit_bytes=limit)
    engine._cap = DeviceCap(GPU, limit)
    with engine._cap.changing(asleep_in_vllm):
        pass
    return engine
