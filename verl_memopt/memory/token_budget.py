"""Pack micro-batches by tokens up to a hard cap, instead of by rows.

Use it when: always if rows have different lengths. Lower the cap first when activations or logits set the memory peak.
    ``adaptive_token_budget`` finds the cap for you: it learns from measured peaks, and a run continues after an out-of-memory
    error.
Saves: activations and logits grow with the tokens of a micro-batch, and no micro-batch has more tokens than the cap.
Costs: nothing in the result, because losses are normalised by global counts. A low cap makes matrix products small and slow.
Works with: chunked log-probs and checkpointing, which lower the bytes per token and so allow a higher cap. After an out-of-memory
    error all devices continue with the same lower cap. This is impossible where devices share the tokens of a micro-batch
    (``ulysses_sequence_parallel_size``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from verl_memopt.memory.critic_rules import as_critic, has_critic
from verl_memopt.memory.knob import (
    LOWER,
    POSITIVE,
    Advice,
    Claim,
    Knob,
    LadderRow,
    Need,
    PositiveInt,
    Predicate,
    Refusal,
    SequenceRole,
    UnusedKey,
    activation_saving,
    enough_rows,
    has_teacher,
    longest_sample,
    sequence_ranks,
    uses_kl,
)
from verl_memopt.recipes import RECIPES, Recipe

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

_AR = "actor_rollout_ref"
Role = Literal["actor", "rollout", "ref", "teacher", "values"]
ADAPTIVE_KEY, _IN_BACKWARD = f"{_AR}.actor.adaptive_token_budget", f"{_AR}.actor.optim.in_backward"
_CRITIC_ADAPTIVE, _REWARD_ADAPTIVE = "critic.adaptive_token_budget", "reward_model.adaptive_token_budget"
_REWARD_TOKENS, _REWARD_ROWS = "reward_model.forward_max_token_len_per_gpu", "reward_model.micro_batch_size_per_gpu"
_ROWS, _BY_TOKENS, _TOKENS = "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu"


@dataclass(frozen=True)
class UpdateBudget:
    ppo_micro_batch_size_per_gpu: Annotated[int | None, POSITIVE] = None
    """Sequences per forward and backward. Set this or ``use_dynamic_bsz``."""
    use_dynamic_bsz: bool = False
    """Pack micro-batches by tokens instead of by sequences."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Most tokens per micro-batch with ``use_dynamic_bsz``: a hard cap."""
    adaptive_token_budget: bool = False
    """Learn the size of micro-batches from measured memory peaks. Training starts at the cap, goes down where the device's memory
    does not suffice, and up again to the cap at most. After an out-of-memory error, an update or a pass continues with half the
    tokens on all devices. It cannot continue where devices share the tokens of a micro-batch."""


@dataclass(frozen=True)
class CriticBudget:
    ppo_micro_batch_size_per_gpu: Annotated[int | None, POSITIVE] = None
    """Sequences per forward and backward. Set this or ``use_dynamic_bsz``."""
    use_dynamic_bsz: bool | None = None
    """Pack micro-batches by tokens instead of by sequences; follows the actor's."""
    ppo_max_token_len_per_gpu: PositiveInt = 32768
    """Most tokens per micro-batch with ``use_dynamic_bsz``: a hard cap."""
    forward_micro_batch_size_per_gpu: Annotated[int | None, POSITIVE] = None
    """Sequences per forward of the pass that computes values; follows ``ppo_micro_batch_size_per_gpu``."""
    forward_max_token_len_per_gpu: Annotated[int | None, POSITIVE] = None
    """Hard cap of tokens per forward of the pass that computes values; follows ``ppo_max_token_len_per_gpu``."""
    adaptive_token_budget: bool | None = None
    """Learn the size of micro-batches from measured memory peaks, in update and values pass; follows the actor's."""


