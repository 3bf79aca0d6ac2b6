"""The result: rows from the records of runs, and the table that is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

from benchmarks.common import text_table
from benchmarks.toy_trl.work import OURS, PHASES, WARM_UP, Contestant, Record
from verl_memopt.observe.phase import MIB

REST = "rest"
"""What a step takes beyond its phases: data, advantages, metrics, logging."""
PARTS = (*PHASES, REST)
PASSES = ("update", "log_prob", "rollout")
"""Phases whose peak is reported."""


class VoidError(Exception):
    """The runs of a row did not do the same work, or did not count the same; there is no row."""


@dataclass(frozen=True)
class Spread:
    """What steps took in several runs, in seconds."""

    least: float
    """Of all steps: what the work takes when nothing disturbs it. The neighbours on a machine only ever add to it."""
    median: float
    """Over runs, of each run's median step; those of two runs are ``fastest_run`` and ``slowest_run``."""
    fastest_run: float
    slowest_run: float


@dataclass(frozen=True)
class Row:
    """One contestant's result. Seconds are processor time of the process."""

    contestant: str
    rollout: str
    micro_batches: int
    seconds_per_step: Spread
    seconds: dict[str, Spread]
    """By phase, and ``rest``."""
    least_step: dict[str, float]
    """Seconds of the step that took the least, by phase, and ``rest``."""
    peak_bytes: dict[str, int]
    """Most live tensor bytes at once, by phase."""
    engine_bytes: int
    """Of each peak: weights and KV cache of a rollout engine of its own."""
    response_tokens_per_step: float
    accuracy: float
    """Greedy, on held-out prompts, after the last step: mean over runs."""
    runs: int
    steps: int


def row_of(contestant: Contestant, timed: Sequence[Record], tracked: Sequence[Record]) -> Row:
    if any(record.peaks != tracked[0].peaks for record in tracked):
        raise VoidError(
            f"{contestant.slug}: two runs of one seed counted different bytes: {[record.peaks for record in tracked]}"
        )
    steps = [timed_steps(record) for record in timed]
    phases = [timed_phases(record) for record in timed]
    least = min((step for run in phases for step in run), key=lambda step: sum(step.values()))
    peaks = tracked[0].peaks
    return Row(
        contestant=contestant.name, rollout=contestant.rollout, micro_batches=contestant.micro_batches,
        seconds_per_step=spread(steps),
        seconds={name: spread([[step[name] for step in run] for run in phases]) for name in PARTS}, least_step=least,
        peak_bytes={name: peaks[name].bytes for name in PASSES}, engine_bytes=peaks["update"].engine_bytes,
        response_tokens_per_step=mean(tokens for record in timed for tokens in record.response_tokens),
        accuracy=mean(record.accuracy for record in timed), runs=len(timed), steps=len(steps[0]),
    )  # fmt: skip


def spread(runs: Sequence[Sequence[float]]) -> Spread:
    medians = [median(run) for run in runs]
    return Spread(min(map(min, runs)), median(medians), min(medians), max(medians))


def timed_steps(record: Record) -> list[float]:
    """Gives how long each step took, from its start to the next one's; the warm-up and the last step are left out."""
    starts = record.starts[WARM_UP:]
    return [later - earlier for earlier, later in pairwise(starts)]


def timed_phases(record: Record) -> list[dict[str, float]]:
    """Gives the phases of the same steps, nothing where a trainer has no such phase, and the rest of each step."""
    found = []
    for whole, phases in zip(timed_steps(record), record.phases[WARM_UP:-1], strict=True):
        known = {name: phases.get(name, 0.0) for name in PHASES}
        found.append({**known, REST: whole - sum(known.values())})
    return found


def check_same_prompts(records: Sequence[Record]) -> None:
    hashes = {record.prompt_ids for record in records}
    if len(hashes) != 1 or "" in hashes:
        raise VoidError(f"the contestants did not get the same prompts: {len(hashes)} hashes of ids")


COLUMNS = (
    "trainer", "rollout\nengine", "micro-\nbatches", "CPU ms\nper step", "median\nstep", "medians\nof runs", "of it\nrollout",
    "of it\nlog-prob", "of it\nupdate", "of it\nrest", "update\npeak MiB", "log-prob\npeak MiB", "rollout\npeak MiB",
    "engine\nMiB", "greedy\naccuracy",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    step = row.seconds_per_step
    sizes = (*(row.peak_bytes[name] for name in ("update", "log_prob", "rollout")), row.engine_bytes)
    return [
        row.contestant, row.rollout, str(row.micro_batches), f"{1e3 * step.least:.0f}", f"{1e3 * step.median:.0f}",
        f"{1e3 * step.fastest_run:.0f}-{1e3 * step.slowest_run:.0f}",
        *(f"{1e3 * seconds:.0f}" for seconds in parts(row).values()), *(f"{size / MIB:.1f}" for size in sizes),
        f"{row.accuracy:.3f}",
    ]  # fmt: skip


def parts(row: Row) -> dict[str, float]:
    small = sum(row.least_step[name] for name in ("reward", "sync", REST))
    return {name: row.least_step[name] for name in ("rollout", "log_prob", "update")} | {REST: small}


def render(rows: Sequence[Row]) -> str:
    gaps = [at for at, (row, following) in enumerate(pairwise(rows)) if following.micro_batches != row.micro_batches]
    return text_table(COLUMNS, [cells(row) for row in rows], left=(0, 1), gaps=gaps)


def ratios(rows: Sequence[Row]) -> list[str]:
    return [
        _ratio(row, other)
        for row in rows
        for other in rows
        if row.contestant == OURS and other.contestant != OURS and other.micro_batches == row.micro_batches
    ]


def _ratio(ours: Row, other: Row) -> str:
    mine, theirs = ours.seconds_per_step, other.seconds_per_step
    time = f"CPU time {mine.least / theirs.least:.2f}, of medians {mine.median / theirs.median:.2f}"
    names = f"{ours.contestant} ({ours.rollout}) / {other.contestant} ({other.rollout})"
    return f"{micro_batches(ours)}: {names}: {time}; update peak {own_peak(ours) / own_peak(other):.2f}"


def micro_batches(row: Row) -> str:
    return "1 micro-batch" if row.micro_batches == 1 else f"{row.micro_batches} micro-batches"


def own_peak(row: Row) -> int:
    return row.peak_bytes["update"] - row.engine_bytes
