"""Limits of a process's device and host memory, the report when one is passed, and the allocators behind them.

Saves: nothing by itself. ``memory.device_limit_gb`` makes any card as small as the one that is meant: on a GPU the caching
    allocator refuses what goes beyond (``set_per_process_memory_fraction``) and the engine's share is taken from the limit;
    on a CPU the byte tracker refuses it in the phases whose bytes are counted (``trainer.track_memory_every_steps``). The
    CUDA context is not inside the limit. ``memory.host_limit_gb`` bounds all host buffers of a worker, and
    ``memory.pinned_limit_gb`` the page-locked ones.
Costs: nothing within the limits; past the pinned limit, copies that wait.
Pairs with: every offload, whose bytes rest in host buffers; and with the variables that choose allocators.
    ``PYTORCH_ALLOC_CONF=expandable_segments:True`` (``PYTORCH_CUDA_ALLOC_CONF`` before torch 2.9) keeps reserved memory
    near what is allocated when micro-batches differ in length; a sleeping vLLM engine manages memory of its own and is
    built outside it. ``ALLOCATOR=tcmalloc`` or ``jemalloc`` in the scripts of examples/memory_optimization preloads a host
    allocator that gives freed pages back sooner than glibc's. Workers inherit both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from verl_memopt.config import schema
from verl_memopt.config.keys import leaf_types, value_at
from verl_memopt.config.problems import shown
from verl_memopt.distributed.device import cap_device_memory, is_gpu, max_memory_allocated, memory_info
from verl_memopt.errors import DeviceMemoryError
from verl_memopt.memory.host_buffers import GIB, host_limits
from verl_memopt.memory.knob import Knob
from verl_memopt.observe.byte_tracker import DeviceLimitError

KEY = "memory.device_limit_gb"
_AR = "actor_rollout_ref"
_LOWER = "lower"
"""Stands for the value of a number that is to be lowered."""

SCORING = {"old_log_prob": "rollout", "ref": "ref"}
"""Phase -> the section whose log_prob keys bound its micro-batches."""
GENERATING = ("gen", "testing")
"""Phases in which the engine works."""

ADVICE: dict[str, tuple[tuple[str, object], ...]] = {
    "activations": ((f"{_AR}.model.enable_gradient_checkpointing", True), (f"{_AR}.model.enable_activation_offload", True)),
    "logits": ((f"{_AR}.model.logprob_chunk_tokens", 256),),
    "params": ((f"{_AR}.actor.fsdp_config.param_offload", True), (f"{_AR}.ref.fsdp_config.param_offload", True)),
    "gathered parameters": ((f"{_AR}.actor.fsdp_config.reshard_after_forward", True),),
    "collective buffers": ((f"{_AR}.actor.fsdp_config.reshard_after_forward", True),),
    "grads": ((f"{_AR}.actor.fsdp_config.model_dtype", "bfloat16"),),
    "optimizer": ((f"{_AR}.actor.fsdp_config.optimizer_offload", True),),
    "optimizer scratch": ((f"{_AR}.actor.optim.bucket_megabytes", _LOWER),),
    "rollout weights": ((f"{_AR}.rollout.free_cache_engine", True),),
    "kv": ((f"{_AR}.rollout.kv_cache_memory_gb", _LOWER), (f"{_AR}.rollout.free_cache_engine", True)),
    "sync bucket": ((f"{_AR}.rollout.checkpoint_engine.update_weights_bucket_megabytes", _LOWER),),
}
"""Kind of bytes -> (key, value) pairs that make it smaller, what costs least first."""

PER_TOKEN = ("activations", "logits")
"""Kinds that grow with the tokens of a micro-batch."""


def limit_bytes(gigabytes: float | None) -> int | None:
    """Gives a limit of the settings in bytes."""
    return None if gigabytes is None else int(gigabytes * GIB)


@contextmanager
def memory_limits(memory: schema.Memory, device: torch.device) -> Iterator[None]:
    """Sets this process's limits inside the body. Errors: ConfigError for a device that is smaller than its limit."""
    limit = limit_bytes(memory.device_limit_gb)
    if limit is not None and is_gpu(device):
        cap_device_memory(device, limit)
    with host_limits(limit_bytes(memory.host_limit_gb), limit_bytes(memory.pinned_limit_gb)):
        yield


def engine_share(utilization: float, total: int, limit: int | None) -> float:
    """Gives the share of a device's ``total`` bytes that is ``utilization`` of the limit, where there is one."""
    return utilization if limit is None or limit >= total else utilization * limit / total