@dataclass(frozen=True)
class LogProbBudget:
    log_prob_micro_batch_size_per_gpu: Annotated[int | None, POSITIVE] = None
    """Sequences per forward; follows the actor's micro-batch size."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Pack forwards by tokens instead of by sequences; follows ``actor.use_dynamic_bsz``."""
    log_prob_max_token_len_per_gpu: Annotated[int | None, POSITIVE] = None
    """Hard cap of tokens per forward; follows ``actor.ppo_max_token_len_per_gpu``."""
    log_prob_adaptive_token_budget: bool | None = None
    """Learn the size of forwards from measured memory peaks; follows ``actor.adaptive_token_budget``."""


def _keys(role: Role | Literal["critic"]) -> tuple[str, str, str]:
    if role in ("values", "critic"):
        start = "critic.forward_" if role == "values" else "critic.ppo_"
        return start + _ROWS, f"critic.{_BY_TOKENS}", start + _TOKENS
    if role == "actor":
        return f"{_AR}.actor.ppo_{_ROWS}", f"{_AR}.actor.{_BY_TOKENS}", f"{_AR}.actor.ppo_{_TOKENS}"
    start = "teacher.log_prob_" if role == "teacher" else f"{_AR}.{role}.log_prob_"
    return start + _ROWS, start + _BY_TOKENS, start + _TOKENS


def sizes_of(settings: Settings, role: Role | Literal["critic"]) -> tuple[int | None, bool | None, int | None]:
    """Return the size of a role's micro-batches: most sequences, whether they are packed by tokens instead, and most tokens."""
    rows, by_tokens, tokens = attrgetter(*_keys(role))(settings)
    return rows, by_tokens, tokens


def _is_checked(settings: Settings, role: Role) -> bool:
    # Whether the role has sizes of its own. If they equal those of its model's update, they are checked there.
    if role == "actor":
        return True
    if role == "values":
        return has_critic(settings) and sizes_of(settings, role) != sizes_of(as_critic(settings), "actor")
    built = {"ref": uses_kl, "teacher": has_teacher}
    return sizes_of(settings, role) != sizes_of(settings, "actor") and (role == "rollout" or built[role](settings))


