"""What really saves: bars of one group size from the published trainer to this project's update, and how each grows with k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.rloo.memory_study.arms import FULL, LEGACY, TRUNCATED
from recipe.rloo.memory_study.findings import find, needed
from recipe.rloo.memory_study.records import COMPLETED, OOM
from verl_memopt.observe.charts import INK, figure, note, save, size_text, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20
CARD_MIB = 32 * 1024
MUTED, RED, LIGHT_RED, BLUE, LIGHT_BLUE = "#5b6670", "#b8433d", "#e39a97", "#3b6ea5", "#8fb0d0"
Row = Mapping[str, Any]

STEPS = (
    (f"token_{FULL}_{LEGACY}_coupled", "published trainer", RED),
    (f"token_{TRUNCATED}_{LEGACY}_coupled", "the same, prompt cut to 1,024\n(another task: text is lost)", LIGHT_RED),
    (f"token_{FULL}_no_retention", "nothing kept that nobody reads", LIGHT_BLUE),
    (f"token_{FULL}_response_only", "logits of the response alone", LIGHT_BLUE),
    (f"token_{FULL}_chunked", "no logits: log-prob in chunks", LIGHT_BLUE),
    (f"token_{FULL}_chunked_one_row", "... and one row a forward", LIGHT_BLUE),
    (f"token_{FULL}_shared_prompt", "prompt computed once,\nrows packed together", BLUE),
    (f"token_{FULL}_shared_prompt_checkpointing", "... and checkpointing:\nthis project's update", BLUE),
)
"""Arms from the most memory to the least, with their words and colours."""


def draw_savings(summary: Mapping[str, Any], path: Path) -> Path:
    """Draw each update's live peak at the largest published group size, and against the group size."""
    rows = [dict(row) for row in summary["rows"]]
    drawing = figure(14, 6.2)
    bars, growth = drawing.subplots(1, 2, width_ratios=[1.35, 1])
    ks = [row["k"] for row in rows if row["update"] != LEGACY and row["outcome"] == COMPLETED]
    if not ks:
        for axes in (bars, growth):
            note(axes, "No update that saves was measured.")
        return save(drawing, path)
    k = max((size for size in ks if size <= 8), default=max(ks))
    _bars(bars, rows, k)
    _growth(growth, rows)
    controls = summary["controls"]
    drawing.supxlabel(
        f"Whole prompt of 3,015 tokens and equal ids, except for the cut one. Largest difference between arms with equal ids: "
        f"loss {_difference(controls['loss_error'])}, gradient norm {_difference(controls['grad_norm_error'])} (relative).",
        x=0.01, ha="left", fontsize=9, color=MUTED,
    )  # fmt: skip
    return save(drawing, path)


def _difference(size: float) -> str:
    return f"{size:.0e}" if size else "none"


def _bars(axes: Axes, rows: Sequence[dict[str, Any]], k: int) -> None:
    style(axes, f"One update at k = {k}: peak of live tensors", "live tensors at the peak, MiB (logarithmic)", "", grid="x")
    known = [(words, colour, row) for name, words, colour in STEPS if (row := find(rows, name=name, k=k)) is not None]
    sizes = [_live(row) for _, _, row in known]
    base = sizes[0] if known and known[0][2]["update"] == LEGACY else None
    largest = max((size for size in sizes if size is not None), default=1.0)
    smallest = min((size for size in sizes if size is not None), default=1.0)
    for place, ((_, colour, row), size) in enumerate(zip(known, sizes, strict=True)):
        if row["outcome"] == COMPLETED and size is not None:
            axes.barh(place, size, color=colour, height=0.66)
            text = f"{size_text(size)} MiB" + (f", {base / size:,.1f} times less" if base and size < base else "")
            axes.annotate(text, (size, place), (5, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
        else:
            needs = "" if size is None else f" (would need {size_text(size)} MiB)"
            words = "out of memory" if row["outcome"] == OOM else row["outcome"]
            axes.annotate(
                words + needs, (smallest / 3, place), (5, 0), textcoords="offset points", va="center", fontsize=9, color=RED
            )
    axes.set_xscale("log")
    axes.set_xlim(smallest / 3, largest * 14)
    axes.set_yticks(range(len(known)), [words for words, _, _ in known])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(known) - 0.4, -0.6)


def _live(row: dict[str, Any]) -> float | None:
    """Return the live peak of a run in MiB, or what it would have needed without the limit."""
    figures = needed(row)
    return None if figures is None else float(figures["peak"]["median"]) / MIB


def _growth(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    below = "k, answers to a prompt; x: simulated, has no room below the limit"
    style(axes, "How the peak grows with the group", below, "live tensors at the peak, MiB (logarithmic)", grid="both")
    ks, labels = set[int](), list[tuple[int, float, str, str]]()
    for name, words, colour in STEPS:
        points = sorted((row["k"], size) for row in rows if row["name"] == name and (size := _live(row)) is not None)
        if not points:
            continue
        ks |= {k for k, _ in points}
        axes.plot([k for k, _ in points], [size for _, size in points], "-", color=colour, linewidth=1.6)
        finished = {row["k"] for row in rows if row["name"] == name and row["outcome"] == COMPLETED}
        for k, size in points:
            axes.plot([k], [size], "o" if k in finished else "x", color=colour, markersize=5 if k in finished else 7)
        labels.append((*points[-1], words.split("\n")[0].removeprefix("... ").rstrip(":,"), colour))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(ks), [str(k) for k in sorted(ks)])
    axes.set_xlim(right=max(ks) * 7)
    _label_lines(axes, labels)
    axes.axhline(CARD_MIB, color=MUTED, linewidth=1, linestyle="--")
    axes.text(max(ks) * 6.8, CARD_MIB * 0.95, "a card of 32 GiB", fontsize=8, color=MUTED, ha="right", va="top")


def _label_lines(axes: Axes, labels: Sequence[tuple[int, float, str, str]]) -> None:
    """Write each line's name beside its end, apart from the one below it."""
    lowest = 0.0
    for k, size, words, colour in sorted(labels, key=lambda label: label[1]):
        height = max(size, lowest)
        axes.text(k * 1.12, height, words, va="center", fontsize=8, color=colour)
        lowest = height * 1.22
