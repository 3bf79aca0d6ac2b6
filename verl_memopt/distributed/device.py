"""The device of a process. Only this file uses the API of an accelerator."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from verl_memopt.distributed.threads import threads_for
from verl_memopt.errors import ConfigError

DEVICES = ("auto", "cuda", "cpu")

Done: TypeAlias = torch.cuda.Event | None
"""An event that marks the end of work queued on a stream. None on a CPU."""


def resolve_device(name: str) -> str:
    """Return ``cuda`` or ``cpu`` for ``trainer.device``. ``auto`` means CUDA if a device is visible.

    Raises:
        ConfigError: The name is unknown, or it is cuda and no device is visible.
    """
    if name not in DEVICES:
        raise ConfigError(f"trainer.device={name}: unknown device. Use one of {', '.join(DEVICES)}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda: no CUDA device is visible to this process. Use trainer.device=cpu or auto.")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def local_device(kind: str, local_rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def device_count(kind: str) -> int:
    return torch.cuda.device_count() if kind == "cuda" else 1


@contextmanager
def limited_threads(num_processes: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, threads_for(num_processes)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def backend(device: torch.device) -> str:
    # The backend of collectives. CPU tensors always use gloo.
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def supports_flash(device: torch.device, dtype: torch.dtype) -> bool:
    # Flash-attention kernels need compute capability 8.0 or higher, and half precision.
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8


def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def memory_allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device)


def max_memory_allocated(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device)


def memory_reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device)


def max_memory_reserved(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device)


def reset_peak_memory(device: torch.device) -> None:
    torch.cuda.reset_peak_memory_stats(device)


def memory_info(device: torch.device) -> tuple[int, int]:
    return torch.cuda.mem_get_info(device)


def record_allocations() -> None:
    torch.cuda.memory._record_memory_history(max_entries=100_000)


def write_allocations(path: Path) -> None:
    """Write the allocator's blocks and history to a file. https://pytorch.org/memory_viz can show it."""
    torch.cuda.memory._dump_snapshot(str(path))


def cap_device_memory(device: torch.device, num_bytes: int | None) -> None:
    """Limit the bytes that this process's caching allocator may hold on a GPU.

    None, or at least the size of the device, removes the limit. The allocator also counts sleeping memory
    (:mod:`verl_memopt.observe.device_ledger`), so ``num_bytes`` must include it.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    # Torch multiplies the fraction by the total and truncates. The added half byte keeps rounding from losing a byte.
    fraction = 1.0 if num_bytes is None or num_bytes >= total else (num_bytes + 0.5) / total
    torch.cuda.set_per_process_memory_fraction(fraction, device)


def device_memory_cap(device: torch.device) -> int | None:
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return None if fraction >= 1.0 else round(fraction * torch.cuda.get_device_properties(device).total_memory)


def synchronize(device: torch.device) -> None:
    if device.type in STREAMS:
        STREAMS[device.type].synchronize(device)


def empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


PORTABLE = 1
"""Flag cudaHostRegisterPortable: the memory is page-locked for every device."""


def lock_pages(device: torch.device, address: int, num_bytes: int) -> str | None:
    """Page-lock host memory in place, so that copies to and from a GPU run asynchronously.

    The memory must begin and end at page borders, and share no page with other locked memory.

    Returns:
        The error of the CUDA driver. None = success.
    """
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(address, num_bytes, PORTABLE))
    if status == 0:
        return None
    # The runtime keeps an error until it is read. Read it here, or the next kernel launch would raise it.
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return f"CUDA error {status}"


def unlock_pages(device: torch.device, address: int) -> None:
    torch.cuda.synchronize(device)
    status = int(torch.cuda.cudart().cudaHostUnregister(address))
    assert status == 0, f"cudaHostUnregister: CUDA error {status}"


def device_rng_state(device: torch.device) -> torch.Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_device_rng_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)


STREAMS: dict[str, Any] = {"cuda": torch.cuda}
"""Device type -> a module with ``Stream``, ``current_stream``, ``stream`` and ``synchronize``, as in torch.cuda.

A device that is not listed runs its work in the order of the calls. Tests add a module for the CPU that delays copies as much
as a GPU may delay them.
"""


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    return STREAMS[device.type].Stream(device) if device.type in STREAMS else None


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    return STREAMS[device.type].current_stream(device) if device.type in STREAMS else None


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager:
    return nullcontext() if stream is None else STREAMS[stream.device.type].stream(stream)


def mark_done(stream: torch.cuda.Stream | None) -> Done:
    return None if stream is None else stream.record_event()


def wait_for(stream: torch.cuda.Stream | None, event: Done) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)


def wait_on_host(device: torch.device) -> None:
    stream = current_stream(device)
    if stream is not None:
        stream.synchronize()


class CopyStream:
    """Copies in one direction that run at the same time as the computation.

    The two directions of a bus are independent, so use one stream per direction. On a CPU a copy is done when :meth:`copy`
    returns, and waits have no effect.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = copy_stream(device)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Done:
        """Copy each source to its target after the work that is queued so far. Copies of one stream run in order.

        Keep all tensors alive until :meth:`wait`. Otherwise the allocator could reuse memory during the copy.

        Returns:
            An event for :meth:`wait`.
        """
        wait_for(self._stream, mark_done(current_stream(self._device)))
        with on_stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        return mark_done(self._stream)

    def wait(self, event: Done) -> None:
        # Only the current stream waits, not the host.
        wait_for(current_stream(self._device), event)