def _refusals(role: Role) -> Iterator[Refusal]:
    rows_key, by_tokens_key, tokens_key = _keys(role)

    def has_no_size(settings: Settings) -> bool:
        rows, by_tokens, _ = sizes_of(settings, role)
        return not by_tokens and rows is None and _is_checked(settings, role)

    def least(settings: Settings) -> int:
        own: dict[Role, SequenceRole] = {"values": "critic", "ref": "ref", "teacher": "teacher"}
        budget_role = own.get(role, "actor")
        return -(-longest_sample(settings) // sequence_ranks(settings, budget_role))

    def is_too_small(settings: Settings) -> bool:
        _, by_tokens, tokens = sizes_of(settings, role)
        return bool(by_tokens) and (tokens or 0) < least(settings) and _is_checked(settings, role)

    yield Refusal(
        (rows_key, by_tokens_key), has_no_size, "a micro-batch has no size", f"Set {rows_key}, or {by_tokens_key}=true."
    )
    yield Refusal(
        (tokens_key,),
        is_too_small,
        "a sample may have more tokens (data.max_prompt_length + data.max_response_length)",
        lambda settings: f"Raise it to at least {least(settings)}, or lower one of the two lengths.",
        lambda settings: (
            f"a sample may have {longest_sample(settings)} tokens (data.max_prompt_length + data.max_response_length)"
        ),
    )


def _may_adapt(settings: Settings) -> bool:
    actor = settings.actor_rollout_ref.actor
    return actor.use_dynamic_bsz and not actor.optim.in_backward and sequence_ranks(settings, "actor") == 1


def _counts(role: Role, tokens: bool) -> Predicate:
    return lambda settings: bool(sizes_of(settings, role)[1]) == tokens


def _values_may_adapt(settings: Settings) -> bool:
    return bool(sizes_of(settings, "values")[1]) and sequence_ranks(settings, "critic") == 1


def _enough_tokens(need: Need, settings: Settings) -> int | None:
    rollout = settings.actor_rollout_ref.rollout
    return need.part(need.work.tokens, max(need.work.longest, (rollout.prompt_length or 0) + (rollout.response_length or 0)))


def _enough_scored_tokens(need: Need, _: Settings) -> int | None:
    return need.part(need.work.tokens, max(need.work.longest, 1))


def _scores_by(recipe: Recipe) -> Predicate:
    return lambda settings: settings.reward_model.recipe is recipe


def _scores_dynamic(settings: Settings) -> bool:
    return settings.reward_model.recipe is None and bool(settings.reward_model.use_dynamic_bsz)


def _scores_by_tokens(settings: Settings) -> bool:
    return settings.reward_model.recipe is not None or bool(settings.reward_model.use_dynamic_bsz)


def _scores_may_adapt(settings: Settings) -> bool:
    return _scores_by_tokens(settings) and sequence_ranks(settings, "reward_model") == 1


def _advice() -> Iterator[Advice]:
    # Advice for bytes that grow with the cap: learn the cap, or lower the key of the phase.
    phases: dict[Role, str] = {
        "rollout": "old_log_prob", "ref": "ref", "teacher": "teacher", "actor": "update_actor", "values": "values",
    }  # fmt: skip
    for kind in ("activations", "logits"):
        yield Advice(kind, ADAPTIVE_KEY, True, _may_adapt, ("update_actor", "old_log_prob", "ref", "teacher"), ends_it=True)
        for role, phase in phases.items():
            rows, _, tokens = _keys(role)
            yield Advice(kind, tokens, LOWER, _counts(role, tokens=True), (phase,), to=_enough_tokens)
            yield Advice(kind, rows, LOWER, _counts(role, tokens=False), (phase,), to=enough_rows)
        yield Advice(kind, _CRITIC_ADAPTIVE, True, _values_may_adapt, ("values",), ends_it=True)
        # Only runs with a model that scores have this phase. The micro-batches of a recipe are always packed by tokens.
        yield Advice(kind, _REWARD_ADAPTIVE, True, _scores_may_adapt, ("reward",), ends_it=True)
        for recipe in RECIPES.values():
            yield Advice(kind, recipe.tokens_key, LOWER, _scores_by(recipe), ("reward",), to=_enough_scored_tokens)
        yield Advice(kind, _REWARD_TOKENS, LOWER, _scores_dynamic, ("reward",), to=_enough_tokens)
        yield Advice(kind, _REWARD_ROWS, LOWER, lambda settings: not _scores_by_tokens(settings), ("reward",), to=enough_rows)


_ACTOR_ROWS, _ACTOR_BY_TOKENS, BUDGET_KEY = _keys("actor")

_STEPS_IN_BACKWARD = Refusal(
    (ADAPTIVE_KEY, _IN_BACKWARD),
    lambda settings: (
        settings.actor_rollout_ref.actor.adaptive_token_budget and settings.actor_rollout_ref.actor.optim.in_backward
    ),
    "after an out-of-memory error gradients are computed again, which is impossible once backward has updated weights",
    "Set one of them to false.",
)


_counts_tokens = attrgetter(_ACTOR_BY_TOKENS)


KNOB = Knob(
    cost="more, smaller micro-batches",
    settings={"actor": UpdateBudget, "critic": CriticBudget, "log_prob_pass": LogProbBudget},
    known_as={
        "per_device_train_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "gradient_accumulation_steps": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu (accumulation follows from it)",
        "local_rollout_forward_batch_size": "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    },
    unused_keys=(
        UnusedKey(_ACTOR_ROWS, _counts_tokens, "actor.use_dynamic_bsz packs by tokens"),
        UnusedKey(BUDGET_KEY, lambda settings: not _counts_tokens(settings), "actor.use_dynamic_bsz is false"),
        UnusedKey(ADAPTIVE_KEY, lambda settings: not _counts_tokens(settings), "actor.use_dynamic_bsz is false"),
    ),
    refuses=(
        *_refusals("actor"),
        *_refusals("rollout"),
        *_refusals("ref"),
        *_refusals("teacher"),
        *_refusals("values"),
        _STEPS_IN_BACKWARD,
    ),
    advice=tuple(_advice()),
    claims=(Claim("update_actor", "activations", activation_saving),),
    row=LadderRow(40, on=(f"{BUDGET_KEY}={{pair}}",), off=(f"{BUDGET_KEY}={{all}}",)),
)


# A token budget that learns from measured peaks, and never exceeds the cap that the user set.
#
# After each pass the next cap is ``cap x min(1.25, 0.95 x budget / peak)``. ``budget`` is what the process may use of the device,
# and ``peak`` is the most that the pass used. A peak is ``a + b x cap`` bytes: ``a`` does not depend on the cap. So one step
# multiplies the distance to the fixed point by ``a / (a + b x cap)``, which lies between 0 and 1, and the cap approaches the
# fixed point from one side. The result of training does not change, because losses are divided by global counts.

GROWTH = 1.25
"""Largest factor by which a cap grows from one pass to the next."""
HEAD_ROOM = 0.95
"""Share of the budget that a pass may use."""


@dataclass(frozen=True)
class PassFigures:
    peak_bytes: int | None = None
    """Largest memory peak of live tensors over all ranks. None = it was not measured."""
    budget_bytes: int | None = None
    """Memory that a process may use on its device: the least over all ranks. None = there is no limit to compare with."""
    cap_after_error: int | None = None
    """Lowest cap of any rank after out-of-memory errors. None = there was no error."""
    retries: int = 0
    """Out-of-memory errors after which the pass continued, summed over ranks."""


@dataclass
class LearnedBudget:
    """The cap of one pass. Only the driver has it, and cuts the micro-batches of all ranks with it, so the ranks always agree."""

    maximum: int
    """The cap in the settings: the first and the largest cap."""
    cap: int = 0
    """Most tokens of a micro-batch in the next pass. A longer row is a micro-batch of its own."""
    retries: int = 0
    """Out-of-memory errors since the metrics were last read."""
    too_high: tuple[int, int] | None = None
    """(tokens of the fullest micro-batch, peak) of the pass after which the cap was last lowered. None = the last peak was within
    the budget."""
    cuts_rows: bool = False
    """Conversations longer than the cap are computed in parts. An error showed that they do not fit whole."""

    def __post_init__(self) -> None:
        self.cap = self.cap or self.maximum

    def tokens(self, longest: int) -> int:
        return min(max(self.cap, longest), self.maximum)

    def learn(self, fullest: int, figures: PassFigures, longest: int = 0) -> None:
        """Choose the cap of the next pass. ``fullest`` counts the tokens of the fullest micro-batch, ``longest`` of a row.

        A pass that did not fill its micro-batches says little about larger ones. So a cap never grows beyond what the fullest
        micro-batch supports, and a peak over the budget lowers the cap from the fullest micro-batch. If smaller micro-batches do
        not lower the peak, something else causes it (such as the optimizer step), and the cap is not lowered again.
        """
        self.retries += figures.retries
        if figures.cap_after_error is not None:
            # The ranks have already continued with this cap. The peak of a pass that failed says nothing about a fitting one.
            self.cap = min(self.cap, figures.cap_after_error)
            self.cuts_rows |= figures.cap_after_error < longest
            return
        if not figures.peak_bytes or figures.budget_bytes is None or not fullest:
            return
        ratio = min(GROWTH, HEAD_ROOM * figures.budget_bytes / figures.peak_bytes)
        target = max(int(fullest * ratio), 1)
        if ratio >= 1:
            self.too_high = None
            self.cap = min(max(self.cap, target), self.maximum)
        elif self.too_high is None or fullest >= self.too_high[0] or figures.peak_bytes < self.too_high[1]:
            self.too_high = fullest, figures.peak_bytes
            self.cap = min(self.cap, target)

    def state_dict(self) -> dict[str, Any]:
        return {"cap": self.cap, "too_high": self.too_high, "cuts_rows": self.cuts_rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cap, self.too_high = min(state["cap"], self.maximum), state["too_high"]
        self.cuts_rows = state.get("cuts_rows", False)


def budget_metrics(budgets: Mapping[str, LearnedBudget]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for phase, budget in budgets.items():
        metrics[f"perf/token_budget/{phase}"] = float(budget.cap)
        metrics[f"perf/token_budget/{phase}_retries"] = float(budget.retries)
        budget.retries = 0
    return metrics
