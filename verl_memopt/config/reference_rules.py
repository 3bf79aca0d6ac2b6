"""What a reference that follows the policy needs, and when its keys have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from verl_memopt.config.schema import Settings
from verl_memopt.knobs.knob import Refusal, UnusedKey
from verl_memopt.knobs.values import needs_reference, num_devices

_AR = "actor_rollout_ref"
EVERY, ALPHA = f"{_AR}.ref.sync_every_steps", f"{_AR}.ref.sync_mixup_alpha"
_RANK, _QUANTIZATION, _LOAD = f"{_AR}.model.lora_rank", f"{_AR}.ref.quantization", f"{_AR}.model.load_mode"
_SIZE, _OFFLOAD = f"{_AR}.ref.fsdp_config.fsdp_size", f"{_AR}.ref.fsdp_config.param_offload"


def _follows(settings: Settings) -> bool:
    """Return whether the reference follows the policy."""
    return settings.actor_rollout_ref.ref.sync_every_steps is not None


def _has_other_shards(settings: Settings) -> bool:
    roles = settings.actor_rollout_ref
    return num_devices(settings) > 1 and roles.ref.fsdp_config.fsdp_size != roles.actor.fsdp_config.fsdp_size


def _rules() -> Iterator[Refusal]:
    """Yield what a reference must be so that it can follow the policy."""
    keep = f"or {EVERY}=null to keep the reference as it is."
    yield Refusal(
        (EVERY, _RANK),
        lambda settings: _follows(settings) and settings.actor_rollout_ref.model.lora_rank > 0,
        "with LoRA the reference is the policy's own base, and has no weights that could follow the policy",
        f"Set {_RANK}=0, {keep}",
    )
    yield Refusal(
        (EVERY, _QUANTIZATION),
        lambda settings: _follows(settings) and settings.actor_rollout_ref.ref.quantization != "none",
        "the codes of a quantised reference cannot take a small move",
        f"Set {_QUANTIZATION}=none with {_OFFLOAD}=true, {keep}",
    )
    yield Refusal(
        (EVERY, _LOAD),
        lambda settings: _follows(settings) and settings.actor_rollout_ref.model.load_mode == "mmap",
        "a mapped file cannot be written to, and the reference would change the model's folder",
        f"Set {_LOAD}=stream, {keep}",
    )
    yield Refusal(
        (EVERY, _SIZE),
        lambda settings: _follows(settings) and _has_other_shards(settings),
        "the shards of the reference are not those of the policy",
        f"Set {_SIZE} to {_AR}.actor.fsdp_config.fsdp_size.",
    )


REFERENCE_RULES: tuple[Refusal, ...] = tuple(_rules())
"""All rules of this file, for :mod:`verl_memopt.config.checks`."""

REFERENCE_UNUSED: tuple[UnusedKey, ...] = (
    UnusedKey(EVERY, lambda settings: not needs_reference(settings), "no KL is asked for, so there is no reference"),
    UnusedKey(ALPHA, lambda settings: not _follows(settings), f"{EVERY} is null"),
)
"""When giving a key of this file asks for something that does not happen."""
