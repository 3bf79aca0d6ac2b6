"""The four charts. A run that did not complete is a word where its bar would be, never a bar. Peaks are never smoothed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.rloo.memory_study.arms import EXPANSIONS, FIXED_ROWS, FULL, KS, LEGACY, TRUNCATED
from recipe.rloo.memory_study.charts_methods import draw_methods
from recipe.rloo.memory_study.charts_savings import draw_savings
from recipe.rloo.memory_study.charts_timeline import draw_timeline
from recipe.rloo.memory_study.combine import SUMMARY_NAME, read_results
from recipe.rloo.memory_study.findings import find, held_bytes, process_bytes
from recipe.rloo.memory_study.formula import device_bytes
from recipe.rloo.memory_study.published import CARD_GIB, LABELS, PEAKS_GIB
from recipe.rloo.memory_study.records import COMPLETED, OOM
from verl_memopt.observe.charts import INK, PALETTE, figure, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB, GIB = 2**20, 2**30
MUTED = "#5b6670"
COLOURS = dict(zip(EXPANSIONS, (PALETTE[0], PALETTE[5], PALETTE[2], PALETTE[1]), strict=True))
FULL_COLOUR, CUT_COLOUR = "#b8433d", "#e39a97"
EQUAL = 0.005
"""Largest difference, relative, of peaks that are called equal."""
STATUS = {OOM: "out of\nmemory"}

Row = Mapping[str, Any]


def draw_all(out: Path) -> list[Path]:
    """Draw the four charts of a results folder that has a summary, and return their paths."""
    summary = json.loads((out / SUMMARY_NAME).read_text(encoding="utf-8"))
    return [
        draw_peaks(summary, out / "peak_memory_comparison.png"),
        draw_timeline(read_results(out), out / "memory_usage_timeline.png"),
        draw_methods(summary, out / "method_performance_summary.png"),
        draw_savings(summary, out / "what_really_saves.png"),
    ]


def draw_peaks(summary: Mapping[str, Any], path: Path) -> Path:
    """Draw the published peaks, and beside them every method with the same whole prompt, the same cut prompt, and a fixed
    micro-batch."""
    rows = summary["rows"]
    drawing = figure(13, 8.6)
    (published, full), (cut, fixed) = drawing.subplots(2, 2, sharey=True)
    _method_bars(published, {key: (peak, OOM if peak is None else COMPLETED) for key, peak in PEAKS_GIB.items()})
    _titles(published, "1. Published: String-level takes far less", "its prompts have 1,024 tokens, those of the others 3,015")
    for axes, prompt, title, equal, tokens in (
        (full, FULL, "2. Here, the whole prompt for every method", "no method saves", "3,015"),
        (cut, TRUNCATED, "3. Here, the prompt cut for every method", "all take as little", "1,024"),
    ):
        _method_bars(axes, _whole_device(rows, prompt))
        _titles(axes, f"{title}: {equal}" if _are_equal(summary, prompt) else title,
                f"{tokens} tokens for all; micro-batch = k; {_measured_by(rows)}")  # fmt: skip
    _fixed_bars(fixed, rows)
    drawing.legend(*published.get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False, fontsize=10)
    return save(drawing, path)


def _are_equal(summary: Mapping[str, Any], prompt: str) -> bool:
    """Return whether all methods with a prompt were within 0.5 % of each other, with the published coupling."""
    compared = [row for row in summary["findings"]["expansion"] if row["prompt"] == prompt and row["coupled"]]
    return bool(compared) and all(row["apart"] < EQUAL and len(row["expansions"]) == len(EXPANSIONS) for row in compared)


def _titles(axes: Axes, title: str, below: str) -> None:
    style(axes, title, below, "peak of the whole card, GiB")


def _measured_by(rows: Sequence[Row]) -> str:
    """Return how the published trainer's bytes were counted."""
    sources = {row["measured_by"] for row in rows if row["update"] == LEGACY and row.get("measured_by")}
    return " and ".join(sorted(sources)) or "not measured"


