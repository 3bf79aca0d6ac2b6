"""What a reference that follows the policy needs, and when its keys have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from verl_memopt.knobs.conditions import DEVICES, KL
from verl_memopt.knobs.knob import Idle, Refusal

_AR = "actor_rollout_ref"
EVERY, ALPHA = f"{_AR}.ref.sync_every_steps", f"{_AR}.ref.sync_mixup_alpha"
_RANK, _QUANTIZATION, _LOAD = f"{_AR}.model.lora_rank", f"{_AR}.ref.quantization", f"{_AR}.model.load_mode"
_SIZE, _OFFLOAD = f"{_AR}.ref.fsdp_config.fsdp_size", f"{_AR}.ref.fsdp_config.param_offload"


def _rules() -> Iterator[Refusal]:
    """Yield what a reference must be so that it can follow the policy."""
    keep = f"or {EVERY}=null to keep the reference as it is."
    yield Refusal(
        (EVERY, _RANK),
        lambda every, rank: every is not None and rank > 0,
        "with LoRA the reference is the policy's own base, and has no weights that could follow the policy",
        f"Set {_RANK}=0, {keep}",
    )
    yield Refusal(
        (EVERY, _QUANTIZATION),
        lambda every, kind: every is not None and kind != "none",
        "the codes of a quantised reference cannot take a small move",
        f"Set {_QUANTIZATION}=none with {_OFFLOAD}=true, {keep}",
    )
    yield Refusal(
        (EVERY, _LOAD),
        lambda every, mode: every is not None and mode == "mmap",
        "a mapped file cannot be written to, and the reference would change the model's folder",
        f"Set {_LOAD}=stream, {keep}",
    )
    yield Refusal(
        (EVERY, _SIZE),
        lambda every, size, policy, nodes, devices: every is not None and nodes * devices > 1 and size != policy,
        "the shards of the reference are not those of the policy",
        f"Set {_SIZE} to {_AR}.actor.fsdp_config.fsdp_size.",
        about=(f"{_AR}.actor.fsdp_config.fsdp_size", *DEVICES),
    )


REFERENCE_RULES: tuple[Refusal, ...] = tuple(_rules())
"""All rules of this file, for :mod:`verl_memopt.config.checks`."""

REFERENCE_IDLE: tuple[Idle, ...] = (
    Idle(EVERY, KL, lambda in_reward, in_loss: not (in_reward or in_loss), "no KL is asked for, so there is no reference"),
    Idle(ALPHA, (EVERY,), lambda every: every is None, f"{EVERY} is null"),
)
"""When giving a key of this file asks for something that does not happen."""