def gather_stream(module: nn.Module) -> torch.cuda.Stream | None:
    """Return the stream on which FSDP2 reads the shards of a unit in forward.

    It is None before the first forward, and for a module that is not an FSDP2 unit. FSDP2 makes this stream wait for the current
    stream only at the start of a forward, not before each unit.
    """
    if not isinstance(module, FSDPModule):
        return None
    return getattr(module._get_fsdp_state()._comm_ctx, "all_gather_copy_in_stream", None)


# Process groups and device meshes of the training ranks.


def join_process_group(
    device: torch.device,
    rank: int,
    world_size: int,
    address: str,
    port: int,
    timeout_seconds: float,
    listener: int | None = None,
) -> None:
    """Join the default process group, unless this process is in one already, such as the fake group of a planner or a test.

    ``address`` and ``port`` are those of rank 0. A single process does not use them. ``timeout_seconds`` is the longest wait for
    a collective, also in groups of some of the ranks. ``listener`` is the file descriptor of a socket that listens on rank 0's
    port already.
    """
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store: dist.Store = dist.HashStore()
    if world_size > 1:
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listener)
        # In groups of some ranks (replicas, sequences, tensor parallel) torch and vLLM would otherwise wait for half an hour.
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    dist.init_process_group(backend(device), store=store, rank=rank, world_size=world_size, timeout=timeout)


def leave_process_group() -> None:
    """Leave the default process group, if this process is in one, and clear torch's cache of shardings.

    Entries of this cache name process groups that no longer exist, and torch would use them in the next process group.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


def training_mesh(device_type: str, world_size: int, fsdp_size: int) -> DeviceMesh:
    if fsdp_size in (-1, world_size):
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    # A mesh of replicas x shards (HSDP).
    shape = (world_size // fsdp_size, fsdp_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


SENT_ALIGNMENT = 16
"""Tensors that share one storage begin at multiples of this number of bytes, which all dtypes and kernels can read."""


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def fsdp_params(unit: FSDPModule) -> list[FSDPParam]:
    group = unit._get_fsdp_state()._fsdp_param_group
    return [] if group is None else group.fsdp_params


def aligned_starts(sizes: Iterable[int]) -> list[int]:
    # Returns where tensors of these sizes begin in one storage, and as the last item its size.
    return list(accumulate((-(-size // SENT_ALIGNMENT) * SENT_ALIGNMENT for size in sizes), initial=0))


# Copies of small tensors to the device and back.


def sent_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy host tensors to the device.

    For a GPU this is one copy from page-locked memory, and the host does not wait for it. The results are views of one storage.
    """
    if not is_gpu(device) or not tensors:
        return [tensor.to(device, non_blocking=True) for tensor in tensors]
    starts = aligned_starts(tensor.nbytes for tensor in tensors)
    places = [slice(start, start + tensor.nbytes) for start, tensor in zip(starts, tensors, strict=False)]
    # The allocator of page-locked memory does not reuse it before the copy is done.
    staged = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for tensor, place in zip(tensors, places, strict=True):
        staged[place].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    sent = staged.to(device, non_blocking=True)
    return [sent[place].view(tensor.dtype).view(tensor.shape) for tensor, place in zip(tensors, places, strict=True)]


def fetched_together(tensors: Sequence[torch.Tensor], device: torch.device) -> Callable[[], list[torch.Tensor]]:
    """Start copying fp32 tensors to the host, and return a function that waits for the copies and returns them.

    From a GPU this is one copy to page-locked memory, so that the host can queue more work before it waits. Tensors on the host
    are not copied.
    """
    away = [tensor.detach() for tensor in tensors if tensor.device.type != "cpu"]
    if not away:
        return lambda: [tensor.detach() for tensor in tensors]
    whole = torch.cat([tensor.reshape(-1) for tensor in away])
    staged = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True).copy_(whole, non_blocking=True)
    done = mark_done(current_stream(device))

    def fetched() -> list[torch.Tensor]:
        if done is not None:
            done.synchronize()
        parts = iter(staged.split([tensor.numel() for tensor in away]))
        return [tensor.detach() if tensor.device.type == "cpu" else next(parts).view(tensor.shape) for tensor in tensors]

    return fetched


# Graphs: what the host launches again without launching each kernel.


class Capture(Protocol):
    """Records what functions do on the device."""

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run a function for the first time, which may load kernels and compile statements."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record a function without running it, and return what repeats it."""


class CudaGraphs(Capture):
    """CUDA graphs that never run at the same time, so they share their memory."""

    def __init__(self) -> None:
        # The allocator reuses memory only for the stream on which it was allocated.
        self._pool, self._stream = torch.cuda.MemPool(), torch.cuda.Stream()

    def warm_up(self, function: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.use_mem_pool(self._pool), torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        pool: Any = self._pool.id
        # Other threads, such as an engine's, may go on with operations that a capture forbids to its own thread.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph.replay
