"""The search of ``verl-memopt fit``: changes that make a run fit, the longest response, and the largest micro-batch.

The search first takes every combination of the levers that are choices. With each, all other levers are at their last level,
which needs the least memory. So if no combination fits, no setting of the levers fits. From a combination that fits, the search
then takes back every change that is not needed, and begins with the changes that cost the most time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from verl_memopt.config.keys import replaced, shown, value_at
from verl_memopt.config.loader import changed
from verl_memopt.config.schema import Settings
from verl_memopt.errors import ConfigError
from verl_memopt.memory.critic_rules import has_critic
from verl_memopt.memory.knob import knob_named, longest_sample, uses_kl
from verl_memopt.observe.log_setup import silent
from verl_memopt.observe.phase import GIB
from verl_memopt.plan.levers import BUDGET, BUDGETS, SHARE, Level, Lever, levers_of
from verl_memopt.plan.model_refusals import why_refused
from verl_memopt.plan.peaks import CERTAIN
from verl_memopt.plan.verdict import Card, FitVerdict, cards_like, is_here, judge, seconds_with, sizes_of_models

_AR = "actor_rollout_ref"
RESPONSE = "data.max_response_length"
PROMPTS, ROUND, MINI = "data.train_batch_size", "data.gen_batch_size", f"{_AR}.actor.ppo_mini_batch_size"
MOST_STEPS = 4096
"""Largest step that is tried, as a multiple of the run's step."""
LONGEST = 2**20
"""Largest number of tokens of a response that is tried."""
CANDIDATES = 3
"""Number of states that fit, of which the one with the fewest estimated seconds is taken."""
BOUND_BY_SHARE = {"init", "gen", "testing", "KV cache"}
"""Phases, and the KV cache, that another share of the card for the engine can make fit."""

State = tuple[int, ...]
"""For each lever the index of its level."""
PLANS: tuple[Callable[[Level], bool], ...] = (
    lambda level: not level.changes_numbers,
    lambda level: level.knob not in ("lora", "quantized_base"),
    lambda level: True,
)
"""Predicates of the levels that may be used, tried in this order: levels that change no number; levels that still train all
weights; all levels."""


@dataclass(frozen=True)
class Change:
    name: str
    keys: Mapping[str, Any]
    changes_numbers: bool = False
    saved_bytes: int = 0
    without: str = ""
    """What is too large without the change, in words; "" if the change is only there because another change needs it."""

    @property
    def cost(self) -> str:
        return knob_named(self.name).cost


@dataclass(frozen=True)
class Step:
    """The largest step that fits, with mini-batches of the same size."""

    sequences: int = 0
    """Number of responses in the step; 0 = unknown."""
    is_all: bool = False
    """The largest step that the search tries fits, so a still larger one may fit too."""
    phase: str = ""
    """The phase in which a further sequence needs the most device memory; "" if it needs none in any phase."""
    sequence_bytes: float = 0.0
    """Device bytes of a further sequence in this phase: its tokens are on the device until their micro-batch is computed."""
    host_bytes: int = 0
    """Lower bound of the bytes of a sequence on the driver's host: its token ids, and the values that each pass adds."""


@dataclass(frozen=True)
class Findings:
    verdict: FitVerdict
    changes: tuple[Change, ...] = ()
    """Changes that make the run fit, or that help most if nothing makes it fit. Empty if it fits already."""
    after: FitVerdict | None = None
    """The verdict with the changes; None if the run fits already."""
    response: int = 0
    """With the changes: tokens of the longest response that fits; 0 = none."""
    most: int = 0
    """Tokens of the longest response that was tried."""
    budget: int = 0
    """With the changes: tokens of the largest micro-batch of the update that fits."""
    step: Step = Step()
    """With the changes: the largest step that fits."""

    @property
    def keys(self) -> dict[str, Any]:
        return {key: value for change in self.changes for key, value in change.keys.items()}

    @property
    def fits(self) -> bool:
        return self.verdict.fits or (self.after is not None and self.after.fits)


def find_out(settings: Settings, card: Card) -> Findings:
    """Raise a ConfigError if a model of the run refuses its settings."""
    reason = why_refused(settings, sizes_of_models(settings))
    if reason is not None:
        raise ConfigError(reason)
    search = Search(settings, card)
    verdict = judge(settings, card)
    changes, after = ((), None) if verdict.fits else search.changes()
    found = Findings(verdict, changes, after)
    if not found.fits:
        return found
    keys = found.keys
    most_tokens, budget = search.most_tokens, search.largest_budget(keys)
    step = search.largest_step(keys)
    return dataclasses.replace(found, response=search.longest_response(keys), most=most_tokens, budget=budget, step=step)


