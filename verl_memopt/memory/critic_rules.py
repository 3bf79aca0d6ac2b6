"""The critic's knobs: their rules, warnings and advice are those of the policy, with the keys replaced.

A key of the policy, its optimizer, its sharding or its update may have a twin below ``critic``. A knob that both models have
declares its rules once, for the policy. In a run with a critic the rules hold for the twins too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Literal, cast

from verl_memopt.algorithms.records import WITH_CRITIC
from verl_memopt.memory.knob import (
    DEVICES,
    Advice,
    Refusal,
    SettingsView,
    UnusedKey,
    for_devices,
    has_own_teacher,
    has_pool,
    knobs,
    pool_keys,
)

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

TWINS = {
    "actor_rollout_ref.actor.fsdp_config.": "critic.model.fsdp_config.",
    "actor_rollout_ref.actor.optim.": "critic.optim.",
    "actor_rollout_ref.model.": "critic.model.",
    "actor_rollout_ref.actor.": "critic.",
}
"""How a key of the policy starts -> how its twin starts. The first match counts."""

CRITIC_PHASES = ("values", "update_critic")
"""Phases that use the critic."""

RESTING = ("optimizer",)
"""Kinds of bytes that a model also holds outside its own phases."""


def has_critic(settings: Settings) -> bool:
    return settings.algorithm.adv_estimator in WITH_CRITIC


PoolRole = Literal["critic", "reward_model", "teacher"]


def own_pools(settings: Settings) -> tuple[PoolRole, ...]:
    built: dict[PoolRole, bool] = {
        "critic": has_critic(settings), "reward_model": settings.reward_model.enable, "teacher": has_own_teacher(settings),
    }  # fmt: skip
    return tuple(role for role, is_built in built.items() if is_built and has_pool(settings, role))


def twin(key: str) -> str:
    for prefix, critics in TWINS.items():
        if key.startswith(prefix):
            return critics + key.removeprefix(prefix)
    return key


def twin_text(text: str) -> str:
    for prefix, critics in TWINS.items():
        text = text.replace(prefix, critics)
        # A text may leave out `actor_rollout_ref.`.
        text = re.sub(rf"(?<![\w.]){re.escape(prefix.removeprefix('actor_rollout_ref.'))}", critics, text)
    return text


class _AsCritic(SettingsView): ...


def as_critic(settings: Settings) -> Settings:
    """Return a view of the settings in which the policy's keys have the critic's values, for rules about the policy."""
    devices = dict(zip(DEVICES, pool_keys("critic"), strict=True)) if has_pool(settings, "critic") else {}

    def address(key: str) -> str:
        # With a dot at its end, the name of a section (fsdp_config) matches TWINS as its keys do.
        return devices.get(key) or twin(f"{key}.")[:-1]

    return cast("Settings", _AsCritic(settings, address))


def is_critic(settings: Settings) -> bool:
    return isinstance(settings, _AsCritic)


def with_critic(refusal: Refusal) -> Refusal:
    return replace(refusal, when=lambda settings: has_critic(settings) and refusal.when(settings))


def twin_refusal(refusal: Refusal, devices: tuple[str, str] = DEVICES) -> Refusal:
    shown = dict(zip(DEVICES, devices, strict=True))
    return with_critic(
        Refusal(
            tuple(shown.get(key) or twin(key) for key in refusal.keys),
            lambda settings: refusal.when(as_critic(settings)),
            twin_text(refusal.because),
            lambda settings: twin_text(refusal.way_out_for(as_critic(settings))),
            lambda settings: twin_text(refusal.reason_for(as_critic(settings))),
        )
    )


def twin_unused(unused: UnusedKey) -> UnusedKey:
    return UnusedKey(
        twin(unused.key),
        # Another rule covers runs without a critic, in which no key of the critic has an effect.
        lambda settings: has_critic(settings) and unused.when(as_critic(settings)),
        twin_text(unused.because),
    )


def twin_advice(advice: Advice) -> Advice:
    phases = ("update_critic",) if advice.phases else () if advice.kind in RESTING else CRITIC_PHASES
    # The advice holds in the critic's phases, or in every phase if the bytes rest on the device everywhere.
    as_policys = replace(advice, key=twin(advice.key), when=lambda settings: advice.when(as_critic(settings)), phases=phases)
    if (number := advice.to) is None:
        return as_policys
    return replace(as_policys, to=lambda need, settings: number(need, as_critic(settings)))


def refusals() -> Iterator[Refusal]:
    for refusal in (refusal for knob in knobs() for refusal in knob.refuses):
        yield refusal
        if _has_twin(*refusal.keys):
            if set(DEVICES) & {*refusal.keys}:
                yield from for_devices("critic", partial(twin_refusal, refusal))
            else:
                yield twin_refusal(refusal)


def unused_keys() -> Iterator[UnusedKey]:
    for unused in (unused for knob in knobs() for unused in knob.unused_keys):
        yield unused
        if _has_twin(unused.key):
            yield twin_unused(unused)


def advices() -> Iterator[Advice]:
    for advice in (advice for knob in knobs() for advice in knob.advice):
        if not _has_twin(advice.key) or (advice.phases and "update_actor" not in advice.phases):
            yield advice
        else:
            # In the critic's phases, advice about its keys replaces advice about the policy's, unless the policy's bytes rest
            # there too.
            yield advice if advice.kind in RESTING else replace(advice, not_in=CRITIC_PHASES)
            yield twin_advice(advice)


def _has_twin(key: str, *others: str) -> bool:
    # Whether the critic has a twin of the key, and of every other knob key in the rule.
    knob_keys = _knob_keys()
    is_reference = any(other.startswith("actor_rollout_ref.ref.") for other in others)
    lacking = is_reference or any(other in knob_keys and twin(other) not in (other, *knob_keys) for other in others)
    return twin(key) != key and twin(key) in knob_keys and not lacking


@cache
def _knob_keys() -> frozenset[str]:
    return frozenset(key for knob in knobs() for key in knob.defaults())
