"""Count steps that applied no update, also over restarts, and end the run after too many of them in a row.

This file also watches the scores for signs that nothing is learned, and says what to change.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from verl_memopt.errors import TrainingError
from verl_memopt.run.checkpoints import CheckpointStore
from verl_memopt.worker.trained_model import ACTOR, CRITIC, Role

logger = logging.getLogger(__name__)

KEY = "trainer.max_skipped_steps"
PATHS = {
    ACTOR: "actor_rollout_ref.model.path and actor_rollout_ref.actor.fsdp_config.dtype",
    CRITIC: "critic.model.path and critic.model.fsdp_config.dtype",
}
"""Role -> settings to check if even the first update has no finite gradient."""
LARGE = 1e6
"""Advantages above this make gradients overflow, whatever the weights are."""
BAD_LOG_PROBS = "training/log_probs_not_finite"
"""Metric: number of the policy's old log-probs that are NaN or infinite."""


@dataclass
class Updates:
    role: Role
    lr: float
    updates_per_step: int
    skipped_in_a_row: int = 0
    applied_step: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_in_a_row": self.skipped_in_a_row, "applied_step": self.applied_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped_in_a_row, self.applied_step = state["skipped_in_a_row"], state["applied_step"]


@dataclass
class UpdateGuard:
    """Watches the updates of each step, and marks checkpoints whose weights have proven good.

    Attributes:
        max_skipped_steps: The run ends after this many steps in a row without any update of a role.
    """

    max_skipped_steps: int
    store: CheckpointStore
    actor: Updates
    critic: Updates | None = None

    def watch(self, step: int, metrics: Mapping[str, float], sound: bool) -> None:
        """Judge the updates of a finished step.

        Weights are good if they gave a finite gradient other than 0 and the reward has not collapsed. The step began with the
        weights of the checkpoint before it, so that checkpoint is then marked as proven. A gradient of exactly 0 proves nothing.
        With a critic, both models must be good. A role that was not updated in the step is not judged.

        Raises:
            TrainingError: ``trainer.max_skipped_steps`` steps in a row applied no update.
        """
        trained = [self.actor] if self.critic is None else [self.actor, self.critic]
        good = [self._judge(updates, step, metrics) for updates in trained if updates.role.skipped in metrics]
        if sound and all(good):
            self.store.prove(step - 1)

    def state_dict(self) -> dict[str, Any]:
        critic = {} if self.critic is None else {"critic": self.critic.state_dict()}
        return self.actor.state_dict() | critic

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.actor.load_state_dict(state)
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])

    def _judge(self, updates: Updates, step: int, metrics: Mapping[str, float]) -> bool:
        role = updates.role
        skipped, norm = int(metrics[role.skipped]), metrics[role.grad_norm]
        if skipped:
            logger.warning(
                "step %d: the gradient norm%s is %s. %d of %d updates skipped: they changed neither weights nor "
                "optimizer state nor schedule", step, _of(role), norm, skipped, updates.updates_per_step,
            )  # fmt: skip
        if skipped < updates.updates_per_step:
            updates.skipped_in_a_row, updates.applied_step = 0, step
            return norm != 0.0
        updates.skipped_in_a_row += 1
        if updates.skipped_in_a_row >= self.max_skipped_steps:
            raise TrainingError(self._message(updates, step, norm, metrics))
        return False

    def _message(self, updates: Updates, step: int, norm: float, metrics: Mapping[str, float]) -> str:
        first = step - updates.skipped_in_a_row + 1
        steps = f"step {step}" if first == step else f"steps {first} to {step}"
        weights = f"the update of step {updates.applied_step}" if updates.applied_step else "the model that the run began with"
        return (
            f"{KEY}={self.max_skipped_steps}: {steps} applied no update{_of(updates.role)}, because the gradient norm was not "
            f"finite ({norm}). The weights are those of {weights}. {_cause(updates, metrics)} "
            f"{recovery_advice(updates.role, updates.lr, self.store)}"
        )


def _of(role: Role) -> str:
    return "" if role is ACTOR else f" of the {role.name}"


