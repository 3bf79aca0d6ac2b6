"""Metrics of a step, under verl's names."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from verl_memopt.observe.phase import COMPILE_FIGURES, GIB, PhaseMemory, sum_of_counted


def summary_of(name: str, values: torch.Tensor | Sequence[float]) -> dict[str, float]:
    # Return ``name/{mean,max,min}`` of values [N]; empty if there are none.
    numbers = torch.as_tensor(values, dtype=torch.float64)
    if not numbers.numel():
        return {}
    return {f"{name}/mean": numbers.mean().item(), f"{name}/max": numbers.max().item(), f"{name}/min": numbers.min().item()}


def critic_metrics(
    scores: torch.Tensor, rewards: torch.Tensor, advantages: torch.Tensor, returns: torch.Tensor
) -> dict[str, float]:
    """Return ``critic/{score,rewards,advantages,returns}/{mean,max,min}``.

    Scores and rewards are [B], one per row. Advantages and returns are [R], one per response token of all rows.
    """
    metrics: dict[str, float] = {}
    for name, values in (("score", scores), ("rewards", rewards), ("advantages", advantages), ("returns", returns)):
        metrics |= summary_of(f"critic/{name}", values)
    return metrics


def length_metrics(
    prompt_lengths: torch.Tensor, response_lengths: torch.Tensor, max_prompt_length: int, max_response_length: int
) -> dict[str, float]:
    """Return prompt and response lengths in tokens, and the share of rows that reach the limit. Lengths are [B].

    An aborted row is a row with an empty response.
    """
    groups = (
        ("prompt_length", prompt_lengths, max_prompt_length),
        ("response_length", response_lengths, max_response_length),
        ("response_length_non_aborted", response_lengths[response_lengths > 0], max_response_length),
    )
    metrics: dict[str, float] = {}
    for name, lengths, cap in groups:
        if lengths.numel():
            metrics |= summary_of(name, lengths) | {f"{name}/clip_ratio": (lengths >= cap).double().mean().item()}
    return metrics | {"response/aborted_ratio": (response_lengths == 0).double().mean().item()}


def throughput_metrics(num_tokens: int, step_seconds: float, num_devices: int) -> dict[str, float]:
    # Return ``perf/{total_num_tokens,time_per_step,throughput}``. Throughput is in tokens per second per device.
    return {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": step_seconds,
        "perf/throughput": num_tokens / (step_seconds * num_devices),
    }


NO_METRICS = ("score", "pred")
"""Entries of a reward function's result that are not metrics: the score has other metrics, and an answer has no mean."""