def refuse_what_cannot_fit(settings: Settings) -> None:
    """Refuse a run whose weights, gradients and optimizer state alone are too large for ``memory.card_gb``.

    Nothing is checked if a model is not on this machine yet.

    Raises:
        ConfigError: The run cannot fit. The message says what would make it fit.
    """
    gigabytes = settings.memory.card_gb
    if gigabytes is None or not is_here(settings):
        return
    card = Card.of(gigabytes)
    peaks = judge(settings, card).peaks
    phase = max(peaks.least, key=peaks.least.__getitem__)
    if peaks.least[phase] <= card.num_bytes:
        return
    changes, after = Search(settings, card).changes()
    way = " ".join(f"{key}={shown(value)}" for change in changes for key, value in change.keys.items())
    out = "No setting makes it fit: use a smaller model, or more or larger cards."
    if after.fits:
        out = f"It fits with {way}."
    parts = ", ".join(f"{kind} {size / GIB:.1f}" for kind in CERTAIN if (size := peaks.phases[phase].get(kind, 0)))
    raise ConfigError(
        f"memory.card_gb={gigabytes:g}, {_AR}.model.path={settings.actor_rollout_ref.model.path}: {phase} needs at least "
        f"{peaks.least[phase] / GIB:.1f} GiB of {card.num_bytes / GIB:.1f} ({parts}). {out} Set memory.card_gb=null to start it "
        "anyway."
    )


