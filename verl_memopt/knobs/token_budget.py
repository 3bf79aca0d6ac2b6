"""Pack micro-batches by tokens under a hard cap, instead of by rows.

Use it when: always with rows of different lengths. Lower the cap first when activations or logits are the peak.
Saves: activations and logits grow with the tokens of a micro-batch, and no micro-batch ever has more than the cap.
Costs: nothing in the result, since losses are normalised by global counts. A low cap makes products small and slow.
    ``adaptive_token_budget`` learns the cap from measured peaks. On one device it also goes on after an out-of-memory error.
Works with: chunked log-probs and checkpointing, which lower the bytes a token needs and so allow a higher cap.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from verl_memopt.knobs.conditions import KL, LENGTHS
from verl_memopt.knobs.critic_rules import twin, with_critic
from verl_memopt.knobs.knob import LOWER, Advice, Claim, Factor, Idle, Knob, LadderRow, Refusal
from verl_memopt.knobs.ranges import POSITIVE, PositiveInt
from verl_memopt.knobs.shapes import activation_saving

_AR = "actor_rollout_ref"
_ROWS, _BY_TOKENS, _TOKENS = "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu"


@dataclass(frozen=True)
class UpdateBudget:
    """Settings of the update's micro-batches."""

    ppo_micro_batch_size_per_gpu: Annotated[int | None, POSITIVE] = None
    """Sequences per forward and backward; this or ``use_dynamic_bsz``."""
    use_dynamic_bsz: bool = False
    """Pack micro-batches by tokens instead of by sequences."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Hard cap of tokens per micro-batch with ``use_dynamic_bsz``."""
    adaptive_token_budget: bool = False
    """Learn the tokens of a micro-batch from measured peaks: from the cap down, so that the device's memory suffices, and up
    again to the cap. On one device an update or a pass goes on after an out-of-memory error, with half the tokens."""


@dataclass(frozen=True)
class CriticBudget:
    """Settings of the micro-batches of the critic: of its update, and of the pass that computes values."""

    ppo_micro_batch_size_per_gpu: Annotated[int | None, POSITIVE] = None
    """Sequences per forward and backward; this or ``use_dynamic_bsz``."""
    use_dynamic_bsz: bool | None = None
    """Pack micro-batches by tokens instead of by sequences; follows the actor's."""
    ppo_max_token_len_per_gpu: PositiveInt = 32768
    """Hard cap of tokens per micro-batch with ``use_dynamic_bsz``."""
    forward_micro_batch_size_per_gpu: Annotated[int | None, POSITIVE] = None
    """Sequences per forward of the values pass; follows ``ppo_micro_batch_size_per_gpu``."""
    forward_max_token_len_per_gpu: Annotated[int | None, POSITIVE] = None
    """Hard cap of tokens per forward of the values pass; follows ``ppo_max_token_len_per_gpu``."""
    adaptive_token_budget: bool | None = None
    """Learn the tokens of a micro-batch from measured peaks, in both passes; follows the actor's."""


@dataclass(frozen=True)
class LogProbBudget:
    """Settings of the micro-batches of a pass that only computes log-probs."""

    log_prob_micro_batch_size_per_gpu: Annotated[int | None, POSITIVE] = None
    """Sequences per forward; follows the actor's micro-batch size."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Follows ``actor.use_dynamic_bsz``."""
    log_prob_max_token_len_per_gpu: Annotated[int | None, POSITIVE] = None
    """Follows ``actor.ppo_max_token_len_per_gpu``."""
    log_prob_adaptive_token_budget: bool | None = None
    """Learn the tokens of a forward from measured peaks; follows ``actor.adaptive_token_budget``."""


def _keys(role: str) -> tuple[str, str, str]:
    """Return the keys of a role's row count, its choice between rows and tokens, and its token cap."""
    if role == "actor":
        return f"{_AR}.actor.ppo_{_ROWS}", f"{_AR}.actor.{_BY_TOKENS}", f"{_AR}.actor.ppo_{_TOKENS}"
    if role == "values":
        return f"critic.forward_{_ROWS}", f"critic.{_BY_TOKENS}", f"critic.forward_{_TOKENS}"
    rows, by_tokens, tokens = (f"{_AR}.{role}.log_prob_{name}" for name in (_ROWS, _BY_TOKENS, _TOKENS))
    return rows, by_tokens, tokens


def _has_own_size(rows: int | None, by_tokens: bool, tokens: int, *others: Any) -> bool:
    """Return whether another role than the actor runs, with other sizes than the actor's, which are checked already.

    Args:
        rows: most sequences of a micro-batch.
        by_tokens: whether tokens are counted in place of sequences.
        tokens: most tokens of a micro-batch.
        *others: the same three values of the actor; for the reference also the values of the keys that ask for a KL.
    """
    kl = others[3:]
    return (rows, by_tokens, tokens) != others[:3] and (not kl or any(kl))


def _has_no_size(rows: int | None, by_tokens: bool, *others: Any) -> bool:
    return not by_tokens and rows is None and (not others or _has_own_size(rows, by_tokens, *others))


