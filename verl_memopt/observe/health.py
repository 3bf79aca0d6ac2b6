"""Signs that a run has stopped learning or has lost what it knew. Each is told once a run.

A score is compared with itself: the mean over prompts, and the standard error of that mean, now and at the start. A small
difference is noise, and a healthy run is told nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

VALIDATION_ERRORS = 2.0
"""Standard errors by which a validation must be below the first one."""
REWARD_ERRORS = 4.0
"""As above, of the training reward. It is looked at in every step and not once in many, so chance has more tries."""
WINDOW_PROMPTS = 32
"""Prompts whose rewards are averaged; fewer would make the standard error itself a guess."""
ZERO_STEPS = 5
"""Steps in a row whose gradient must be exactly 0."""
ZERO_PROMPTS = 64
"""Prompts in a row whose answers must score alike: a small batch of hard prompts may do so by chance."""

LOWER = "Lower actor_rollout_ref.actor.optim.lr and go back to a checkpoint from before, if it does not recover."
ANSWERLESS = (
    "the gradient has been exactly 0 for {steps} steps although the advantages are not. The weights no longer react to the loss. "
    + LOWER
)
ALIKE = (
    "the gradient has been exactly 0 for {steps} steps, because all answers to a prompt score the same. Nothing is learned. The "
    "mean score is {now}; in the first steps it was {first}. If it fell, the learning rate is too high: lower "
    "actor_rollout_ref.actor.optim.lr and go back to an earlier checkpoint. If it never rose, look at the answers in "
    "generations.jsonl: the task may be too hard or too easy, or the reward never matches."
)
WORSE = (
    "the {what} is below its start: {now} at step {step}, {first} at the start (mean, and standard error of the mean over "
    "prompts). " + LOWER
)
"""Texts by what was seen."""


@dataclass
class Score:
    """Scores of some prompts: how many, their sum, and the sum of their squares. The score of a prompt is its answers' mean."""

    prompts: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, scores: Sequence[float], samples: int) -> Score:
        """Gives the score of answers, of which each prompt has ``samples`` that follow each other."""
        means = [sum(scores[start : start + samples]) / samples for start in range(0, len(scores), samples)]
        return cls(len(means), sum(means), sum(mean * mean for mean in means))

    def plus(self, other: Score) -> Score:
        return Score(self.prompts + other.prompts, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        return self.total / self.prompts

    @property
    def error(self) -> float:
        """The standard error of the mean; infinite for one prompt, which says nothing about others."""
        if self.prompts < 2:
            return math.inf
        variance = max(self.squares - self.total * self.mean, 0.0) / (self.prompts - 1)
        return math.sqrt(variance / self.prompts)

    def above(self, other: Score, errors: float) -> bool:
        """Says whether the mean is above another by more than so many standard errors of the difference."""
        return self.mean - other.mean > errors * math.hypot(self.error, other.error)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.error:.3f})"


@dataclass
class _State:
    """What a resumed run must remember. lowest, highest: score of any answer so far."""

    first: Score = field(default_factory=Score)
    recent: list[Score] = field(default_factory=list)
    validation: Score | None = None
    lowest: float = math.inf
    highest: float = -math.inf
    zero_steps: int = 0
    zero_prompts: int = 0
    zero_with_advantages: int = 0
    told: list[str] = field(default_factory=list)


class Health:
    """Looks at each step and each validation, and gives what there is to warn of."""

    def __init__(self, validates: bool) -> None:
        """validates: the run validates as it goes, so that its training reward need not stand for that."""
        self._validates = validates
        self._state = _State()

    @property
    def collapsed(self) -> bool:
        """Says whether the training reward is now far below that of the first steps."""
        recent = self._recent()
        return recent is not None and self._state.first.above(recent, REWARD_ERRORS)

    def step(self, step: int, scores: Sequence[float], samples: int, metrics: Mapping[str, float]) -> list[str]:
        """Gives the new warnings after a step. scores: of its answers, in the order of :meth:`Score.of`."""
        state, score = self._state, Score.of(scores, samples)
        state.lowest, state.highest = min(state.lowest, *scores), max(state.highest, *scores)
        if state.first.prompts < WINDOW_PROMPTS:
            state.first = state.first.plus(score)
        else:
            state.recent = _last([*state.recent, score])
        self._count_zero(score, metrics)
        found = self._zero(min(scores), score)
        if not self._validates and self.collapsed:
            found["reward"] = WORSE.format(what="training reward", now=self._recent(), step=step, first=state.first)
        return self._new(found)

    def validation(self, step: int, scores: Sequence[float], samples: int) -> list[str]:
        """Gives the new warnings after a validation. scores: as for a step."""
        score, first = Score.of(scores, samples), self._state.validation
        if first is None:
            self._state.validation = score
            return []
        if not first.above(score, VALIDATION_ERRORS):
            return []
        return self._new({"validation": WORSE.format(what="validation score", now=score, step=step, first=first)})

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        scores = {
            "first": Score(**state["first"]),
            "recent": [Score(**score) for score in state["recent"]],
            "validation": None if state["validation"] is None else Score(**state["validation"]),
        }
        self._state = _State(**{**state, **scores})

    def _count_zero(self, score: Score, metrics: Mapping[str, float]) -> None:
        state = self._state
        if metrics["actor/grad_norm"] != 0.0:
            state.zero_steps = state.zero_prompts = state.zero_with_advantages = 0
            return
        state.zero_steps += 1
        state.zero_prompts += score.prompts
        state.zero_with_advantages += any(metrics.get(f"critic/advantages/{name}", 0.0) != 0.0 for name in ("min", "max"))

    def _zero(self, worst: float, score: Score) -> dict[str, str]:
        """worst: score of the worst answer of the step."""
        state = self._state
        if state.zero_steps < ZERO_STEPS:
            return {}
        if state.zero_with_advantages == state.zero_steps:
            return {"zero": ANSWERLESS.format(steps=state.zero_steps)}
        recent = self._recent()
        solved = worst == state.highest > state.lowest
        risen = recent is not None and recent.above(state.first, VALIDATION_ERRORS)
        if solved or risen or state.zero_prompts < ZERO_PROMPTS:
            return {}
        return {"zero": ALIKE.format(steps=state.zero_steps, now=f"{score.mean:.3f}", first=f"{state.first.mean:.3f}")}

    def _recent(self) -> Score | None:
        """The score of the last steps, apart from the first ones; None while these are too few."""
        total = Score()
        for score in self._state.recent:
            total = total.plus(score)
        return total if total.prompts >= WINDOW_PROMPTS else None

    def _new(self, found: Mapping[str, str]) -> list[str]:
        new = {kind: text for kind, text in found.items() if kind not in self._state.told}
        self._state.told += new
        return list(new.values())


def _last(scores: list[Score]) -> list[Score]:
    """Leaves out the oldest steps that are not needed for a whole window."""
    while sum(score.prompts for score in scores[1:]) >= WINDOW_PROMPTS:
        scores = scores[1:]
    return scores
