"""The machine these tests run on. Each helper has a branch for a GPU and one for a CPU; the test bodies are the same on both.

``VERL_MEMOPT_GPU_TESTS_ON=cpu`` runs the bodies on the CPU. There the byte tracker stands in for the allocator, functions written
from torch's documentation stand in for GPU kernels, and a count stands in for a slow kernel.
"""

import ctypes
import gc
import importlib.util
import os
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.attention_cases import attention_of_one, gpu_operators_on_a_cpu
from tests.worker.test_policy import NothingWaits
from verl_memopt.distributed import device as device_room
from verl_memopt.memory.out_of_memory import memory_limits
from verl_memopt.model import attention, attention_dense
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker

VARIABLE = "VERL_MEMOPT_GPU_TESTS_ON"
MIB = 2**20

SLOW_CYCLES = 500_000
"""Clock cycles that a slowed kernel or copy waits: a third of a millisecond, longer than any tensor here takes to compute."""

_kind = "cuda"


def choose(kind):
    """Run the tests on ``cuda`` or on ``cpu``."""
    global _kind
    assert kind in ("cuda", "cpu"), f"{VARIABLE}={kind}: use cuda or cpu"
    _kind = kind


def kind():
    """Return ``cuda`` or ``cpu``."""
    return _kind


def on_gpu():
    return _kind == "cuda"


def missing():
    """Return what the machine lacks for the requested tests, if anything."""
    return "no CUDA device is visible" if on_gpu() and not torch.cuda.is_available() else None


def device():
    return device_room.local_device(_kind, 0)


def num_devices():
    """Return how many devices tests of several ranks may use. On a CPU two ranks share it."""
    return torch.cuda.device_count() if on_gpu() else 2


def has(package):
    """Return whether a package is installed, without importing it."""
    return importlib.util.find_spec(package) is not None


def size(gpu, cpu):
    return gpu if on_gpu() else cpu


@contextmanager
def one_rank():
    """A process group of one in the body, over NCCL on a GPU."""
    from verl_memopt.distributed.device import join_process_group, leave_process_group, training_mesh

    leave_process_group()
    join_process_group(device(), 0, 1, "", 0, 120)
    try:
        yield training_mesh(_kind, 1, -1)
    finally:
        leave_process_group()


@contextmanager
def on_cpu():
    """The CPU mesh of the present process group, which takes tensors of both devices."""
    from verl_memopt.distributed.device import training_mesh

    yield training_mesh("cpu", 1, -1)


@contextmanager
def gpu_kernels():
    """Let attention use GPU kernels in the body. On a CPU they are written out as torch documents them."""
    if on_gpu():
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(gpu_operators_on_a_cpu())
        for room in (attention, attention_dense):
            stack.enter_context(patch.object(room, "is_gpu", lambda _: True))
        if not has("flash_attn"):
            stack.enter_context(patch.dict(sys.modules, flash_attn=SimpleNamespace(flash_attn_varlen_func=_flash_attn)))
        yield


def _flash_attn(q, k, v, q_starts, k_starts, max_q, max_k, *, softmax_scale, causal, window_size):
    """What the package documents: q [T, heads, D], k and v [T, key heads, D], in half precision; window (positions back, 0)."""
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert causal
    assert (max_q, max_k) == tuple(int(starts.diff().max()) for starts in (q_starts, k_starts))
    assert window_size[1] == (-1 if window_size[0] == -1 else 0)
    outs, repeats = [], q.shape[1] // k.shape[1]
    for q_, k_, v_ in zip(*(x.float().split(q_starts.diff().tolist()) for x in (q, k, v)), strict=True):
        k_, v_ = (x.repeat_interleave(repeats, 1).transpose(0, 1) for x in (k_, v_))
        back = torch.arange(len(q_))[:, None] - torch.arange(len(q_))
        hidden = (back < 0) | ((back > window_size[0]) if window_size[0] >= 0 else False)
        out, _ = attention_of_one(q_.transpose(0, 1), k_, v_, hidden, softmax_scale)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs).to(q.dtype)


def has_flash_attn():
    """Return whether the package flash-attn can be called inside :func:`gpu_kernels`."""
    return has("flash_attn") or not on_gpu()


def synchronize():
    device_room.synchronize(device())


@contextmanager
def readable(worker):
    """Let a worker's parameters be read where they rest."""
    with ExitStack() as stack:
        if worker.policy.trained.home is not None:
            stack.enter_context(worker.policy.trained.home.readable())
        yield


# Bytes.