def _cause(updates: Updates, metrics: Mapping[str, float]) -> str:
    learned, outputs = ("advantages", "log-probs") if updates.role is ACTOR else ("returns", "values")
    low, high = (metrics.get(f"critic/{learned}/{name}", 0.0) for name in ("min", "max"))
    if updates.role is ACTOR:
        is_damaged = bool(metrics.get(BAD_LOG_PROBS))
    else:
        is_damaged = not math.isfinite(metrics.get("critic/values/mean", 0.0))
    if is_damaged:
        symptom = f"They give {outputs} that are not finite"
    elif max(abs(low), abs(high)) > LARGE:
        return f"The {learned} reach from {low:.4g} to {high:.4g}: look at the rewards first."
    else:
        symptom = f"Their {outputs} are finite, but their gradients overflow"
    if updates.applied_step:
        return f"{symptom}: that update has damaged them."
    return f"{symptom}: check {PATHS[updates.role]}."


def recovery_advice(role: Role, lr: float, store: CheckpointStore) -> str:
    lower = f"{role.key}.optim.lr=<less than {lr:g}>"
    proven = store.proven()
    if proven is None:
        return f"No checkpoint of this run has proven good. Start again with a lower rate: trainer.resume_mode=disable {lower}"
    return (
        f"The checkpoint of step {proven} is good: its weights gave finite gradients. Continue from it with a lower rate: "
        f"trainer.resume_mode=resume_path trainer.resume_from_path={store.folder(proven)} {lower}"
    )


# Signs that a run has stopped learning, has become worse or wastes its answers. Each is reported once per run.
#
# The current score is compared with the score at the start. Both are means over prompts with a standard error, so that a small
# difference counts as noise and a healthy run gets no warning.


VALIDATION_ERRORS = 2.0
"""Warn if a validation score is below the first one by this many standard errors."""
REWARD_ERRORS = 4.0
"""The same for the training reward. The number is higher, because a check in every step gives more false alarms by chance."""
WINDOW_PROMPTS = 32
"""Number of prompts whose rewards are averaged. With fewer prompts the standard error itself would be unreliable."""
ZERO_STEPS = 5
"""Warn after this many steps in a row with a gradient of exactly 0."""
ZERO_PROMPTS = 64
"""Warn after this many prompts in a row whose answers all score the same. A few hard prompts do so by chance."""
INVALID_SHARE = 0.1
"""Warn if more than this share of a step's answers has no score."""

LOWER = "If the run does not recover, lower actor_rollout_ref.actor.optim.lr and continue from an earlier checkpoint."
NO_RESPONSE_TOKENS = (
    "the gradient has been exactly 0 for {steps} steps, although the advantages are not 0. The weights no longer react to the "
    "loss. " + LOWER
)
EQUAL_SCORES = (
    "the gradient has been exactly 0 for {steps} steps, because all answers to a prompt score the same. Nothing is learned. The "
    "mean score is {now}; in the first steps it was {first}. If it fell, the learning rate is too high: lower "
    "actor_rollout_ref.actor.optim.lr and continue from an earlier checkpoint. If it never rose, look at the answers in "
    "generations.jsonl: the task may be too hard or too easy, or the reward never matches."
)
WORSE = (
    "the {what} is below its start: {now} at step {step}, {first} at the start (mean, and standard error of the mean over "
    "prompts). " + LOWER
)
SCORELESS = (
    "{invalid} of {answers} answers of step {step} have no score (NaN), so nothing is learned from them. Look at these "
    "answers in the files of trainer.rollout_data_dir, or let the reward function score them."
)
"""Texts of the warnings."""


@dataclass
class Score:
    """Number of some prompts, sum of their scores, and sum of the squared scores. They give the mean and its standard error.

    The score of a prompt is the mean score of its answers.
    """

    prompts: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, scores: Sequence[float], samples: int) -> Score:
        groups = [_not_nan(scores[start : start + samples]) for start in range(0, len(scores), samples)]
        means = [sum(group) / len(group) for group in groups if group]
        return cls(len(means), sum(means), sum(mean * mean for mean in means))

    def plus(self, other: Score) -> Score:
        return Score(self.prompts + other.prompts, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        return self.total / self.prompts

    @property
    def error(self) -> float:
        # Standard error of the mean. It is infinite for one prompt, which says nothing about other prompts.
        if self.prompts < 2:
            return math.inf
        variance = max(self.squares - self.total * self.mean, 0.0) / (self.prompts - 1)
        return math.sqrt(variance / self.prompts)

    def above(self, other: Score, errors: float) -> bool:
        return self.mean - other.mean > errors * math.hypot(self.error, other.error)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.error:.3f})"


