"""Rules of the critic's keys, derived from those of the policy's: a knob that both models have declares its rules once.

Each key of the policy, its optimizer, its sharding or its update has a twin below ``critic``. A rule about such keys holds for
their twins too, where a run has a critic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from verl_memopt.algorithms.records import WITH_CRITIC
from verl_memopt.knobs.index import knobs
from verl_memopt.knobs.knob import Advice, Condition, Idle, Refusal

_AR = "actor_rollout_ref"
ESTIMATOR = "algorithm.adv_estimator"

TWINS = {
    f"{_AR}.actor.fsdp_config.": "critic.model.fsdp_config.",
    f"{_AR}.actor.optim.": "critic.optim.",
    f"{_AR}.model.": "critic.model.",
    f"{_AR}.actor.": "critic.",
}
"""Start of a key of the policy -> start of the critic's twin. The first that matches counts."""

PHASES = ("values", "update_critic")
"""Phases that use the critic."""

RESTING = ("optimizer",)
"""Kinds of bytes that a model holds outside its own phases too."""


def twin(key: str) -> str:
    """Return the critic's key for a key of the policy, or the key itself where it belongs to no single model."""
    for prefix, critics in TWINS.items():
        if key.startswith(prefix):
            return critics + key.removeprefix(prefix)
    return key


def twin_text(text: str) -> str:
    """Return a sentence about the policy's keys as one about the critic's. Keys may lack ``actor_rollout_ref.``."""
    for prefix, critics in TWINS.items():
        text = text.replace(prefix, critics)
        text = re.sub(rf"(?<![\w.]){re.escape(prefix.removeprefix(_AR + '.'))}", critics, text)
    return text


def with_critic(refusal: Refusal) -> Refusal:
    """Return the refusal for runs with a critic alone."""

    def of_others(function: Callable[..., Any] | None) -> Any:
        return None if function is None else lambda *values: function(*values[:-1])

    way_out = refusal.way_out
    return replace(
        refusal,
        when=_where_critic(refusal.when),
        way_out=way_out if isinstance(way_out, str) else of_others(way_out),
        because_here=of_others(refusal.because_here),
        about=(*refusal.about, ESTIMATOR),
    )


def twin_refusal(refusal: Refusal) -> Refusal:
    """Return the refusal of the critic's keys."""

    def in_words(function: Callable[..., str] | None) -> Any:
        return None if function is None else lambda *values: twin_text(function(*values))

    way_out = refusal.way_out
    return with_critic(
        Refusal(
            tuple(map(twin, refusal.keys)),
            refusal.when,
            twin_text(refusal.because),
            twin_text(way_out) if isinstance(way_out, str) else in_words(way_out),
            in_words(refusal.because_here),
            tuple(map(twin, refusal.about)),
        )
    )


def twin_idle(idle: Idle) -> Idle:
    """Return the rule of the critic's key. Without a critic none of its keys has an effect, which another rule says."""
    under = (*map(twin, idle.under), ESTIMATOR)
    return Idle(twin(idle.key), under, _where_critic(idle.when), twin_text(idle.because))


def twin_advice(advice: Advice) -> Advice:
    """Return the advice of the critic's key: in its phases, or wherever its bytes rest."""
    phases = ("update_critic",) if advice.phases else () if advice.kind in RESTING else PHASES
    return replace(advice, key=twin(advice.key), under=tuple(map(twin, advice.under)), phases=phases)


def refusals() -> Iterator[Refusal]:
    """Yield what the knobs refuse, each rule followed by the critic's where there is one."""
    for refusal in (refusal for knob in knobs() for refusal in knob.refuses):
        yield refusal
        if _has_twin(refusal.keys[0], refusal.reads):
            yield twin_refusal(refusal)


def idles() -> Iterator[Idle]:
    """Yield when a knob's key has no effect, each rule followed by the critic's where there is one."""
    for idle in (idle for knob in knobs() for idle in knob.idle):
        yield idle
        if _has_twin(idle.key, idle.under):
            yield twin_idle(idle)


def advices() -> Iterator[Advice]:
    """Yield the advice of the knobs, each followed by the critic's where there is one.

    In the critic's own phases its key is advised in place of the policy's, unless the policy's bytes rest there too.
    """
    for advice in (advice for knob in knobs() for advice in knob.advice):
        if not _has_twin(advice.key, advice.under) or (advice.phases and "update_actor" not in advice.phases):
            yield advice
        else:
            yield advice if advice.kind in RESTING else replace(advice, not_in=PHASES)
            yield twin_advice(advice)


def _has_twin(key: str, others: Iterable[str]) -> bool:
    """Return whether the critic has a key of its own, and of each key that a rule reads, so that the rule holds for it too."""
    known = _knob_keys()
    lacking = (other.startswith(f"{_AR}.ref.") or (other in known and twin(other) not in (other, *known)) for other in others)
    return twin(key) != key and twin(key) in known and not any(lacking)


def _where_critic(condition: Condition) -> Condition:
    """Return the condition for a run with a critic. The estimator is its last argument."""
    return lambda *values: values[-1] in WITH_CRITIC and condition(*values[:-1])


@cache
def _knob_keys() -> frozenset[str]:
    """Return the keys of the knobs' own settings."""
    return frozenset(key for knob in knobs() for key in knob.defaults())
