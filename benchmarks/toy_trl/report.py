"""The result: rows from the records of runs, the table that is printed, and a picture of times and peaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.common import text_table
from benchmarks.toy_trl.work import NOTHING, OURS, PHASES, WARM_UP, Contestant, Moment, Record
from verl_memopt.observe.charts import GRID, INK, figure, save, style
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
    """Over runs, of each run's median step."""
    fastest_run: float
    """The least median of a run."""
    slowest_run: float
    """The greatest median of a run."""


@dataclass(frozen=True)
class Row:
    """One contestant's result. ``cpu``: processor time of the process; other seconds are on the wall, waiting included."""

    contestant: str
    rollout: str
    micro_batches: int
    seconds_per_step: Spread
    cpu_seconds_per_step: Spread
    seconds: dict[str, Spread]
    """By phase, and ``rest``."""
    cpu_seconds: dict[str, Spread]
    """By phase, and ``rest``."""
    least_step: dict[str, float]
    """Processor seconds of the step that took the least, by phase, and ``rest``."""
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
    """Gives a contestant's row from its timed runs and its tracked runs. Errors: VoidError when tracked runs differ."""
    if any(record.peaks != tracked[0].peaks for record in tracked):
        raise VoidError(
            f"{contestant.slug}: two runs of one seed counted different bytes: {[record.peaks for record in tracked]}"
        )
    steps = [timed_steps(record) for record in timed]
    phases = [timed_phases(record) for record in timed]
    least = min((step for run in phases for step in run), key=lambda step: sum(part.cpu for part in step.values()))
    peaks = tracked[0].peaks
    return Row(
        contestant=contestant.name,
        rollout=contestant.rollout,
        micro_batches=contestant.micro_batches,
        seconds_per_step=spread([[step.wall for step in run] for run in steps]),
        cpu_seconds_per_step=spread([[step.cpu for step in run] for run in steps]),
        seconds={name: spread([[step[name].wall for step in run] for run in phases]) for name in PARTS},
        cpu_seconds={name: spread([[step[name].cpu for step in run] for run in phases]) for name in PARTS},
        least_step={name: part.cpu for name, part in least.items()},
        peak_bytes={name: peaks[name].bytes for name in PASSES},
        engine_bytes=peaks["update"].engine_bytes,
        response_tokens_per_step=mean(tokens for record in timed for tokens in record.response_tokens),
        accuracy=mean(record.accuracy for record in timed),
        runs=len(timed),
        steps=len(steps[0]),
    )


def spread(runs: Sequence[Sequence[float]]) -> Spread:
    """Gives the spread of runs, each a list of its steps."""
    medians = [median(run) for run in runs]
    return Spread(min(map(min, runs)), median(medians), min(medians), max(medians))


def timed_steps(record: Record) -> list[Moment]:
    """Gives how long each step took, from its start to the next one's; the warm-up and the last step are left out."""
    starts = record.starts[WARM_UP:]
    return [later - earlier for earlier, later in pairwise(starts)]


def timed_phases(record: Record) -> list[dict[str, Moment]]:
    """Gives the phases of the same steps, nothing where a trainer has no such phase, and the rest of each step."""
    found = []
    for whole, phases in zip(timed_steps(record), record.phases[WARM_UP:-1], strict=True):
        known = {name: phases.get(name, NOTHING) for name in PHASES}
        found.append({**known, REST: whole - sum(known.values(), NOTHING)})
    return found


def check_same_prompts(records: Sequence[Record]) -> None:
    """Raises VoidError unless all tracked runs saw the same prompt ids in the same order."""
    hashes = {record.prompt_ids for record in records}
    if len(hashes) != 1 or "" in hashes:
        raise VoidError(f"the contestants did not get the same prompts: {len(hashes)} hashes of ids")