@dataclass
class _State:
    first: Score = field(default_factory=Score)
    recent: list[Score] = field(default_factory=list)
    validation: Score | None = None
    lowest: float = math.inf
    highest: float = -math.inf
    zero_steps: int = 0
    zero_prompts: int = 0
    zero_with_advantages: int = 0
    warned: list[str] = field(default_factory=list)


@dataclass
class Health:
    validates: bool
    learns_rewards: bool = True
    """False = only a teacher is learned from, so answers without a score are no loss."""
    _state: _State = field(default_factory=_State)

    @property
    def collapsed(self) -> bool:
        recent = self._recent()
        return recent is not None and self._state.first.above(recent, REWARD_ERRORS)

    def step(self, step: int, scores: Sequence[float], samples: int, metrics: Mapping[str, float]) -> list[str]:
        state, score, valid = self._state, Score.of(scores, samples), _not_nan(scores)
        state.lowest, state.highest = min([state.lowest, *valid]), max([state.highest, *valid])
        if state.first.prompts < WINDOW_PROMPTS:
            state.first = state.first.plus(score)
        else:
            state.recent.append(score)
            # Drop the oldest steps that are not needed for a full window.
            while sum(earlier.prompts for earlier in state.recent[1:]) >= WINDOW_PROMPTS:
                del state.recent[0]
        self._count_zero(score, metrics)
        warnings = self._zero(min(valid), score) if valid else {}
        if not self.validates and self.collapsed:
            warnings["reward"] = WORSE.format(what="training reward", now=self._recent(), step=step, first=state.first)
        invalid = metrics.get("reward/invalid_rows", 0.0)
        if self.learns_rewards and invalid > INVALID_SHARE * len(scores):
            warnings["invalid"] = SCORELESS.format(invalid=int(invalid), answers=len(scores), step=step)
        return self._new(warnings)

    def validation(self, step: int, scores: Sequence[float], samples: int) -> list[str]:
        score, first = Score.of(scores, samples), self._state.validation
        if not score.prompts:  # no answer has a score
            return []
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
        state, norm = self._state, metrics.get("actor/grad_norm")
        if norm is None:  # the step trained only a critic
            return
        if norm != 0.0:
            state.zero_steps = state.zero_prompts = state.zero_with_advantages = 0
            return
        state.zero_steps += 1
        state.zero_prompts += score.prompts
        state.zero_with_advantages += any(metrics.get(f"critic/advantages/{name}", 0.0) != 0.0 for name in ("min", "max"))

    def _zero(self, worst: float, score: Score) -> dict[str, str]:
        # `worst` is the score of the worst answer of the step.
        state = self._state
        if state.zero_steps < ZERO_STEPS:
            return {}
        if state.zero_with_advantages == state.zero_steps:
            return {"zero": NO_RESPONSE_TOKENS.format(steps=state.zero_steps)}
        recent = self._recent()
        solved = worst == state.highest > state.lowest
        risen = recent is not None and recent.above(state.first, VALIDATION_ERRORS)
        if solved or risen or state.zero_prompts < ZERO_PROMPTS:
            return {}
        return {"zero": EQUAL_SCORES.format(steps=state.zero_steps, now=f"{score.mean:.3f}", first=f"{state.first.mean:.3f}")}

    def _recent(self) -> Score | None:
        # The score of the most recent steps, without the first steps. None = there are too few prompts yet.
        total = functools.reduce(Score.plus, self._state.recent, Score())
        return total if total.prompts >= WINDOW_PROMPTS else None

    def _new(self, warnings: Mapping[str, str]) -> list[str]:
        new = {kind: text for kind, text in warnings.items() if kind not in self._state.warned}
        self._state.warned += new
        return list(new.values())


def _not_nan(scores: Sequence[float]) -> list[float]:
    return [score for score in scores if not math.isnan(score)]
