"""Validation scores by data source: mean, spread, best, worst and majority of the N samples of each prompt."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ValidationRow:
    """One scored sample. Rows with the same ``uid`` are samples of one prompt."""

    uid: str
    data_source: str
    score: float
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further entries that the reward function returned. Numbers are averaged; ``pred`` is the answer for the majority."""


def validation_metrics(rows: Sequence[ValidationRow]) -> dict[str, float]:
    """Return ``{val-core,val-aux}/{data_source}/{variable}/{mean@N,std@N,best@N/mean,worst@N/mean,maj@N/mean}``.

    N is the largest number of samples of a prompt in the data source. Best, worst, spread and majority need N > 1, and majority
    needs ``pred``. Each statistic is a mean over prompts, so every prompt counts once. Core are mean, best and majority of
    ``acc`` if the reward function returns it, else of ``reward``. All others are aux.
    """
    by_source: dict[str, list[ValidationRow]] = defaultdict(list)
    for row in rows:
        by_source[row.data_source].append(row)
    metrics: dict[str, float] = {}
    for source, members in by_source.items():
        values = _numbers_by_variable(members)
        core = "acc" if "acc" in values else "reward"
        for variable, numbers in values.items():
            for statistic, value in _statistics(members, numbers).items():
                is_core = variable == core and statistic.startswith(("mean@", "best@", "maj@"))
                metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{variable}/{statistic}"] = value
    return metrics


LOSS, VAL_LOSS = "train/loss", "val/loss"
"""Metrics of a supervised run: nats per response token, of the step before its update and of the held-out rows."""


def headline_score(metrics: Mapping[str, float]) -> float | None:
    """Return one figure of a validation: the mean over data sources of the core mean, or the loss. None = there was none."""
    if VAL_LOSS in metrics:
        return metrics[VAL_LOSS]
    scores = [value for name, value in metrics.items() if name.startswith("val-core/") and "/mean@" in name]
    return statistics.fmean(scores) if scores else None


def checkpoint_score(metrics: Mapping[str, float]) -> float | None:
    """Return what ranks checkpoints, the best one highest: the headline score, or the held-out loss with its sign turned."""
    return -metrics[VAL_LOSS] if VAL_LOSS in metrics else headline_score(metrics)


def _numbers_by_variable(rows: Sequence[ValidationRow]) -> dict[str, list[float]]:
    numeric = [name for name in rows[0].extra if all(isinstance(row.extra.get(name), (int, float)) for row in rows)]
    extra = {name: [float(row.extra[name]) for row in rows] for name in numeric if name not in ("reward", "score", "pred")}
    return {"reward": [row.score for row in rows]} | extra


def _statistics(rows: Sequence[ValidationRow], numbers: Sequence[float]) -> dict[str, float]:
    prompts: dict[str, list[tuple[float, Any]]] = defaultdict(list)
    for row, number in zip(rows, numbers, strict=True):
        prompts[row.uid].append((number, row.extra.get("pred")))
    samples = list(prompts.values())
    n = max(map(len, samples))

    def over_prompts(statistic: Any) -> float:
        return statistics.fmean(statistic([number for number, _ in group]) for group in samples)

    result = {f"mean@{n}": over_prompts(statistics.fmean)}
    if n > 1:
        result |= {f"std@{n}": over_prompts(_spread), f"best@{n}/mean": over_prompts(max), f"worst@{n}/mean": over_prompts(min)}
        if all("pred" in row.extra for row in rows):
            result[f"maj@{n}/mean"] = statistics.fmean(map(_majority, samples))
    return result


def _spread(numbers: list[float]) -> float:
    return statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def _majority(group: Sequence[tuple[float, Any]]) -> float:
    """Return the score of the first sample with the most frequent answer. Of equally frequent answers the earliest wins."""
    winner = Counter(str(answer) for _, answer in group).most_common(1)[0][0]
    return next(number for number, answer in group if str(answer) == winner)
