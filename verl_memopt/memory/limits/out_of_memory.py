"""The report when device memory runs out: the phase, what is on the device, and which settings to change."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from verl_memopt.config import schema
from verl_memopt.config.keys import value_at
from verl_memopt.config.problems import shown
from verl_memopt.distributed.device import is_gpu, memory_info
from verl_memopt.errors import DeviceMemoryError
from verl_memopt.knobs.critic_rules import advices
from verl_memopt.knobs.knob import LOWER, Advice
from verl_memopt.memory.host.host_buffers import GIB
from verl_memopt.observe.byte_tracker import DeviceLimitError, device_storages
from verl_memopt.observe.device_ledger import ledger_of

OUT_OF_MEMORY = re.compile(r"CUDA (driver )?error: out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
"""Messages of libraries that allocate from the driver. vLLM's sleeping allocator says ``CUDA Error: out of memory``."""


Advise = Callable[[str, Iterable[str]], list[str]]
"""Returns what can be set to make room in a phase, for its kinds in their order."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is about device memory, whoever allocated it."""
    return isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY.search(str(error)) is not None


class PartDoesNotFitError(torch.OutOfMemoryError):
    """A part of the engine could not wake.

    Attributes:
        kind: What the part holds.
        num_bytes: Its size.
        held_bytes: Bytes of live tensors before it.
    """

    def __init__(self, kind: str, num_bytes: int, held_bytes: int, cause: str) -> None:
        """Build the message from the part and the cause."""
        super().__init__(f"waking {kind}, {_gib(num_bytes)} GiB: {cause}")
        self.kind, self.num_bytes, self.held_bytes = kind, num_bytes, held_bytes


@contextmanager
def wake_report(kind: str, num_bytes: int, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error while ``num_bytes`` of ``kind`` wake into a PartDoesNotFitError."""
    held = ledger_of(device).allocated() if is_gpu(device) else 0
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise PartDoesNotFitError(kind, num_bytes, held, str(error)) from error


@contextmanager
def out_of_memory_report(
    phase: str,
    device: torch.device,
    resident: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    settings: schema.ActorRolloutRef,
    limit: int | None,
    critic: schema.Critic | None = None,
) -> Iterator[None]:
    """Turn an out-of-memory error inside the body into a DeviceMemoryError that says what to do about it.

    The tensors of the body are freed. Its lines stay in the traceback.

    Args:
        phase: Phase of the step.
        device: Device of the process.
        resident: Returns (kind, tensor) pairs of what was there before the body. It is called after an error only, and may
            include tensors that rest on the host.
        settings: The section ``actor_rollout_ref``, that advice is based on.
        limit: Bytes that the process may take; None for no limit.
        critic: The section ``critic``; None in a run without a critic.
    """
    advise = partial(advice, settings=settings, critic=critic)
    try:
        yield
    except DeviceLimitError as error:
        requested = error.asked_bytes
        report = _error(phase, error.kinds, error.num_bytes, limit, error.op, advise, requested, error.num_bytes - requested)
        release_frames(error)
        raise report from None
    except RuntimeError as error:
        if not is_gpu(device) or not is_out_of_memory(error):
            raise
        report = _allocator_error(phase, device, resident(), advise, limit, error)
        release_frames(error)
        raise report from error


def _allocator_error(
    phase: str,
    device: torch.device,
    resident: Iterable[tuple[str, torch.Tensor]],
    advise: Advise,
    limit: int | None,
    error: RuntimeError,
) -> DeviceMemoryError:
    kinds = _bytes_by_kind(resident, device)
    cap = memory_info(device)[1] if limit is None else limit
    if not isinstance(error, PartDoesNotFitError):
        held = ledger_of(device).peak_allocated()
        # No list says what the rest of the allocator's peak was. What is not resident is what passes have made.
        kinds["activations"] += max(held - sum(kinds.values()), 0)
        return _error(phase, kinds, held, cap, str(error).split(". ")[0], advise, _requested_bytes(str(error)), held)
    requested, before = error.num_bytes, error.held_bytes
    kinds["activations"] += max(before - sum(kinds.values()), 0)
    kinds[error.kind] += requested
    return _error(phase, kinds, before + requested, cap, str(error), advise, requested, before, first=error.kind)


def _requested_bytes(message: str) -> int | None:
    """Return the bytes that torch's out-of-memory message says it tried to allocate, or None where it says nothing."""
    match = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return None if match is None else round(float(match[1]) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}[match[2]])


def release_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and of its causes; they would keep their tensors as long as the error exists."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _bytes_by_kind(resident: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> Counter[str]:
    """Return the bytes on the device by kind. Each storage counts once, under the first kind that names it."""
    kinds: Counter[str] = Counter()
    counted: set[int] = set()
    for kind, tensor in resident:
        for storage in device_storages(tensor, device):
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                kinds[kind] += storage.nbytes()
    return kinds


def _error(
    phase: str,
    kinds: dict[str, int],
    held: int,
    limit: int | None,
    what: str,
    advise: Advise,
    requested: int | None = None,
    held_before: int | None = None,
    first: str | None = None,
) -> DeviceMemoryError:
    """Return the error. first: the kind to make smaller before any other; without it, the largest."""
    largest = sorted(kinds, key=lambda kind: -kinds[kind])
    terms = ", ".join(f"{kind} {_gib(kinds[kind])}" for kind in largest if kinds[kind])
    ways = advise(phase, largest if first is None else [first, *largest])
    why = "" if not largest else f"Most of it is {largest[0]}: " if first is None else "To make room: "
    out = f" {why}{ways[0]}." if largest and ways else ""
    more = f" Also: {'; '.join(ways[1:4])}." if len(ways) > 1 else ""
    of = "" if limit is None else f" of {_gib(limit)}"
    text = f"{phase}: out of device memory at {_gib(held)}{of} GiB ({what}): {terms} GiB.{out}{more}"
    return DeviceMemoryError(text, phase, requested, held_before, limit)


def advice(phase: str, kinds: Iterable[str], settings: schema.ActorRolloutRef, critic: schema.Critic | None = None) -> list[str]:
    """Return what can be set to make room in a phase, for its kinds in their order; what is set already is left out.

    Args:
        phase: Phase of the step.
        kinds: Kinds of bytes, the most important first.
        settings: The section ``actor_rollout_ref``.
        critic: The section ``critic``; None in a run without a critic, where no key of it is named.
    """
    seen = schema.Settings(actor_rollout_ref=settings, critic=critic or schema.Critic())
    ways: dict[str, None] = {}
    for kind in kinds:
        for advice in (advice for advice in advices() if advice.kind == kind and advice.helps_in(phase)):
            exists = critic is not None or not advice.key.startswith("critic.")
            if exists and advice.when(seen) and (way := _way(advice, value_at(seen, advice.key))) is not None:
                ways[way] = None
    return list(ways)


def _way(advice: Advice, present: object) -> str | None:
    if advice.value == LOWER:
        return f"lower {advice.key}" + ("" if present is None else f" (now {shown(present)})")
    return None if present == advice.value else f"set {advice.key}={shown(advice.value)}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g}"
