"""The error when device memory runs out: it names the phase, what the device holds, and which settings to change."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from verl_memopt.config import schema
from verl_memopt.config.keys import shown, value_at
from verl_memopt.distributed.device import is_gpu, memory_info
from verl_memopt.errors import DeviceMemoryError, OutOfMemory, Way
from verl_memopt.memory.critic_rules import advices
from verl_memopt.memory.host_buffers import GIB
from verl_memopt.memory.knob import LOWER, Advice, Need, Work
from verl_memopt.memory.out_of_memory import PartDoesNotFitError, is_out_of_memory, release_frames, three_digits
from verl_memopt.observe.byte_tracker import DeviceLimitError, device_storages
from verl_memopt.observe.device_ledger import ledger_of
from verl_memopt.observe.phase import MIB


@dataclass(frozen=True)
class RunParts:
    settings: schema.ActorRolloutRef
    critic: schema.Critic | None = None
    reference: bool = True
    """The run has a separate reference model."""
    reward_model: schema.RewardModel | None = None
    devices: int = 1
    """Number of devices that hold these parts."""
    rank: int = 0
    """Rank of the worker that ran out of memory."""
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
        # The prefixes of keys that have no effect in the run.
        return tuple(start for start, is_there in present.items() if not is_there)


@contextmanager
def out_of_memory_report(
    phase: str,
    device: torch.device,
    resident: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    parts: RunParts,
    limit: int | None,
    work: Work | None = None,
) -> Iterator[None]:
    """Turn an out-of-memory error in the body of the ``with`` statement into a DeviceMemoryError with advice.

    The local variables of the body are cleared, so that its tensors are freed. The traceback still shows the body's lines.

    Args:
        phase: Phase of the step, for the message.
        device: Device of the body.
        resident: Called only after an error. Returns (kind, tensor) for each tensor that existed before the body. Some of them
            may be on the host.
        parts: The parts of the run. Advice names only their keys.
        limit: Bytes of the device that this process may use; None = all of them.
        work: The work of the body; None = unknown, so that advice does not depend on it.
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
    # The rest of the allocator's peak is not in the list of resident tensors, so passes have allocated it.
    kinds["activations"] += max(before - sum(kinds.values()), 0)
    if part is None:
        return Shortage(kinds, before, limit, str(error).split(". ")[0], _requested_bytes(str(error)), before)
    kinds[part.kind] += part.num_bytes
    return Shortage(kinds, before + part.num_bytes, limit, str(error), part.num_bytes, before, part.kind)


def _requested_bytes(message: str) -> int | None:
    # Parse the size of the failed allocation from torch's message; None if the message does not have it.
    match = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return None if match is None else round(float(match[1]) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}[match[2]])


def _bytes_by_kind(resident: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> Counter[str]:
    # Kind -> bytes on the device. A storage counts once, under the kind of the first tensor that uses it.
    kinds: Counter[str] = Counter()
    counted: set[int] = set()
    for kind, tensor in resident:
        for storage in device_storages(tensor, device):
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                kinds[kind] += storage.nbytes()
    return kinds


GROWING = ("activations", "logits", "kv")
"""Kinds of bytes that grow with the number of tokens or sequences that a call computes at once."""


@dataclass(frozen=True)
class Shortage:
    """What the device held when an allocation failed.

    Attributes:
        kinds: Kind -> bytes.
        held: Bytes on the device in total.
        limit: Bytes that the process may use; None = unknown.
        what: What failed, for the message: an operator or an error text.
        requested: Bytes of the failed allocation; None = unknown.
        held_before: Bytes on the device before the allocation; None = unknown.
        first: The kind that advice makes smaller first; None = the largest kind.
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
        terms = ", ".join(f"{kind} {three_digits(self.kinds[kind] / divisor)}" for kind in largest if self.kinds[kind])
        of = "" if self.limit is None else f" of {three_digits(self.limit / divisor)}"
        where = phase if parts.devices == 1 else f"{phase} on worker {parts.rank}"
        full = f"{where}: out of device memory at {three_digits(self.held / divisor)}{of} {unit} ({self.what}): {terms} {unit}"
        why = f"Most of it is {largest[0]}: " if largest and self.first is None else "To make room: "
        ways_out = "\n  or ".join(way.text for way in ways[:4]) if largest else ""
        text = f"{full}\n  {why}{ways_out}" if ways_out else full
        return DeviceMemoryError(text, OutOfMemory(phase, self.requested, self.held_before, self.limit), ways)

    def _need(self, work: Work, kind: str) -> Need:
        # The call failed before it reached its peak. So for kinds that grow with the work, half of the room is kept free for what
        # the call would still have allocated.
        grows, limit = kind in GROWING, self.held if self.limit is None else self.limit
        own = sum(num_bytes for name, num_bytes in self.kinds.items() if name == kind or (grows and name in GROWING))
        share = max(limit - (self.held - own), 0) / max(own, 1)
        return Need(min(share / 2 if grows else share, 1.0), max(self.held - limit, 0), limit, work)


def advice(phase: str, kinds: Iterable[str], parts: RunParts, need: Callable[[str], Need]) -> list[Way]:
    seen = parts.seen()
    # While a model or an engine is built, all of its bytes have the kind "built", so advice for any of its parts applies.
    kinds = [part for kind in kinds for part in (("params", "rollout weights", "optimizer") if kind == "built" else (kind,))]
    found = [advice for kind in kinds for advice in advices() if advice.kind == kind and advice.helps_in(phase)]
    found = [advice for advice in found if not advice.key.startswith(parts.absent()) and advice.when(seen)]
    asked = [(advice, need(advice.kind)) for advice in found]
    asked.sort(key=lambda pair: not _is_enough(*pair))
    # `_way` returns None for a setting that already has the advised value.
    ways = [_way(advice, seen, asked) for advice, asked in asked]
    return list({way.text: way for way in ways if way is not None}.values())


def _is_enough(advice: Advice, asked: Need) -> bool:
    # The advice alone is likely to be enough, unless even the longest sequence alone has no room.
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