class Search:
    def __init__(self, settings: Settings, card: Card, levers: Sequence[Lever] | None = None) -> None:
        self._card = card
        self.settings = settings
        sizes = sizes_of_models(settings)
        self.levers = tuple(levers_of(settings, sizes, card.host_bytes is not None) if levers is None else levers)
        self._share = next((at for at, lever in enumerate(self.levers) if SHARE in lever.levels[-1].keys), None)
        self.as_it_is: State = (0,) * len(self.levers)
        self._verdicts: dict[State, FitVerdict] = {}
        self._accepted: dict[State, bool] = {}

    def judged(self, keys: Mapping[str, Any]) -> FitVerdict | None:
        # Return the verdict with new values of some keys; None if the rules or the models refuse the combination.
        with suppress(ConfigError):
            with silent():
                settings = changed(self.settings, keys)
            if why_refused(settings, sizes_of_models(settings)) is None:
                return judge(settings, self._card)
        return None

    def changes(self, plans: Sequence[Callable[[Level], bool]] = PLANS) -> tuple[tuple[Change, ...], FitVerdict]:
        """Return (changes that make the run fit, verdict with these changes).

        The changes are the cheapest of those that were found, and each of them is needed. If nothing is enough, the changes that
        help most are returned.

        ``plans``: predicates of the levels that may be used. A later plan is tried only if the earlier plans find nothing.
        """
        closest = self.as_it_is
        if self.verdict(closest).fits:
            return (), self.verdict(closest)
        for may in plans:
            found, closest = self._found(may, closest)
            if found:
                break
        if not found:
            closest = self._descended(closest, plans[-1])
            found = [self.fitting(closest) or closest]
        state = min(map(self._backed_off, found), key=self._price)
        return tuple(self._as_changes(state)), self.verdict(state)

    # A state of the levers.

    def keys(self, state: State) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for lever, level in zip(self.levers, state, strict=True):
            merged |= lever.levels[level].keys
        # Leave out the keys that already have this value in the run.
        return {key: value for key, value in merged.items() if value_at(self.settings, key) != value}

    def verdict(self, state: State) -> FitVerdict:
        # This also works for a state that the rules refuse.
        if state not in self._verdicts:
            self._verdicts[state] = judge(replaced(self.settings, self.keys(state)), self._card)
        return self._verdicts[state]

    def accepts(self, state: State) -> bool:
        if state not in self._accepted:
            self._accepted[state] = self.judged(self.keys(state)) is not None
        return self._accepted[state]

    def fitting(self, state: State) -> State | None:
        verdict = self.verdict(state)
        if verdict.fits:
            return state
        if self._share is None or not verdict.too_much.keys() <= BOUND_BY_SHARE:
            return None
        shares = (_with(state, self._share, level) for level in range(len(self.levers[self._share].levels)))
        return next((shared for shared in shares if self.verdict(shared).fits), None)

    # From the state that saves the most to the changes that are needed.

    def _found(self, may: Callable[[Level], bool], closest: State) -> tuple[list[State], State]:
        # Return (the first states that fit with the allowed levels, the state that is closest to fitting).
        found: list[State] = []
        allowed = [[number for number, level in enumerate(lever.levels) if may(level)] for lever in self.levers]
        tried = [
            ([0] if at == self._share else numbers if lever.is_choice else numbers[-1:])
            for at, (lever, numbers) in enumerate(zip(self.levers, allowed, strict=True))
        ]
        for state in sorted(product(*tried), key=self._choices_cost):
            if _missing(self.verdict(state)) < _missing(self.verdict(closest)):
                closest = state
            fits = self.fitting(state)
            settled = None if fits is None else self._settled(fits)
            if settled is not None:
                found.append(settled)
                if len(found) == CANDIDATES:
                    break
        return found, closest

    def _price(self, state: State) -> tuple[float, float]:
        # Return (cost of the levels that change numbers, estimated seconds of a step). States are compared in this order.
        chosen = ((lever, lever.levels[level]) for lever, level in zip(self.levers, state, strict=True))
        lossy = sum(lever.cost for lever, level in chosen if level.changes_numbers)
        settings = replaced(self.settings, self.keys(state))
        # Use the rates of a named card, so that the result is the same on every machine.
        return lossy, sum(seconds_with(settings, self.verdict(state), cards_like(self._card)[0]).values())

    def _choices_cost(self, state: State) -> float:
        return sum(
            lever.cost * (1 + level / 10) for lever, level in zip(self.levers, state, strict=True) if lever.is_choice and level
        )

    def _settled(self, state: State) -> State | None:
        # Return a state that fits and that the rules accept, or None. Levels that the rules refuse together with the choices are
        # replaced by lower ones.
        if self.accepts(state):
            return state
        settled = tuple(level if lever.is_choice else 0 for lever, level in zip(self.levers, state, strict=True))
        if not self.accepts(settled):
            return None
        # Levers that change numbers are last in the list. They save the most, so they are restored first.
        for at in reversed(range(len(state))):
            downwards = (_with(settled, at, level) for level in range(state[at], settled[at], -1))
            settled = next((lower for lower in downwards if self.accepts(lower)), settled)
        fits = self.fitting(settled)
        return fits if fits is not None and self.accepts(fits) else None

    def _backed_off(self, state: State) -> State:
        """Return each lever to the run's values as far as the other levers allow, the levers with the highest cost first.

        A state that fits still fits afterwards. A state that does not fit does not get further from fitting.
        """
        order = sorted(range(len(state)), key=lambda at: -self.levers[at].cost)
        fits, before = self.verdict(state).fits, None
        while state != before:
            before = state
            for at in order:
                for level in range(1 if self.levers[at].is_choice else state[at]):
                    less = _with(state, at, level)
                    if fits and self._share is not None:
                        less = self.fitting(_with(less, self._share, 0)) or less
                    enough = self.verdict(less).fits or (not fits and self._as_close(less, state))
                    if less != state and enough and self.accepts(less):
                        state = less
                        break
        return state

    def _as_close(self, state: State, other: State) -> bool:
        return _missing(self.verdict(state)) <= _missing(self.verdict(other))

    def _descended(self, state: State, may: Callable[[Level], bool]) -> State:
        # Change one lever after another, until no change of a single lever brings the state closer to fitting.
        state = state if self.accepts(state) else self._closest_accepted(state)
        before: State = ()
        while state != before:
            before = state
            levels = [
                (at, number) for at, lever in enumerate(self.levers) for number, level in enumerate(lever.levels) if may(level)
            ]
            single = (_with(state, at, level) for at, level in levels)
            closer = [other for other in single if not self._as_close(state, other)]
            ranked = sorted(closer, key=lambda other: _missing(self.verdict(other)))
            state = next((other for other in ranked if self.accepts(other)), state)
        return state

    def _closest_accepted(self, state: State) -> State:
        settled = self.as_it_is
        for at in reversed(range(len(state))):
            changed_state = _with(settled, at, state[at])
            settled = changed_state if self.accepts(changed_state) and self._as_close(changed_state, settled) else settled
        return settled

    def _as_changes(self, state: State) -> Iterator[Change]:
        keys = self.keys(state)
        for at, level in enumerate(state):
            chosen = self.levers[at].levels[level]
            own = {key: keys[key] for key, value in chosen.keys.items() if key in keys and keys[key] == value}
            if own:
                without = _with(state, at, 0)
                over = self.verdict(without)
                saved = max(over.peaks.device_bytes - self.verdict(state).peaks.device_bytes, 0)
                yield Change(chosen.knob, own, chosen.changes_numbers, saved, over.missing if self.accepts(without) else "")

    # The most that fits.

    def longest_response(self, keys: Mapping[str, Any]) -> int:
        prompt, rollout = self.settings.data.max_prompt_length, self.settings.actor_rollout_ref.rollout
        follows = rollout.max_model_len == longest_sample(self.settings)

        def fits(response: int) -> bool:
            longer: dict[str, Any] = {RESPONSE: response, f"{_AR}.rollout.response_length": response}
            if follows:
                longer[f"{_AR}.rollout.max_model_len"] = prompt + response
            now = {key: keys.get(key, value_at(self.settings, key)) for key in BUDGETS}
            raised = {key: max(int(value), prompt + response) for key, value in now.items() if value is not None}
            verdict = self.judged({**keys, **longer, **raised})
            return verdict is not None and verdict.fits

        return _largest(fits, self.most_tokens)

    @property
    def most_tokens(self) -> int:
        sizes = sizes_of_models(self.settings)
        positions = [size.positions for size in (sizes.policy, sizes.critic) if size is not None and size.positions]
        return max(min([LONGEST, *(count - self.settings.data.max_prompt_length for count in positions)]), 1)

    def largest_budget(self, keys: Mapping[str, Any]) -> int:
        def fits(tokens: int) -> bool:
            verdict = self.judged({**keys, BUDGET: tokens})
            return verdict is not None and verdict.fits

        rows = self.settings.actor_rollout_ref.actor.ppo_mini_batch_size * self.settings.actor_rollout_ref.rollout.n
        return _largest(fits, rows * longest_sample(self.settings), longest_sample(self.settings))

    def largest_step(self, keys: Mapping[str, Any]) -> Step:
        data, samples = self.settings.data, self.settings.actor_rollout_ref.rollout.n
        prompts = {key: value for key, value in ((PROMPTS, data.train_batch_size), (ROUND, data.gen_batch_size)) if value}
        mini = {MINI: self.settings.actor_rollout_ref.actor.ppo_mini_batch_size}

        def larger(times: int) -> FitVerdict | None:
            return self.judged({**keys, **mini, **{key: value * times for key, value in prompts.items()}})

        def fits(times: int) -> bool:
            verdict = larger(times)
            return verdict is not None and verdict.fits

        few, more = larger(2), larger(4)  # a step of a single mini-batch may have other phases, so compare two larger ones
        if few is None or more is None:
            return Step()
        rows = data.train_batch_size * samples
        grown = {phase: (total - few.peaks.totals[phase]) / (2 * rows) for phase, total in more.peaks.totals.items()}
        phase = max(grown, key=grown.__getitem__)
        times = MOST_STEPS if grown[phase] <= 0 else _largest(fits, MOST_STEPS)
        host = _driver_bytes(self.settings)
        return Step(rows * times, times == MOST_STEPS, phase if grown[phase] > 0 else "", max(grown[phase], 0.0), host)


def _driver_bytes(settings: Settings) -> int:
    # Bytes of the tensors of the longest sequence in a step's batch.
    added = 2 + settings.actor_rollout_ref.rollout.calculate_log_probs  # old log-probs and advantages
    added += uses_kl(settings) + 2 * has_critic(settings)  # the reference's log-probs; values and returns
    return 8 * settings.data.max_prompt_length + (8 + 4 * added) * settings.data.max_response_length


def _with(state: State, at: int, level: int) -> State:
    return (*state[:at], level, *state[at + 1 :])


def _missing(verdict: FitVerdict) -> float:
    over = dict(verdict.too_much)
    cache_tokens = over.pop("KV cache", 0)
    # A missing token of the KV cache counts as 128 KiB, so that it can be compared with bytes.
    return sum(over.values()) + cache_tokens * 2**17


def _largest(fits: Callable[[int], bool], largest: int, smallest: int = 1) -> int:
    """Return the largest number that fits, found by bisection with an error of at most 1/64; 0 if ``smallest`` does not fit."""
    if not fits(smallest):
        return 0
    if fits(largest):
        return largest
    low, high = smallest, largest
    while high - low > max(low // 64, 1):
        middle = (low + high) // 2 if high < 4 * low else min(2 * low, high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