def _is_too_small(tokens: int, prompt: int, response: int, by_tokens: bool, *others: Any) -> bool:
    too_small = by_tokens and tokens < prompt + response
    return too_small and (not others or _has_own_size(others[0], by_tokens, tokens, *others[1:]))


def _longest_sample(_: int, prompt: int, response: int, *others: Any) -> str:
    return f"a sample may have {prompt + response} tokens (data.max_prompt_length + data.max_response_length)"


def _raise_it(_: int, prompt: int, response: int, *others: Any) -> str:
    return f"Raise it to at least {prompt + response}, or lower one of the two lengths."


def _refusals() -> Iterator[Refusal]:
    longest = "a sample may have more tokens (data.max_prompt_length + data.max_response_length)"
    actor = _keys("actor")
    critic = tuple(map(twin, actor))
    for role, others in (("actor", ()), ("rollout", actor), ("ref", (*actor, *KL)), ("values", critic)):
        rows, by_tokens, tokens = _keys(role)
        no_size = Refusal(
            (rows, by_tokens),
            _has_no_size,
            "a micro-batch has no size",
            f"Set {rows}, or {by_tokens}=true.",
            about=(tokens, *others) if others else (),
        )
        too_small = Refusal(
            (tokens,),
            _is_too_small,
            longest,
            _raise_it,
            _longest_sample,
            about=(*LENGTHS, by_tokens, *((rows, *others) if others else ())),
        )
        yield from map(with_critic, (no_size, too_small)) if role == "values" else (no_size, too_small)


def _advice() -> Iterator[Advice]:
    """Yield "lower the cap" for the kinds of bytes that grow with it, under the key that bounds the phase."""
    for kind in ("activations", "logits"):
        for phase, role in (("old_log_prob", "rollout"), ("ref", "ref"), ("update_actor", "actor"), ("values", "values")):
            rows, by_tokens, tokens = _keys(role)
            yield Advice(kind, tokens, LOWER, bool, (phase,), under=(by_tokens,))
            yield Advice(kind, rows, LOWER, operator.not_, (phase,), under=(by_tokens,))


def _log_prob_factor(role: str, name: str) -> Factor:
    rows, by_tokens, tokens = _keys(role)
    return Factor(name, {"follows": {}, "tokens": {by_tokens: True, tokens: 30}, "rows": {by_tokens: False, rows: 2}})


_ACTOR_ROWS, _ACTOR_BY_TOKENS, BUDGET_KEY = _keys("actor")
ADAPTIVE_KEY, _IN_BACKWARD = f"{_AR}.actor.adaptive_token_budget", f"{_AR}.actor.optim.in_backward"
_ADAPTIVE_KEYS = (ADAPTIVE_KEY, *(f"{_AR}.{role}.log_prob_adaptive_token_budget" for role in ("rollout", "ref")))

_STEPS_IN_BACKWARD = Refusal(
    (ADAPTIVE_KEY, _IN_BACKWARD),
    lambda adaptive, in_backward: adaptive and in_backward,
    "after an out-of-memory error gradients are computed again, but not from weights that backward has updated",
    "Set one of them to false.",
)

KNOB = Knob(
    name="token_budget",
    place=80,
    cost="more, smaller micro-batches",
    settings={"actor": UpdateBudget, "critic": CriticBudget, "log_prob_pass": LogProbBudget},
    known_as={
        "per_device_train_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "gradient_accumulation_steps": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu (accumulation follows from it)",
        "local_rollout_forward_batch_size": "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    },
    idle=(
        Idle(_ACTOR_ROWS, (_ACTOR_BY_TOKENS,), lambda by_tokens: by_tokens, "actor.use_dynamic_bsz packs by tokens"),
        Idle(BUDGET_KEY, (_ACTOR_BY_TOKENS,), lambda by_tokens: not by_tokens, "actor.use_dynamic_bsz is false"),
        Idle(ADAPTIVE_KEY, (_ACTOR_BY_TOKENS,), lambda by_tokens: not by_tokens, "actor.use_dynamic_bsz is false"),
    ),
    refuses=(*_refusals(), _STEPS_IN_BACKWARD),
    advice=tuple(_advice()),
    claims=(Claim("update_actor", "activations", activation_saving),),
    row=LadderRow(40, on=(f"{BUDGET_KEY}={{pair}}",), off=(f"{BUDGET_KEY}={{all}}",)),
    factors=(
        Factor(
            "batching",
            {
                "whole": {_ACTOR_BY_TOKENS: True},
                "tokens": {_ACTOR_BY_TOKENS: True, BUDGET_KEY: 20},
                "rows": {_ACTOR_BY_TOKENS: False, _ACTOR_ROWS: 3},
            },
        ),
        Factor(
            "adaptive budget", {"fixed": dict.fromkeys(_ADAPTIVE_KEYS, False), "learned": dict.fromkeys(_ADAPTIVE_KEYS, True)}
        ),
        _log_prob_factor("rollout", "old batching"),
        _log_prob_factor("ref", "ref batching"),
    ),
)