def reward_metrics(entries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return ``reward/<name>/{mean,max,min}`` of each finite number that the reward function returned besides its score.

    True counts as 1. Rows without a number under this name are left out.
    """
    numbers: dict[str, list[float]] = {}
    for row in entries:
        for name, value in row.items():
            if isinstance(value, int | float) and math.isfinite(value) and name not in NO_METRICS:
                numbers.setdefault(name, []).append(float(value))
    metrics: dict[str, float] = {}
    for name, values in numbers.items():
        metrics |= summary_of(f"reward/{name}", values)
    return metrics


PER_TOKEN_PHASES = ("gen", "ref", "values", "adv", "update_critic", "update_actor")
"""Phases whose time per token is reported: per response token for ``gen``, per token for the others."""


def token_timings(timings: Mapping[str, float], response_tokens: int, total_tokens: int) -> dict[str, float]:
    # Return ``timing_per_token_ms/<phase>`` of the phases that ran, from ``timing_s/<phase>``.
    tokens = {name: response_tokens if name == "gen" else total_tokens for name in PER_TOKEN_PHASES}
    return {
        f"timing_per_token_ms/{name}": 1000 * timings[f"timing_s/{name}"] / count
        for name, count in tokens.items()
        if f"timing_s/{name}" in timings and count
    }


def memory_metrics(phases: Sequence[PhaseMemory]) -> dict[str, float]:
    """Return ``memory/<phase>/*_gb`` of each phase, and their maxima as ``perf/*_gb``, in GiB.

    With several workers each peak is the highest one, and ``mean_peak_allocated_gb`` is the mean of their peaks. A figure that
    the device or the step does not have is absent. ``perf/memory_allocated_gb`` is the live memory at the end of the last phase.

    ``phases``: one entry per phase, already combined over all ranks.
    """
    sizes = [
        (f"memory/{phase.name}/{figure}_gb", getattr(phase, f"{figure}_bytes"))
        for phase in phases
        for figure in ("peak_allocated", "peak_reserved", "device_used", "host_rss")
    ]
    sizes += [(f"memory/{phase.name}/mean_peak_allocated_gb", phase.mean_peak_bytes) for phase in phases]
    sizes += [(f"memory/{phase.name}/host_buffers_gb", phase.host_buffer_bytes or None) for phase in phases]
    sizes += [("perf/memory_allocated_gb", phase.allocated_bytes) for phase in phases[-1:]]
    sizes += [("perf/max_memory_allocated_gb", phase.peak_allocated_bytes) for phase in phases]
    sizes += [("perf/max_memory_reserved_gb", phase.peak_reserved_bytes) for phase in phases]
    sizes += [("perf/cpu_memory_used_gb", phase.host_rss_bytes) for phase in phases]
    metrics: dict[str, float] = {}
    for name, size in sizes:
        if size is not None:
            metrics[name] = max(size / GIB, metrics.get(name, 0.0))
    return metrics


def compile_metrics(phases: Sequence[PhaseMemory]) -> dict[str, float]:
    # Return ``perf/{compiles,compile_fallbacks}``, summed over phases. A number that no process counts is left out.
    sums = {name: sum_of_counted(phases, name) for name in COMPILE_FIGURES}
    return {f"perf/{name}": float(value) for name, value in sums.items() if value is not None}


# Validation scores by data source: mean, spread, best, worst and majority of the N samples of each prompt.


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

    N is the largest number of samples per prompt in the data source. ``std``, ``best``, ``worst`` and ``maj`` need N > 1, and
    ``maj`` needs ``pred`` too. ``best``, ``worst`` and ``maj`` are also returned for k = 2, 4, 8, ... samples below N. Such a
    value is a mean over all choices of k samples of a prompt. If there are more than :data:`VOTES` choices, ``maj`` uses that
    many random ones. Each statistic is a mean over prompts, so every prompt counts once.

    ``val-core`` has mean, best and majority at N: of ``acc`` if the reward function returns it, or else of ``reward``. All
    other statistics are in ``val-aux``.
    """
    by_source: dict[str, list[ValidationRow]] = defaultdict(list)
    for row in rows:
        by_source[row.data_source].append(row)
    metrics: dict[str, float] = {}
    for source, members in by_source.items():
        values = _numbers_by_variable(members)
        core = "acc" if "acc" in values else "reward"
        max_samples = max(Counter(row.uid for row in members).values())
        for variable, numbers in values.items():
            for statistic, value in _statistics(members, numbers).items():
                name, _, number = statistic.partition("/")[0].partition("@")
                is_core = variable == core and name in ("mean", "best", "maj") and int(number) == max_samples
                metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{variable}/{statistic}"] = value
    return metrics


LOSS, VAL_LOSS = "train/loss", "val/loss"
"""Losses of a supervised run in nats per response token: of a step's rows before their update, and of the validation rows."""


def headline_score(metrics: Mapping[str, float]) -> float | None:
    """Return one figure for a validation: the mean of ``val-core/*/mean@N`` over data sources, or the validation loss.

    None = the metrics have no validation.
    """
    if VAL_LOSS in metrics:
        return metrics[VAL_LOSS]
    scores = [value for name, value in metrics.items() if name.startswith("val-core/") and "/mean@" in name]
    return statistics.fmean(scores) if scores else None


def checkpoint_score(metrics: Mapping[str, float]) -> float | None:
    """Return the score that ranks checkpoints, higher is better: the headline score, or minus the validation loss."""
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
        spread = over_prompts(lambda numbers: statistics.stdev(numbers) if len(numbers) > 1 else 0.0)
        result[f"std@{n}"] = spread
    has_answers = all("pred" in row.extra for row in rows)
    for k in _numbers_of_samples(n):
        result[f"best@{k}/mean"] = over_prompts(partial(_expected_best, k=k))
        result[f"worst@{k}/mean"] = over_prompts(partial(_expected_worst, k=k))
        if has_answers:
            result[f"maj@{k}/mean"] = statistics.fmean(_expected_majority(group, k) for group in samples)
    return result


def _numbers_of_samples(n: int) -> list[int]:
    # 2, 4, 8, ... below n, and n itself; none for a single sample.
    return [*itertools.takewhile(lambda k: k < n, (2**power for power in itertools.count(1))), n] if n > 1 else []


def _expected_best(numbers: Sequence[float], k: int) -> float:
    # The mean of the largest number, over all choices of k numbers. If there are fewer than k numbers: the largest one.
    k, ordered = min(k, len(numbers)), sorted(numbers)
    choices = math.comb(len(ordered), k)
    return sum(number * (math.comb(place, k - 1) / choices) for place, number in enumerate(ordered) if place >= k - 1)


def _expected_worst(numbers: Sequence[float], k: int) -> float:
    return -_expected_best([-number for number in numbers], k)


VOTES = 200
"""Largest number of choices of a prompt's samples over which the majority is averaged."""


def _expected_majority(group: Sequence[tuple[float, Any]], k: int) -> float:
    # The mean over all choices of k samples. If there are too many choices, over random choices with a fixed seed.
    k = min(k, len(group))
    if math.comb(len(group), k) <= VOTES:
        return statistics.fmean(map(_majority, itertools.combinations(group, k)))
    draws = random.Random(0)
    choices = (sorted(draws.sample(range(len(group)), k)) for _ in range(VOTES))
    return statistics.fmean(_majority([group[place] for place in choice]) for choice in choices)


def _majority(group: Sequence[tuple[float, Any]]) -> float:
    # If two answers are equally frequent, the earlier one wins.
    winner = Counter(str(answer) for _, answer in group).most_common(1)[0][0]
    return next(number for number, answer in group if str(answer) == winner)
