"""The result as a picture: where the time of a step goes, and the peaks of its passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.toy_trl.table import MIB, REST, Row, parts
from verl_memopt.observe.charts import GRID, INK, figure, save, style

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
    count = "1 micro-batch" if row.micro_batches == 1 else f"{row.micro_batches} micro-batches"
    return f"{row.contestant}\n{row.rollout} rollout, {count}"


def _draw_times(axes: Any, rows: Sequence[Row], places: Sequence[float]) -> None:
    style(
        axes,
        "Processor time per step",
        "ms: the least step; whisker to the slowest run's median",
        "",
        grid="x",
    )
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