COLUMNS = (
    "trainer", "rollout\nengine", "micro-\nbatches", "CPU ms\nper step", "median\nstep", "medians\nof runs", "of it\nrollout",
    "of it\nlog-prob", "of it\nupdate", "of it\nrest", "update\npeak MiB", "log-prob\npeak MiB", "rollout\npeak MiB",
    "engine\nMiB", "greedy\naccuracy",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """Gives a row's cells in the order of ``COLUMNS``."""
    step = row.cpu_seconds_per_step
    sizes = (*(row.peak_bytes[name] for name in ("update", "log_prob", "rollout")), row.engine_bytes)
    return [
        row.contestant,
        row.rollout,
        str(row.micro_batches),
        f"{1e3 * step.least:.0f}",
        f"{1e3 * step.median:.0f}",
        f"{1e3 * step.fastest_run:.0f}-{1e3 * step.slowest_run:.0f}",
        *(f"{1e3 * seconds:.0f}" for seconds in parts(row).values()),
        *(f"{size / MIB:.1f}" for size in sizes),
        f"{row.accuracy:.3f}",
    ]


def parts(row: Row) -> dict[str, float]:
    """Gives the least step's three large phases, and its reward, weight sync and rest together."""
    small = sum(row.least_step[name] for name in ("reward", "sync", REST))
    return {name: row.least_step[name] for name in ("rollout", "log_prob", "update")} | {REST: small}


def render(rows: Sequence[Row]) -> str:
    """Gives the table as text, a gap between the numbers of micro-batches."""
    gaps = [at for at, (row, following) in enumerate(pairwise(rows)) if following.micro_batches != row.micro_batches]
    return text_table(COLUMNS, [cells(row) for row in rows], left=(0, 1), gaps=gaps)


def ratios(rows: Sequence[Row]) -> list[str]:
    """Gives, in words, our time and update peak as shares of TRL's with the same micro-batches."""
    return [
        _ratio(row, other)
        for row in rows
        for other in rows
        if row.contestant == OURS and other.contestant != OURS and other.micro_batches == row.micro_batches
    ]


def _ratio(ours: Row, other: Row) -> str:
    mine, theirs = ours.cpu_seconds_per_step, other.cpu_seconds_per_step
    time = f"CPU time {mine.least / theirs.least:.2f}, of medians {mine.median / theirs.median:.2f}"
    names = f"{ours.contestant} ({ours.rollout}) / {other.contestant} ({other.rollout})"
    return f"{micro_batches(ours)}: {names}: {time}; update peak {own_peak(ours) / own_peak(other):.2f}"


def micro_batches(row: Row) -> str:
    """Gives the number of micro-batches in words."""
    return "1 micro-batch" if row.micro_batches == 1 else f"{row.micro_batches} micro-batches"


def own_peak(row: Row) -> int:
    """Gives the update's peak without a rollout engine's own bytes."""
    return row.peak_bytes["update"] - row.engine_bytes


def from_json(row: dict[str, Any]) -> Row:
    spreads = {name: Spread(**row[name]) for name in ("seconds_per_step", "cpu_seconds_per_step")}
    phases = {name: {part: Spread(**found) for part, found in row[name].items()} for name in ("seconds", "cpu_seconds")}
    return Row(**{**row, **spreads, **phases})


TIMES = {
    "rollout": ("rollout", "#8e5ea2"),
    "log_prob": ("log-prob pass", "#85b4dd"),
    "update": ("update", "#3b6ea5"),
    REST: ("reward, weight sync, rest", "#c5ced6"),
}
PEAKS: dict[str, tuple[str, str, Callable[[Row], int]]] = {
    "update": ("#3b6ea5", "o", lambda row: row.peak_bytes["update"]),
    "log-prob pass": ("#85b4dd", "D", lambda row: row.peak_bytes["log_prob"]),
    "rollout": ("#8e5ea2", "^", lambda row: row.peak_bytes["rollout"]),
}
LEGEND = {"loc": "upper center", "frameon": False, "fontsize": 9, "handletextpad": 0.5, "columnspacing": 1.4}
MUTED = "#5b6670"
TRIMMED = "Trimmed: TRL's head with tiles no wider than the toy's vocabulary and, as on a GPU, for the answers' positions only."
GAP = 0.7
"""Between groups of bars, in bars."""


def draw(rows: Sequence[Row], source: str, path: Path) -> Path:
    """Writes the picture and gives its path. source: a line on when and where the figures were measured."""
    drawing = figure(12.5, 0.56 * len(rows) + 1.9)
    left, right = drawing.subplots(1, 2, sharey=True)
    places = positions(rows)
    _draw_times(left, rows, places)
    _draw_peaks(right, rows, places)
    left.set_yticks(places, [label(row) for row in rows])
    left.invert_yaxis()
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    drawing.suptitle("The same RLOO steps on the toy task", x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    drawing.supxlabel(f"{source}\n{TRIMMED}", x=0.01, ha="left", fontsize=8.5, color=MUTED)
    return save(drawing, path)


def positions(rows: Sequence[Row]) -> list[float]:
    """Gives the place of each bar, with a gap where the number of micro-batches changes."""
    places = [0.0]
    for earlier, later in pairwise(rows):
        places.append(places[-1] + 1 + (GAP if earlier.micro_batches != later.micro_batches else 0))
    return places


def label(row: Row) -> str:
    """Gives the words beside a bar."""
    return f"{row.contestant}\n{row.rollout} rollout, {micro_batches(row)}"


def _draw_times(axes: Any, rows: Sequence[Row], places: Sequence[float]) -> None:
    style(axes, "Processor time per step", "ms: the least step; whisker to the slowest run's median", "", grid="x")
    start = [0.0] * len(rows)
    for part, (name, colour) in TIMES.items():
        widths = [1e3 * parts(row)[part] for row in rows]
        axes.barh(places, widths, left=start, height=0.62, color=colour, label=name)
        start = [begin + width for begin, width in zip(start, widths, strict=True)]
    for row, place in zip(rows, places, strict=True):
        step = row.cpu_seconds_per_step
        least, slowest = 1e3 * step.least, 1e3 * step.slowest_run
        axes.errorbar([least], [place], xerr=[[0.0], [slowest - least]], fmt="none", ecolor=INK, elinewidth=1, capsize=3)
        words = f"{least:.0f}, median {1e3 * step.median:.0f}"
        axes.annotate(words, (slowest, place), (6, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
    axes.set_xlim(right=1.3 * max(1e3 * row.cpu_seconds_per_step.slowest_run for row in rows))
    axes.legend(**LEGEND, bbox_to_anchor=(0.4, -0.13), ncols=4, handlelength=1.1)


def _draw_peaks(axes: Any, rows: Sequence[Row], places: Sequence[float]) -> None:
    style(axes, "Peak live tensor bytes, a rollout engine's own left out", "MiB (ByteTracker) in step 2, log scale", "", grid="x")
    axes.set_xscale("log")
    sizes = {name: [(size(row) - row.engine_bytes) / MIB for row in rows] for name, (_, _, size) in PEAKS.items()}
    for index, place in enumerate(places):
        found = [sizes[name][index] for name in PEAKS]
        axes.plot([min(found), max(found)], [place, place], color=GRID, linewidth=2, zorder=1)
    for size, (name, (colour, marker, _)) in zip((9, 8, 6), PEAKS.items(), strict=True):
        axes.plot(sizes[name], places, marker, ms=size, color=colour, label=name, zorder=3, mec="white", mew=0.8)
    for row, place, update in zip(rows, places, sizes["update"], strict=True):
        words = f"{update:,.1f}"
        axes.annotate(words, (update, place), (0, 8), textcoords="offset points", ha="center", fontsize=8.5, color=INK)
        axes.annotate(
            f"+ {row.engine_bytes / MIB:.1f} engine" if row.engine_bytes else "no engine of its own",
            (0.99, place),
            xycoords=axes.get_yaxis_transform(),
            ha="right",
            va="center",
            fontsize=8.5,
            color=MUTED,
        )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    low, high = min(map(min, sizes.values())), max(map(max, sizes.values()))
    axes.set_xlim(low / 1.6, high * 14)
    axes.legend(**LEGEND, bbox_to_anchor=(0.4, -0.13), ncols=4)