class DeviceCap:
    """Keeps a process at its limit while vLLM sleeps, whose memory stays on the caching allocator's account meanwhile.

    vLLM unmaps a sleeping part behind the allocator's back; what the driver then has more of is added to the cap, and taken
    off again when the part wakes. (Argued from both sources, not run on a device.)
    """

    def __init__(self, device: torch.device, limit: int | None) -> None:
        self._device = device
        self._limit = limit if is_gpu(device) else None
        self._asleep = 0

    @contextmanager
    def sleeping(self) -> Iterator[None]:
        """Around a part's going to sleep or waking."""
        if self._limit is None:
            yield
            return
        before = memory_info(self._device)[0]
        yield
        self._asleep += memory_info(self._device)[0] - before
        cap_device_memory(self._device, self._limit + max(self._asleep, 0))


@contextmanager
def out_of_memory_told(
    phase: str,
    device: torch.device,
    resident: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    settings: schema.ActorRolloutRef,
    limit: int | None,
) -> Iterator[None]:
    """Turns running out of device memory inside the body into a DeviceMemoryError that says what to do about it.

    resident: gives (kind, tensor) of what lies on the device, asked only then. limit: bytes the process may take, if set.
    """
    try:
        yield
    except DeviceLimitError as error:
        asked = error.asked_bytes
        raise _error(phase, error.kinds, error.num_bytes, limit, error.op, settings, asked, error.num_bytes - asked) from None
    except torch.OutOfMemoryError as error:
        if not is_gpu(device):
            raise
        peak, kinds = max_memory_allocated(device), _bytes_by_kind(resident())
        kinds["activations"] += max(peak - sum(kinds.values()), 0)
        cap = memory_info(device)[1] if limit is None else limit
        raise _error(phase, kinds, peak, cap, str(error).split(". ")[0], settings, _asked(str(error)), peak) from error


def _asked(message: str) -> int | None:
    """Return the bytes that torch's out-of-memory message says it tried to allocate, or None where it says nothing."""
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return None if found is None else round(float(found[1]) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}[found[2]])


def _bytes_by_kind(resident: Iterable[tuple[str, torch.Tensor]]) -> Counter[str]:
    kinds: Counter[str] = Counter()
    seen = set()
    for kind, tensor in resident:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kinds[kind] += storage.nbytes()
    return kinds


def _error(
    phase: str,
    kinds: dict[str, int],
    held: int,
    limit: int | None,
    what: str,
    settings: schema.ActorRolloutRef,
    asked: int | None = None,
    held_before: int | None = None,
) -> DeviceMemoryError:
    largest = sorted(kinds, key=lambda kind: -kinds[kind])
    terms = ", ".join(f"{kind} {_gib(kinds[kind])}" for kind in largest if kinds[kind])
    ways = advice(phase, largest, settings)
    out = f" Most of it is {largest[0]}: {ways[0]}." if largest and ways else ""
    more = f" Also: {'; '.join(ways[1:4])}." if len(ways) > 1 else ""
    of = "" if limit is None else f" of {_gib(limit)}"
    text = f"{phase}: out of device memory at {_gib(held)}{of} GiB ({what}): {terms} GiB.{out}{more}"
    return DeviceMemoryError(text, phase, asked, held_before, limit)


def advice(phase: str, kinds: Iterable[str], settings: schema.ActorRolloutRef) -> list[str]:
    """Gives what can be set to make room in a phase, for its kinds in their order; settings that hold already are left out."""
    ways = []
    for kind in kinds:
        pairs = ADVICE.get(kind, ())
        if kind in PER_TOKEN:
            nothing_kept = kind == "activations" and phase != "update_actor"
            pairs = (*(() if nothing_kept else pairs), (_budget(phase, settings), _LOWER))
        ways += [way for key, value in pairs if key in leaf_types() and (way := _way(key, value, settings)) is not None]
    return list(dict.fromkeys(ways))


def _budget(phase: str, settings: schema.ActorRolloutRef) -> str:
    """Gives the key that bounds how much of the batch a phase holds at once."""
    if phase in GENERATING:
        return f"{_AR}.rollout.max_num_seqs"
    if phase not in SCORING:
        by_tokens, prefix = settings.actor.use_dynamic_bsz, "actor.ppo"
    else:
        section = SCORING[phase]
        by_tokens, prefix = bool(getattr(settings, section).log_prob_use_dynamic_bsz), f"{section}.log_prob"
    return f"{_AR}.{prefix}_max_token_len_per_gpu" if by_tokens else f"{_AR}.{prefix}_micro_batch_size_per_gpu"


def _way(key: str, value: object, settings: schema.ActorRolloutRef) -> str | None:
    present = value_at(settings, key.removeprefix(f"{_AR}."))
    if value == _LOWER:
        return f"lower {key}" + ("" if present is None else f" (now {shown(present)})")
    return None if present == value else f"set {key}={shown(value)}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g}"


KNOB = Knob(
    name="limits",
    keys=(KEY, "memory.host_limit_gb", "memory.pinned_limit_gb"),
    besides=("ALLOCATOR=tcmalloc", "ALLOCATOR=jemalloc", "PYTORCH_ALLOC_CONF"),
)
