"""The GPU memory that a process really holds: the caching allocator's counters minus the sleeping memory.

A sleeping vLLM engine keeps its tensors and their addresses, but returns the memory behind them to the driver. Torch does not
know this: ``memory_allocated``, ``memory_reserved`` and their peaks still count it. The ledger knows how much that is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

from verl_memopt.distributed import device as device_room
from verl_memopt.observe.byte_tracker import HOST, active_tracker, declare_host, mark, scope, storages_of

logger = logging.getLogger(__name__)

GIB = 2**30
TOLERANCE_BYTES = GIB
"""Largest difference between driver and ledger without a warning. Libraries load kernels and buffers of their own over time."""


@dataclass(frozen=True)
class Asleep:
    """Bytes that the allocator counts but the device does not hold."""

    reserved_bytes: int = 0
    """Bytes of whole segments."""
    allocated_bytes: int = 0
    """Bytes of the live tensors in them."""


AsleepReader: TypeAlias = Callable[[], Asleep | None]
"""Returns the memory that sleeps now, from the records of the engine that put it to sleep. None = they cannot be read."""


class DeviceLedger:
    """The memory figures of one process on one GPU. Get it from :func:`ledger_of`: there is one per device."""

    def __init__(self, device: torch.device) -> None:
        self.asleep = Asleep()
        self._device = device
        self._peak_allocated = 0
        self._peak_reserved = 0
        self._outside: int | None = None
        self._warned: set[str] = set()

    def allocated(self) -> int:
        return max(device_room.memory_allocated(self._device) - self.asleep.allocated_bytes, 0)

    def reserved(self) -> int:
        return max(device_room.memory_reserved(self._device) - self.asleep.reserved_bytes, 0)

    def used(self) -> int:
        # Used bytes of the device by the driver's count, which includes all processes and contexts.
        free, total = device_room.memory_info(self._device)
        return total - free

    def peak_allocated(self) -> int:
        return self._peaks(self.asleep)[0]

    def peak_reserved(self) -> int:
        return self._peaks(self.asleep)[1]

    def _peaks(self, asleep: Asleep) -> tuple[int, int]:
        # The allocated and the reserved peak. `asleep` must be the sleeping memory since the peaks were last reset.
        allocated = device_room.max_memory_allocated(self._device) - asleep.allocated_bytes
        reserved = device_room.max_memory_reserved(self._device) - asleep.reserved_bytes
        return max(self._peak_allocated, allocated), max(self._peak_reserved, reserved)

    def reset_peaks(self) -> None:
        device_room.reset_peak_memory(self._device)
        self._peak_allocated = self._peak_reserved = 0

    @contextmanager
    def changing(self, read: AsleepReader) -> Iterator[None]:
        """Wrap each call that puts memory to sleep or wakes it, also one that may fail half-way.

        Peaks are kept separately for each stretch between two such calls, because the sleeping bytes to subtract differ before
        and after the call. During the call, the smaller size of the two is subtracted. Empty torch's cache before a wake-up.
        Otherwise the cached blocks that the wake-up frees are counted together with the memory that wakes.
        """
        # The driver's figures are correct only after the queued work is done.
        device_room.synchronize(self._device)
        before = self.asleep
        self._end_stretch(before)
        free, reserved = device_room.memory_info(self._device)[0], device_room.memory_reserved(self._device)
        try:
            yield
        finally:
            device_room.synchronize(self._device)
            freed = device_room.memory_info(self._device)[0] - free
            # The allocator may return cached blocks to the driver in the body. They add to `freed`, and their reserved bytes
            # cancel them.
            unmapped = freed + device_room.memory_reserved(self._device) - reserved
            self.asleep = self._agreed(read(), before.reserved_bytes + unmapped)
            reserved = min(before.reserved_bytes, self.asleep.reserved_bytes)
            self._end_stretch(Asleep(reserved, min(before.allocated_bytes, self.asleep.allocated_bytes)))

    def check(self, phase: str) -> None:
        outside = self.used() - self.reserved()
        if self._outside is None:
            self._outside = outside
        elif abs(outside - self._outside) > TOLERANCE_BYTES:
            self._warn_once(
                "outside",
                f"{phase}: {outside / GIB:.2f} GiB of the device are in use outside this process's allocator. At the start "
                f"it was {self._outside / GIB:.2f} GiB. Another process took or freed memory, or the memory figures are wrong by "
                "the difference.",
            )

    def _agreed(self, reported: Asleep | None, measured: int) -> Asleep:
        if reported is None:
            words = "The engine's records of its sleeping memory cannot be read. The driver's free memory is used instead."
            self._warn_once("unread", words)
            within = min(max(measured, 0), device_room.memory_reserved(self._device))
            return Asleep(within, min(within, device_room.memory_allocated(self._device)))
        if abs(reported.reserved_bytes - measured) > TOLERANCE_BYTES:
            self._warn_once(
                "disagreed",
                f"The engine says that {reported.reserved_bytes / GIB:.2f} GiB of its memory are asleep; the driver's "
                f"free memory says {measured / GIB:.2f} GiB. The engine's figure is used: another process "
                "may have changed the driver's.",
            )
        return reported

    def _end_stretch(self, asleep: Asleep) -> None:
        self._peak_allocated, self._peak_reserved = self._peaks(asleep)
        device_room.reset_peak_memory(self._device)

    def _warn_once(self, kind: str, words: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(words)


_ledgers: dict[torch.device, DeviceLedger] = {}


def ledger_of(device: torch.device) -> DeviceLedger:
    assert device_room.is_gpu(device), device
    return _ledgers.setdefault(device, DeviceLedger(device))


# Labels for the allocations of FSDP2: gathered parameters, collective buffers and sharded gradients.
#
# The functions patched here are private to torch. No other file uses them.


PATCHED = (
    (fsdp, "foreach_all_gather"),
    (fsdp, "foreach_reduce"),
    (fsdp.FSDPParamGroup, "wait_for_unshard"),
    (fsdp.FSDPParam, "to_accumulated_grad_if_needed"),
)
"""Owners and names under which FSDP2 looks up the functions."""


@contextmanager
def fsdp_kinds() -> Iterator[None]:
    """Label FSDP2's storages with the active tracker while the body runs.

    Gathered parameters are created while FSDP2 waits for the unshard. Collective buffers are created in its all-gather and reduce
    functions. A sharded gradient gets the kind ``grads`` when the reduce returns. An unsharded gradient that is not reduced gets
    it when FSDP2 stores it.
    """
    originals = [getattr(owner, name) for owner, name in PATCHED]
    gather, reduce, wait, accumulate = originals
    gathering, waiting = _inside("collective buffers", gather), _inside("gathered parameters", wait)
    replacements = (gathering, _marking_grads(reduce), waiting, _marking_unsharded_grad(accumulate))
    for (owner, name), replacement in zip(PATCHED, replacements, strict=True):
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name), original in zip(PATCHED, originals, strict=True):
            setattr(owner, name, original)


def _inside(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with scope(kind=kind):
            return function(*args, **kwargs)

    return scoped


def _marking_grads(reduce: Callable[..., Any]) -> Callable[..., Any]:
    scoped = _inside("collective buffers", reduce)

    @wraps(reduce)
    def marking(fsdp_params: Any, *args: Any, **kwargs: Any) -> Any:
        result = scoped(fsdp_params, *args, **kwargs)
        mark("grads", [p.sharded_param.grad for p in fsdp_params if p.sharded_param.grad is not None])
        return result

    return marking


def _marking_unsharded_grad(accumulate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(accumulate)
    def marking(fsdp_param: Any) -> Any:
        result = accumulate(fsdp_param)
        accumulated = fsdp_param.unsharded_accumulated_grad
        mark("grads", [grad for grad in (accumulated, fsdp_param._unsharded_param.grad) if grad is not None])
        return result

    return marking


# Labels for the bytes of an optimizer and of plain gradients. They do nothing if no tracker is active.


@contextmanager
def optimizer_scope(optimizer: torch.optim.Optimizer, on_host: bool = False) -> Iterator[None]:
    """Label allocations of ``step()`` as ``optimizer scratch``, and the state that remains after it as ``optimizer``.

    ``on_host``: the step runs on the host, and its state stays there.
    """
    tier = HOST if on_host else None
    with scope("optimizer scratch", tier):
        yield
    for storage in (storage for tensor in state_tensors(optimizer) for storage in storages_of(tensor)) if on_host else ():
        declare_host(storage)
    mark("optimizer", state_tensors(optimizer), tier)


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    # Every tensor of an optimizer's state, and the remainders of fp32 master weights, which our optimizers keep outside `state`.
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    remainders: Callable[[], Iterable[torch.Tensor]] = getattr(optimizer, "remainders", tuple)
    yield from remainders()


@contextmanager
def gradient_kinds(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    # Label the gradients of plain parameters as ``grads`` when they are accumulated.
    def label(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            mark("grads", [parameter.grad])

    plain = [p for p in parameters if p.requires_grad and type(p) is torch.nn.Parameter] if active_tracker() else []
    hooks = [p.register_post_accumulate_grad_hook(label) for p in plain]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