def peak_bytes(body):
    """Return (the result of ``body()``, the most device bytes that it held beyond those before)."""
    gc.collect()
    here = device()
    if on_gpu():
        device_room.synchronize(here)
        device_room.reset_peak_memory(here)
        before = device_room.memory_allocated(here)
        given = body()
        device_room.synchronize(here)
        return given, device_room.max_memory_allocated(here) - before
    with ByteTracker() as tracker:
        given = body()
    return given, tracker.peaks[DEVICE].bytes


LARGE = 20 * MIB
"""Bytes of the segments that torch's allocator takes for tensors of 1 to 10 MiB; for larger ones it takes multiples of 2 MiB."""


@contextmanager
def device_limit(memory):
    """Apply the process's device limit in the body. On a CPU the byte tracker refuses what goes beyond it."""
    with memory_limits(memory, device()):
        if on_gpu():
            yield
            device_room.empty_cache(device())
            return
        with ByteTracker(limit_bytes=round(memory.device_limit_gb * 2**30)):
            yield


def held_by_allocator():
    """Return the bytes that count towards the device limit."""
    here = device()
    if on_gpu():
        device_room.empty_cache(here)
        return device_room.memory_reserved(here)
    return 0


def live_bytes():
    """Return the bytes of live tensors by the allocator; 0 on a CPU."""
    return device_room.memory_allocated(device()) if on_gpu() else 0


def pinned_by_torch():
    """Return the page-locked bytes of torch's own host allocator; 0 if it does not say."""
    if not on_gpu() or not hasattr(torch.cuda, "host_memory_stats"):
        return 0
    stats = torch.cuda.host_memory_stats()
    return next((stats[name] for name in ("allocated_bytes.current", "active_bytes.current") if name in stats), 0)


def locked_bytes():
    """Return the resident memory of this process. It includes page-locked memory, whoever locked it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def used_bytes():
    """Return the device bytes in use by the driver's count; None on a CPU."""
    if not on_gpu():
        return None
    device_room.synchronize(device())
    free, total = device_room.memory_info(device())
    return total - free


def is_page_locked(tensor):
    """Return whether a host tensor is page-locked where it should be. A CPU has no such memory and needs none."""
    return tensor.is_pinned() if on_gpu() else True


# Waiting.


@contextmanager
def nothing_waits():
    """Fail at anything in the body for which the host waits for the device."""
    if not on_gpu():
        with NothingWaits():
            yield
        return
    device_room.synchronize(device())
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def waited(error):
    """Return whether an error comes from :func:`nothing_waits`."""
    return isinstance(error, AssertionError) or "synchroniz" in str(error)


# Slow kernels.

COMPUTE = {
    torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten._fused_adamw_, torch.ops.aten._foreach_add_,
    torch.ops.aten.embedding, torch.ops.aten.cat,
}  # fmt: skip
"""Operators before which a slow computation waits."""
COPIES = {torch.ops.aten.copy_, torch.ops.aten._foreach_copy_}
"""Operators before which a slow copy waits, on whatever stream they are queued."""
SLOW = {"computation": COMPUTE, "copies": COPIES, "both": COMPUTE | COPIES}


class Slowed(TorchDispatchMode):
    """Queues a long wait before some operators, on their stream. ``waits`` counts the waits by operator.

    Only copies between host and device are slowed. On a CPU nothing waits, and what would have waited is counted.
    """

    def __init__(self, what, cycles=SLOW_CYCLES):
        super().__init__()
        self.waits = Counter()
        self._slow, self._cycles = SLOW[what], cycles

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        if packet in self._slow and (packet not in COPIES or _between_tiers(args)):
            self.waits[str(packet)] += 1
            sleep(self._cycles)
        return func(*args, **(kwargs or {}))


def _between_tiers(args):
    # On a CPU both tiers are one device.
    return not on_gpu() or args[0].device.type != args[1].device.type if torch.is_tensor(args[1]) else False


def sleep(cycles):
    """Make the current stream wait. Nothing waits on a CPU."""
    if on_gpu():
        torch.cuda._sleep(cycles)


# vLLM's allocator.


def copy_bytes(target, source, num_bytes):
    """Copy between any two addresses, of the device or of the host."""
    if on_gpu():
        default = 4  # the runtime tells the direction from the addresses
        code = _runtime().cudaMemcpy(ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(num_bytes), default)
        assert code == 0, code
    else:
        ctypes.memmove(target, source, num_bytes)


def _runtime():
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = next(line.split()[-1] for line in lines if "libcudart" in line)
    return ctypes.CDLL(loaded)


def environment(name):
    return os.environ.get(name) or None
