"""Metrics of a run under the names that TRL's trainers log."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_memopt.data.dataset import VALIDATION_SET
from verl_memopt.rewards.python_functions import ENVIRONMENT_REWARD, RM_SCORE
from verl_memopt.rewards.score import RewardResult

if TYPE_CHECKING:
    from verl_memopt.trainer.listener import Progress
    from verl_memopt.trainer.rollouts import RowAnswers

OURS = {
    "loss": "actor/loss", "policy_loss": "actor/pg_loss", "grad_norm": "actor/grad_norm", "learning_rate": "actor/lr",
    "epoch": "training/epoch", "kl": ("actor/kl_loss", "actor/reward_kl_penalty"), "entropy": "actor/entropy",
    "entropy_coef": "actor/entropy_coeff",
    "clip_ratio/region_mean": "actor/pg_clipfrac", "sampling/sampling_logp_difference/mean": "rollout/logprob_diff_mean",
    "sampling/sampling_logp_difference/max": "rollout/logprob_diff_max", "step_time": "timing_s/step",
    "tools/call_frequency": "agent/tool_calls/mean", "tools/failure_frequency": "agent/failed_call_rate",
}  # fmt: skip
"""TRL's name -> our metric of a training step, or several metrics of which a run logs only one."""


@dataclass(frozen=True)
class RewardNames:
    """The names and weights of the reward functions, in the order in which they were given."""

    names: Sequence[str]
    weights: Sequence[float]

    def of(self, result: RewardResult) -> dict[str, float | None]:
        """Return the unweighted score of each function. None = the function does not apply to the row."""
        if len(self.names) == 1 and self.names[0] not in result.extra:
            # With one function only its weighted score is stored, as the reward. A weight of 0 loses it.
            score = result.score - result.extra.get(ENVIRONMENT_REWARD, 0.0)
            return {self.names[0]: score / self.weights[0] if self.weights[0] else None}
        return {name: result.extra.get(name) for name in self.names}


@dataclass(frozen=True)
class ScoredRow:
    """The facts about one answer from which the metrics are computed."""

    index: int
    """Index of the answered row in the dataset."""
    set_name: str
    """Name of the validation set; "" = it has no name."""
    length: int
    """Number of response tokens."""
    ended: bool
    result: RewardResult

    @property
    def score(self) -> float:
        """The reward; NaN = the row has no reward."""
        return self.result.score


def scored_rows(answers: RowAnswers, results: Sequence[RewardResult]) -> list[ScoredRow]:
    """Pair answers with their rewards. ``results`` is empty if nothing is scored."""
    generation = answers.generation
    scores = results or [RewardResult(math.nan)] * len(answers.rows)
    columns = zip(answers.rows, generation.response_ids, generation.finish_reasons, scores, strict=True)
    return [
        ScoredRow(row.index, str(row.extra_info.get(VALIDATION_SET, "")), len(ids), reason == "stop", result)
        for row, ids, reason, result in columns
    ]


def training_log(progress: Progress, answered: Mapping[str, float]) -> dict[str, float]:
    """Return a training step's metrics under TRL's names, with ``answered``, the metrics from :func:`answer_log`."""
    metrics = progress.metrics
    log: dict[str, float] = {}
    for name, ours in OURS.items():
        found = [metrics[key] for key in ([ours] if isinstance(ours, str) else ours) if key in metrics]
        log |= {name: found[0]} if found else {}
    return {**log, **answered}


def answer_log(rows: Sequence[ScoredRow], functions: RewardNames) -> dict[str, float]:
    """Return metrics of answers and rewards under TRL's names. Rows without a reward count only in the metrics of length."""
    log = _lengths(rows)
    scored = [row for row in rows if not math.isnan(row.score)]
    if not scored:
        return log
    named = [functions.of(row.result) for row in scored]
    for name in functions.names:
        values = [float(value) for scores in named if (value := scores[name]) is not None]
        log |= {f"rewards/{name}/mean": _mean(values), f"rewards/{name}/std": _deviation(values)} if values else {}
    scores, groups = [row.score for row in scored], _groups(scored)
    log |= {"reward": _mean(scores), "reward_std": _deviation(scores)}
    log["frac_reward_zero_std"] = _mean([float(math.isclose(max(group), min(group))) for group in map(_scores, groups)])
    return log | _logged_means(scored, {*functions.names, RM_SCORE})


def evaluation_log(rows: Sequence[ScoredRow], functions: RewardNames, prefix: str) -> dict[str, float]:
    """Return the metrics of a validation, separately for each validation set."""
    log: dict[str, float] = {}
    for name in dict.fromkeys(row.set_name for row in rows):
        in_set = [row for row in rows if row.set_name == name]
        start = f"{prefix}_{name}_" if name else f"{prefix}_"
        loss = {} if all(math.isnan(row.score) for row in in_set) else {"loss": policy_loss(in_set)}
        log |= {f"{start}{key}": value for key, value in {**loss, **answer_log(in_set, functions)}.items()}
    return log


def policy_loss(rows: Sequence[ScoredRow]) -> float:
    """Return the loss of the policy that generated the answers, as a mean over tokens and without a KL term.

    Every importance ratio is 1, so the loss is minus the mean advantage::

        advantage = (reward - group mean) / (group standard deviation + 1e-4)

    Rows without a reward are left out.
    """
    total, tokens = 0.0, 0
    for group in _groups([row for row in rows if not math.isnan(row.score)]):
        scores = _scores(group)
        mean, scale = _mean(scores), _deviation(scores) + 1e-4
        total -= sum((row.score - mean) / scale * row.length for row in group)
        tokens += sum(row.length for row in group)
    return total / tokens if tokens else 0.0


def _groups(rows: Sequence[ScoredRow]) -> list[list[ScoredRow]]:
    return [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.index)]


def _scores(rows: Sequence[ScoredRow]) -> list[float]:
    return [row.score for row in rows]


def _logged_means(rows: Sequence[ScoredRow], reported: Set[str]) -> dict[str, float]:
    logged: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.result.extra.items():
            if name not in reported and isinstance(value, int | float) and math.isfinite(value):
                logged.setdefault(name, []).append(float(value))
    return {name: _mean(values) for name, values in logged.items()}


def _lengths(rows: Sequence[ScoredRow]) -> dict[str, float]:
    ended = [row.length for row in rows if row.ended]
    log = {"completions/clipped_ratio": 1 - len(ended) / len(rows)}
    for kind, values in (("", [row.length for row in rows]), ("_terminated", ended or [0])):
        log[f"completions/mean{kind}_length"] = _mean(values)
        log |= {f"completions/{name}{kind}_length": float(extreme(values)) for name, extreme in (("min", min), ("max", max))}
    return log


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _deviation(values: Sequence[float]) -> float:
    """Return the unbiased standard deviation, 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
