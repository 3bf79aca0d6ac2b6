"""Split the tokens of each micro-batch over neighbouring devices, which exchange attention heads (Ulysses).

Use it when: the activations of a single long sequence do not fit on one device, and there are several devices.
Saves: in a group of S devices, each device has 1/S of the tokens of a micro-batch, and so 1/S of its activations. Token caps
    count per device, so a group computes S times as many tokens at once. Inside attention a device has whole sequences, but only
    1/S of the heads.
Costs: four exchanges per block in forward and four in backward. The output of attention is kept twice. Fewer groups share a
    batch: W devices form W / S groups.
Works with: packed rows, shared prompts, checkpointing, offload, LoRA, tiled MLPs and chunked log-probs, which need no change.
    FSDP2 shards over all devices as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from verl_memopt.errors import ConfigError
from verl_memopt.memory.knob import (
    BUILT,
    DEVICES,
    POSITIVE,
    Knob,
    Refusal,
    SequenceRole,
    devices_of,
    for_devices,
    has_pool,
    sequence_ranks,
)

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

_SECTIONS: dict[SequenceRole, str] = {
    "actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "teacher": "teacher",
    "critic": "critic.model",
    "reward_model": "reward_model.model",
}
KEYS = {role: f"{section}.fsdp_config.ulysses_sequence_parallel_size" for role, section in _SECTIONS.items()}
"""Role -> its key for the number of devices in a group."""


@dataclass(frozen=True)
class SequenceParallel:
    ulysses_sequence_parallel_size: Annotated[int | None, POSITIVE] = None
    """Number of neighbouring devices that share the tokens of each micro-batch. null = 1; for the reference, null = the policy's
    number."""

    @property
    def sequence_ranks(self) -> int:
        return self.ulysses_sequence_parallel_size or 1


def is_built(settings: Settings, role: SequenceRole) -> bool:
    if role in BUILT:
        return BUILT[role](settings)
    return role == "actor" or settings.reward_model.enable


def _refusal(role: SequenceRole, keys: tuple[str, str] = DEVICES) -> Refusal:
    key = KEYS[role]

    def divisors(settings: Settings) -> str:
        devices = devices_of(settings, role)
        return " or ".join(str(size) for size in range(1, devices + 1) if devices % size == 0)

    return Refusal(
        (key, *keys),
        lambda settings: is_built(settings, role) and devices_of(settings, role) % sequence_ranks(settings, role) != 0,
        "the devices do not divide into groups of this size",
        lambda settings: f"Set {key}={divisors(settings)}, or use a multiple of {sequence_ranks(settings, role)} devices.",
        lambda settings: f"the {devices_of(settings, role)} devices {_of(role, settings)} do not divide into groups of this size",
    )


def _of(role: SequenceRole, settings: Settings) -> str:
    return f"of its pool ({role})" if has_pool(settings, role) else "of the run"


def check_heads(heads: int, ranks: int, key: str) -> None:
    if heads % ranks:
        possible = " or ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ConfigError(f"{key}={ranks}: the model's {heads} query heads do not divide over the ranks. Set {possible}.")


def key_copies(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each key head is repeated, so that key heads divide over the ranks. Query heads must divide as they are."""
    assert heads % ranks == 0, (heads, ranks)
    shared = heads // kv_heads
    return next(copies for copies in range(1, shared + 1) if shared % copies == 0 and kv_heads * copies % ranks == 0)


KNOB = Knob(
    cost="four exchanges per block",
    settings={"fsdp": SequenceParallel},
    refuses=(
        *(_refusal(role) for role in ("actor", "ref", "teacher")),
        *for_devices("reward_model", partial(_refusal, "reward_model")),
    ),
)