def _whole_device(rows: Sequence[Row], prompt: str) -> dict[tuple[str, int], tuple[float | None, str]]:
    """Return peak and outcome of the published trainer with the published coupling, by expansion and group size."""
    shown = [row for row in rows if row["update"] == LEGACY and row["coupled"] and row["prompt"] == prompt]
    return {(row["expansion"], row["k"]): (_gib(row), row["outcome"]) for row in shown}


def _gib(row: Row) -> float | None:
    """Return what a completed run took of the whole published card."""
    held = held_bytes(dict(row)) if row["outcome"] == COMPLETED else None
    return None if held is None else device_bytes(process_bytes(held)) / GIB


def _method_bars(axes: Axes, peaks: Mapping[tuple[str, int], tuple[float | None, str]]) -> None:
    """Draw a group of bars per group size, one bar per expansion."""
    ks = sorted({*KS, *(k for _, k in peaks)})
    width = 0.8 / len(EXPANSIONS)
    for place, expansion in enumerate(EXPANSIONS):
        offsets = [group - 0.4 + (place + 0.5) * width for group in range(len(ks))]
        sizes = [peaks.get((expansion, k), (None, ""))[0] for k in ks]
        axes.bar(offsets, [size or 0.0 for size in sizes], width * 0.9, color=COLOURS[expansion], label=LABELS[expansion])
        for offset, size, k in zip(offsets, sizes, ks, strict=True):
            _write(axes, offset, size, peaks.get((expansion, k), (None, ""))[1])
    _finish(axes, ks)


def _finish(axes: Axes, ks: Sequence[int]) -> None:
    """Name the groups, and draw the limit of the published card."""
    axes.set_xticks(range(len(ks)), [f"k = {k}" for k in ks])
    axes.set_xlim(-0.6, len(ks) - 0.4)
    axes.margins(y=0.08)
    _card_line(axes)


def _write(axes: Axes, place: float, size: float | None, outcome: str) -> None:
    """Write a bar's figure above it, or the status of a run that has none."""
    if size is not None:
        axes.text(place, size, f"{size:.2f}", ha="center", va="bottom", fontsize=7.5, color=INK)
    elif outcome:
        text = STATUS.get(outcome, outcome)
        axes.text(place, 0.6, text, ha="center", va="bottom", fontsize=8.5, color=FULL_COLOUR, rotation=90, linespacing=1.0)


def _card_line(axes: Axes) -> None:
    axes.axhline(CARD_GIB, color=MUTED, linewidth=1, linestyle="--")
    axes.text(0.005, CARD_GIB, "the published card: 31.8 GiB", transform=axes.get_yaxis_transform(), fontsize=8, color=MUTED,
              va="bottom")  # fmt: skip


def _fixed_bars(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw the token-level runs with a fixed micro-batch: whole and cut prompt, at every group size."""
    shown = [row for row in rows if row["update"] == LEGACY and not row["coupled"] and row["expansion"] == "token"]
    ks = sorted({*KS, *(row["k"] for row in shown)})
    for shift, prompt, colour, label in (
        (-0.2, FULL, FULL_COLOUR, "whole prompt"),
        (0.2, TRUNCATED, CUT_COLOUR, "cut prompt"),
    ):
        for place, k in enumerate(ks):
            row = find([dict(row) for row in shown], prompt=prompt, k=k)
            if row is not None:
                size = _gib(row)
                axes.bar(place + shift, size or 0.0, 0.36, color=colour, label=label if place == 0 else None)
                _write(axes, place + shift, size, row["outcome"])
    _finish(axes, ks)
    if shown:
        axes.legend(frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1.0, 0.9))
    flat = len({round(size, 1) for row in shown if row["prompt"] == FULL and (size := _gib(row)) is not None}) == 1
    title = f"4. Here, {FIXED_ROWS} rows in a forward at every k"
    _titles(axes, f"{title}: flat in k" if flat else title, f"Basic; the other methods: summary.json; {_measured_by(rows)}")
