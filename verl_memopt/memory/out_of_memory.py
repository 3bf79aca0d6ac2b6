"""The report when device memory runs out: the phase, what is on the device, and which settings to change."""

from __future__ import annotations

import gc
import json
import logging
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from verl_memopt.config import schema
from verl_memopt.config.keys import shown, value_at
from verl_memopt.distributed.device import (
    cap_device_memory,
    device_memory_cap,
    empty_cache,
    is_gpu,
    memory_info,
    record_allocations,
    write_allocations,
)
from verl_memopt.errors import DeviceMemoryError, OutOfMemory, Way
from verl_memopt.memory.critic_rules import advices
from verl_memopt.memory.host_buffers import GIB, host_limits
from verl_memopt.memory.knob import LOWER, Advice, Need, Work
from verl_memopt.observe.byte_tracker import DeviceLimitError, device_storages
from verl_memopt.observe.device_ledger import AsleepReader, ledger_of
from verl_memopt.observe.phase import MIB, host_rss_bytes

OUT_OF_MEMORY = re.compile(r"CUDA (driver )?error: out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
"""Messages of libraries that allocate from the driver. vLLM's sleeping allocator says ``CUDA Error: out of memory``."""


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY.search(str(error)) is not None


class PartDoesNotFitError(torch.OutOfMemoryError):
    """A part of the engine, ``num_bytes`` of a kind, could not wake beside ``held_bytes`` of live tensors."""

    def __init__(self, kind: str, num_bytes: int, held_bytes: int, cause: str) -> None:
        super().__init__(f"waking {kind}, {_three_digits(num_bytes / GIB)} GiB: {cause}")
        self.kind, self.num_bytes, self.held_bytes = kind, num_bytes, held_bytes


@contextmanager
def wake_report(kind: str, num_bytes: int, device: torch.device) -> Iterator[None]:
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
    parts: RunParts,
    limit: int | None,
    work: Work | None = None,
) -> Iterator[None]:
    """Turn an out-of-memory error inside the body into a DeviceMemoryError that says what to do about it.

    The tensors of the body are freed; its lines stay in the traceback.

    Args:
        phase: Phase of the step, for the message.
        device: Device of the body.
        resident: Called after an error only: (kind, tensor) pairs of what existed before the body. They may rest on the host.
        parts: Sections of the run that advice may name.
        limit: Bytes this process may take; None = all.
        work: What the body computes; None = no advice depends on it.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DeviceLimitError):
            before = error.num_bytes - error.asked_bytes
            short = Shortage(error.kinds, error.num_bytes, limit, error.op, error.asked_bytes, before)
        elif is_gpu(device) and is_out_of_memory(error):
            short = _refused_by_allocator(device, resident(), memory_info(device)[1] if limit is None else limit, error)
        else:
            raise
        report = short.error(phase, parts, work)
        release_frames(error)
        raise report from (None if isinstance(error, DeviceLimitError) else error)


def _refused_by_allocator(
    device: torch.device, resident: Iterable[tuple[str, torch.Tensor]], limit: int, error: RuntimeError
) -> Shortage:
    kinds, part = _bytes_by_kind(resident, device), error if isinstance(error, PartDoesNotFitError) else None
    before = ledger_of(device).peak_allocated() if part is None else part.held_bytes
    # No list says what the rest of the allocator's peak was. What is not resident is what passes have made.
    kinds["activations"] += max(before - sum(kinds.values()), 0)
    if part is None:
        return Shortage(kinds, before, limit, str(error).split(". ")[0], _requested_bytes(str(error)), before)
    kinds[part.kind] += part.num_bytes
    return Shortage(kinds, before + part.num_bytes, limit, str(error), part.num_bytes, before, part.kind)


def _requested_bytes(message: str) -> int | None:
    # Parse how much torch's out-of-memory message says it tried to allocate; None if it does not say.
    match = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return None if match is None else round(float(match[1]) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}[match[2]])


def release_frames(error: BaseException | None) -> None:
    # Clear the frames of an error and its causes, which would keep their tensors alive as long as the error.
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _bytes_by_kind(resident: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> Counter[str]:
    # Bytes on the device by kind. Each storage counts once, under the first kind that names it.
    kinds: Counter[str] = Counter()
    counted: set[int] = set()
    for kind, tensor in resident:
        for storage in device_storages(tensor, device):
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                kinds[kind] += storage.nbytes()
    return kinds


@dataclass(frozen=True)
class RunParts:
    settings: schema.ActorRolloutRef
    critic: schema.Critic | None = None
    reference: bool = True
    """The run has a reference model of its own."""
    reward_model: schema.RewardModel | None = None
    devices: int = 1
    """Those that have these parts."""
    rank: int = 0
    """The worker that ran out of memory."""
    policy: bool = True

    def seen(self) -> schema.Settings:
        reward = self.reward_model or schema.RewardModel()
        trainer, critic = schema.Trainer(n_gpus_per_node=self.devices), self.critic or schema.Critic()
        return schema.Settings(actor_rollout_ref=self.settings, critic=critic, reward_model=reward, trainer=trainer)

    def absent(self) -> tuple[str, ...]:
        own_student = self.reward_model is not None and self.reward_model.model.path is not None
        present = {"critic.": self.critic is not None, "actor_rollout_ref.ref.": self.reference}
        present |= {"reward_model.": self.reward_model is not None, "reward_model.model.": own_student}
        policys = ("actor.fsdp_config.", "actor.optim.", "model.", "rollout.", "ref.")
        present |= {f"actor_rollout_ref.{start}": False for start in policys if not self.policy}
        # Prefixes of keys that have no effect in the run.
        return tuple(start for start, is_there in present.items() if not is_there)


GROWING = ("activations", "logits", "kv")
"""Kinds of bytes that grow with the tokens or sequences that a call computes at once."""


@dataclass(frozen=True)
class Shortage:
    """What was on the device (kind -> bytes, ``held`` in total) when it had no room for ``what``.

    ``first`` is the kind to make smaller before any other; default: the largest.
    """

    kinds: Mapping[str, int]
    held: int
    limit: int | None
    what: str
    requested: int | None = None
    held_before: int | None = None
    first: str | None = None

    def error(self, phase: str, parts: RunParts, work: Work | None = None) -> DeviceMemoryError:
        largest = sorted(self.kinds, key=lambda kind: -self.kinds[kind])
        ways = advice(
            phase, largest if self.first is None else [self.first, *largest], parts, partial(self._need, work or Work())
        )
        unit, divisor = ("GiB", GIB) if self.held >= GIB else ("MiB", MIB)
        terms = ", ".join(f"{kind} {_three_digits(self.kinds[kind] / divisor)}" for kind in largest if self.kinds[kind])
        of = "" if self.limit is None else f" of {_three_digits(self.limit / divisor)}"
        where = phase if parts.devices == 1 else f"{phase} on worker {parts.rank}"
        full = f"{where}: out of device memory at {_three_digits(self.held / divisor)}{of} {unit} ({self.what}): {terms} {unit}"
        why = f"Most of it is {largest[0]}: " if largest and self.first is None else "To make room: "
        ways_out = "\n  or ".join(way.text for way in ways[:4]) if largest else ""
        text = f"{full}\n  {why}{ways_out}" if ways_out else full
        return DeviceMemoryError(text, OutOfMemory(phase, self.requested, self.held_before, self.limit), ways)

    def _need(self, work: Work, kind: str) -> Need:
        # What was live when the device was full is not the peak: of bytes that grow with the work, half of the room is kept
        # free for what the call had still to make.
        grows, limit = kind in GROWING, self.held if self.limit is None else self.limit
        own = sum(num_bytes for name, num_bytes in self.kinds.items() if name == kind or (grows and name in GROWING))
        share = max(limit - (self.held - own), 0) / max(own, 1)
        return Need(min(share / 2 if grows else share, 1.0), max(self.held - limit, 0), limit, work)


def advice(phase: str, kinds: Iterable[str], parts: RunParts, need: Callable[[str], Need]) -> list[Way]:
    seen = parts.seen()
    # What is being built has one label: whatever a model or an engine consists of.
    kinds = [part for kind in kinds for part in (("params", "rollout weights", "optimizer") if kind == "built" else (kind,))]
    # Settings that already have the value are left out.
    found = [advice for kind in kinds for advice in advices() if advice.kind == kind and advice.helps_in(phase)]
    found = [advice for advice in found if not advice.key.startswith(parts.absent()) and advice.when(seen)]
    asked = [(advice, need(advice.kind)) for advice in found]
    asked.sort(key=lambda pair: not _is_enough(*pair))
    ways = [_way(advice, seen, asked) for advice, asked in asked]
    return list({way.text: way for way in ways if way is not None}.values())


def _is_enough(advice: Advice, asked: Need) -> bool:
    # Whether this advice is likely to be enough alone: not where even the longest sequence has no room.
    return advice.ends_it and (not asked.work.tokens or asked.one_fits)


def _way(advice: Advice, seen: schema.Settings, asked: Need) -> Way | None:
    present, key, work = value_at(seen, advice.key), advice.key, asked.work
    if advice.value != LOWER:
        text = f"set {key}={shown(advice.value)}"
        return None if present == advice.value else Way(text, ((key, advice.value),), advice.cost, _is_enough(advice, asked))
    number = advice.to(asked, seen) if advice.to else _scaled(present, asked.share)
    if number is None:
        return None
    where = f"the fullest micro-batch has {work.tokens} tokens, the longest sequence {work.longest}" if work.tokens else ""
    now = "; ".join(filter(None, ["" if present is None else f"now {shown(present)}", where]))
    return Way(f"lower {key} to {shown(number)}" + (f" ({now})" if now else ""), ((key, number),), advice.cost)


def _scaled(present: float | None, share: float) -> float | None:
    return None if present is None or not 0 < share < 1 else float(f"{present * share:.3g}")


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


# A snapshot of the memory at the moment when it runs out: what lives on the device, largest first.

MOST_TENSORS = 200
"""Tensors that a snapshot lists."""
MOST_FRAMES = 40
"""Lines of the traceback that a snapshot keeps: the last ones."""

logger = logging.getLogger(__name__)


class MemorySnapshot:
    """Writes a snapshot of this process to a folder when memory runs out inside :meth:`on_out_of_memory`.

    ``resident`` returns (kind, tensor) pairs of what exists between phases. On a GPU the allocator's history is recorded too.
    """

    def __init__(
        self, folder: Path, rank: int, device: torch.device, resident: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    ) -> None:
        self.path = folder / f"out_of_memory_rank{rank}.json"  # the allocator's history of a GPU lies beside it, as .pickle
        self._device = device
        self._resident = resident
        if is_gpu(device):
            record_allocations()

    @contextmanager
    def on_out_of_memory(self, phase: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._write(phase, error)
            raise

    def _write(self, phase: str, error: RuntimeError) -> None:
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
            # Logged alone: a full disk must not hide the first error.
            logger.warning("%s: the memory snapshot cannot be written (%s)", self.path, refusal)
            return
        logger.warning("%s: out of device memory; what lives on the device is in %s", phase, self.path)


def _live_tensors(device: torch.device, kinds: dict[int, str]) -> list[dict[str, Any]]:
    by_storage: dict[int, dict[str, Any]] = {}
    # gc.get_objects leaves out what gc.freeze has put aside. vLLM freezes the whole heap when it starts, weights included.
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    objects = gc.get_objects()
    if frozen:
        gc.freeze()
    # torch.compile keeps fake tensors of its own, which hold nothing.
    without = FakeTensor if active_fake_mode() is None else ()
    for tensor in objects:
        # By its type: isinstance() also asks what a weak proxy refers to, which may be gone.
        if not issubclass(type(tensor), torch.Tensor) or isinstance(tensor, without):
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


# Limits of a process's memory. ``memory.device_limit_gb`` makes a large card behave like a small one: on a GPU the caching
# allocator refuses what goes beyond it (``set_per_process_memory_fraction``), and the engine's share is taken from it. On a CPU
# the byte tracker refuses it. Sleeping memory and the CUDA context do not count.


def limit_bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * GIB)


@contextmanager
def memory_limits(memory: schema.Memory, device: torch.device) -> Iterator[None]:
    limit, *host_bytes = map(limit_bytes, (memory.device_limit_gb, memory.host_limit_gb, memory.pinned_limit_gb))
    with device_limit(device, limit), host_limits(*host_bytes):
        yield


@contextmanager
def device_limit(device: torch.device, limit: int | None) -> Iterator[None]:
    if limit is None or not is_gpu(device):
        yield
        return
    before = device_memory_cap(device)
    # The cap is checked when memory is taken from the driver; blocks that an earlier job left in the cache would bypass it.
    empty_cache(device)
    cap_device_memory(device, limit + ledger_of(device).asleep.reserved_bytes)
    try:
        yield
    finally:
        cap_device_memory(device, before)


def available_bytes(device: torch.device, limit: int | None) -> int | None:
    if not is_gpu(device):
        return limit
    held_and_free = ledger_of(device).reserved() + memory_info(device)[0]
    return held_and_free if limit is None else min(limit, held_and_free)


class DeviceCap:
    """Keeps a GPU's ledger right, and its process within ``limit``, while parts of an engine go to sleep and wake.

    The allocator counts what sleeps, so the cap is the limit plus what sleeps at that moment. It is computed anew each time.
    Waking maps memory without the allocator, past any cap, so the limit is compared with what is held afterwards.
    """

    def __init__(self, device: torch.device, limit: int | None) -> None:
        self._device, self._limit = device, limit

    @contextmanager
    def changing(self, read: AsleepReader, refuse: bool = True) -> Iterator[None]:
        """Wrap a part's going to sleep or waking; ``read`` returns what sleeps afterwards.

        Raises:
            torch.OutOfMemoryError: The process holds more than its limit afterwards, and ``refuse``.
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
