"""The device a process computes on; the only file of the project that names an accelerator's API."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch

from verl_memopt.errors import ConfigError

DEVICES = ("auto", "cuda", "cpu")

Done: TypeAlias = torch.cuda.Event | None
"""The end of something queued on a stream; None on a CPU."""


def resolve_device(name: str) -> str:
    """Gives ``cuda`` or ``cpu`` for ``trainer.device``; ``auto`` takes CUDA when a device is visible.

    Errors: ConfigError for an unknown name, or for cuda where none is visible.
    """
    if name not in DEVICES:
        raise ConfigError(f"trainer.device={name}: unknown device. Use one of {', '.join(DEVICES)}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda: no CUDA device is visible to this process. Use trainer.device=cpu or auto.")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def local_device(kind: str, local_rank: int) -> torch.device:
    """Gives this process's device and makes it current."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def device_count(kind: str) -> int:
    """Gives the number of visible devices of a kind; a CPU counts as one."""
    return torch.cuda.device_count() if kind == "cuda" else 1


def backend(device: torch.device) -> str:
    """Gives the collective backend of a device; CPU tensors always have gloo beside it."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def is_gpu(device: torch.device) -> bool:
    """Says whether the device has an allocator of its own to ask for bytes."""
    return device.type == "cuda"


def supports_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Says whether flash-attention kernels run on this device with this dtype (compute capability 8.0 and up, half precision)."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8


def memory_allocated(device: torch.device) -> int:
    """Gives live tensor bytes as the allocator counts them. GPU only."""
    return torch.cuda.memory_allocated(device)


def max_memory_allocated(device: torch.device) -> int:
    """Gives the peak of live tensor bytes since the last reset. GPU only."""
    return torch.cuda.max_memory_allocated(device)


def memory_reserved(device: torch.device) -> int:
    """Gives bytes the caching allocator holds. GPU only."""
    return torch.cuda.memory_reserved(device)


def max_memory_reserved(device: torch.device) -> int:
    """Gives the peak of bytes the caching allocator held since the last reset. GPU only."""
    return torch.cuda.max_memory_reserved(device)


def reset_peak_memory(device: torch.device) -> None:
    """Makes the present the new peak. GPU only."""
    torch.cuda.reset_peak_memory_stats(device)


def memory_info(device: torch.device) -> tuple[int, int]:
    """Gives (free, total) bytes of the device as its driver sees it. GPU only."""
    return torch.cuda.mem_get_info(device)


def cap_device_memory(device: torch.device, num_bytes: int | None) -> None:
    """Lets this process's caching allocator hold at most so many bytes; None, or all of the device, lifts the cap. GPU only.

    The allocator counts what sleeps (:mod:`verl_memopt.observe.device_ledger`), so its bytes belong to ``num_bytes``.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    # Torch multiplies the fraction by the total and cuts the product: half a byte more keeps the last byte of the cap.
    fraction = 1.0 if num_bytes is None or num_bytes >= total else (num_bytes + 0.5) / total
    torch.cuda.set_per_process_memory_fraction(fraction, device)


def device_memory_cap(device: torch.device) -> int | None:
    """Gives the cap in bytes that :func:`cap_device_memory` set; None for no cap. GPU only."""
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return None if fraction >= 1.0 else round(fraction * torch.cuda.get_device_properties(device).total_memory)


def synchronize(device: torch.device) -> None:
    """Waits for the device's queued work; nothing to wait for on a CPU."""
    if device.type in STREAMS:
        STREAMS[device.type].synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Returns the allocator's unused blocks to the driver; nothing to return on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device."""


def lock_pages(device: torch.device, address: int, num_bytes: int) -> str | None:
    """Page-locks host memory in place, so that copies to and from the device need not wait; gives what the driver refused with.

    The memory must begin and end at pages that no other locked memory touches. GPU only.
    """
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(address, num_bytes, PORTABLE))
    if status == 0:
        return None
    # The runtime keeps a refusal until it is read, and the next kernel launch would raise it as its own error.
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return f"CUDA error {status}"


def unlock_pages(device: torch.device, address: int) -> None:
    """Undoes :func:`lock_pages` once every copy that was queued is done. GPU only."""
    torch.cuda.synchronize(device)
    status = int(torch.cuda.cudart().cudaHostUnregister(address))
    assert status == 0, f"cudaHostUnregister: CUDA error {status}"


def device_rng_state(device: torch.device) -> torch.Tensor | None:
    """Gives the device generator's state, or None on a CPU (whose generator is torch's own)."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_device_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Restores what :func:`device_rng_state` gave."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)


STREAMS: dict[str, Any] = {"cuda": torch.cuda}
"""Device type -> what offers ``Stream``, ``current_stream``, ``stream`` and ``synchronize`` as torch.cuda does.

A device that is not here has one order of work. Tests put a stand-in here for the CPU, which copies as late as a GPU may.
"""


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Gives a stream of its own for copies that run beside the computation; None on a CPU, where there is one order."""
    return STREAMS[device.type].Stream(device) if device.type in STREAMS else None


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Gives the stream that the next operation is queued on; None on a CPU."""
    return STREAMS[device.type].current_stream(device) if device.type in STREAMS else None


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager:
    """Queues the operations of the body on ``stream``; with None changes nothing."""
    return nullcontext() if stream is None else STREAMS[stream.device.type].stream(stream)


def mark_done(stream: torch.cuda.Stream | None) -> Done:
    """Gives an event that happens once everything queued on ``stream`` so far is done; None for no stream."""
    return None if stream is None else stream.record_event()


def wait_for(stream: torch.cuda.Stream | None, event: Done) -> None:
    """Makes what ``stream`` is given next wait for an event; nothing to wait for without either."""
    if stream is not None and event is not None:
        stream.wait_event(event)


class CopyStream:
    """Copies that run beside the computation. On a CPU a copy is done when it returns, and there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = copy_stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Done:
        """Copies once what is queued by now has run; gives an event to wait for. Copies of one stream keep their order.

        Neither tensor may be let go before :meth:`wait`: the allocator would hand out memory that is still copied.
        """
        wait_for(self._stream, mark_done(current_stream(self._device)))
        with on_stream(self._stream):
            target.copy_(source, non_blocking=self._stream is not None)
        return mark_done(self._stream)

    def wait(self, event: Done) -> None:
        """Lets what is queued from here on run after a copy; the host does not wait."""
        wait_for(current_stream(self._device), event)
