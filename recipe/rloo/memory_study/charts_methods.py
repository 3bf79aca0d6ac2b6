"""The four methods side by side: what they fed the model, what a token costs, what expansion can save, and a table of it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.rloo.memory_study.arms import EXPANSIONS, FULL, KS, LEGACY, TRUNCATED, TRUNCATED_TOKENS
from recipe.rloo.memory_study.findings import ID_BYTES, find, held_bytes, needed
from recipe.rloo.memory_study.published import LABELS
from recipe.rloo.memory_study.records import COMPLETED, OOM
from verl_memopt.observe.charts import INK, PALETTE, figure, note, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KIB, MIB, GIB = 2**10, 2**20, 2**30
MUTED, RED = "#5b6670", "#b8433d"
COLOURS = dict(zip(EXPANSIONS, (PALETTE[0], PALETTE[5], PALETTE[2], PALETTE[1]), strict=True))
PUBLISHED_TOKENS = {"token": 3115, "lazy": 3115, "repeat_sampler": 3115, "string": TRUNCATED_TOKENS + 100}
"""Tokens of a row, prompt and response, in the published runs."""
Row = dict[str, Any]


def draw_methods(summary: Mapping[str, Any], path: Path) -> Path:
    """Draw what each method fed the model, its bytes per token, the ids that it saves, and a table with the controls."""
    rows = [dict(row) for row in summary["rows"] if row["update"] == LEGACY and row["coupled"]]
    drawing = figure(14, 8.8)
    halves: Any = drawing.subfigures(2, 1, height_ratios=[1, 1])
    upper, lower = halves
    fed, cost, ids = upper.subplots(1, 3)
    _published_tokens(fed)
    _bytes_per_token(cost, rows)
    _id_bytes(ids)
    _table(lower.subplots(), rows)
    return save(drawing, path)


def _published_tokens(axes: Axes) -> None:
    style(axes, "What the published runs fed the model", "", "tokens of a row")
    bars = axes.bar(range(len(EXPANSIONS)), [PUBLISHED_TOKENS[name] for name in EXPANSIONS], 0.6,
                    color=[COLOURS[name] for name in EXPANSIONS])  # fmt: skip
    axes.bar_label(bars, fmt="{:,.0f}", fontsize=9, padding=2)
    axes.set_xticks(range(len(EXPANSIONS)), [LABELS[name].replace(" ", "\n") for name in EXPANSIONS], fontsize=8.5)
    axes.margins(y=0.12)


def _bytes_per_token(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw the peak of a forward divided by its tokens. Equal heights mean that a row's length alone decides."""
    style(axes, "Here: the peak divided by the tokens of a forward", "", "MiB per token")
    k = max((row["k"] for row in rows if row["outcome"] == COMPLETED and row["prompt"] == FULL), default=None)
    if k is None:
        note(axes, "Not measured.")
        return
    for shift, prompt, alpha in ((-0.2, FULL, 1.0), (0.2, TRUNCATED, 0.45)):
        for place, expansion in enumerate(EXPANSIONS):
            row = find(rows, expansion=expansion, prompt=prompt, k=k, outcome=COMPLETED)
            held = None if row is None else held_bytes(row)
            if row is not None and held is not None:
                size = held / MIB / (row["micro_batch"] * row["tokens_per_row"])
                bar = axes.bar(place + shift, size, 0.37, color=COLOURS[expansion], alpha=alpha)
                axes.bar_label(bar, fmt="{:.2f}", fontsize=8, padding=2)
    axes.set_xticks(range(len(EXPANSIONS)), [LABELS[name].replace(" ", "\n") for name in EXPANSIONS], fontsize=8.5)
    axes.set_xlabel(f"k = {k}; dark: whole prompt, light: cut prompt", color=INK)
    axes.set_xlim(-0.6, len(EXPANSIONS) - 0.4)
    axes.margins(y=0.12)


def _id_bytes(axes: Axes) -> None:
    style(axes, "All that waiting to expand can save: ids", "", "KiB")
    sizes = [(k - 1) * (PUBLISHED_TOKENS["token"] - 100) * ID_BYTES / KIB for k in KS]
    bars = axes.bar(range(len(KS)), sizes, 0.5, color=COLOURS["lazy"])
    axes.bar_label(bars, fmt="{:.0f} KiB", fontsize=9, padding=2)
    axes.set_xticks(range(len(KS)), [f"k = {k}" for k in KS])
    axes.set_xlabel("(k - 1) x prompt tokens x 8 bytes", color=INK)
    axes.margins(y=0.12)


COLUMNS = ("method", "prompt", "tokens\na row", "dropped\na row", "ids of k = 2, 4, 8", "loss at\nk = 4", "gradient\nnorm",
           "peak GiB\nk = 2", "k = 4", "k = 8")  # fmt: skip
WIDTHS = (0.13, 0.08, 0.07, 0.07, 0.2, 0.09, 0.09, 0.08, 0.08, 0.08)


def _table(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a line per method and prompt. What must be equal stands in one column."""
    axes.axis("off")
    axes.set_title("The control: equal ids, equal loss, equal memory (allocator's peak)", loc="left", fontsize=11, color=INK,
                   fontweight="bold")  # fmt: skip
    lines = [
        _line(rows, expansion, prompt)
        for prompt in (FULL, TRUNCATED)
        for expansion in EXPANSIONS
        if find(rows, expansion=expansion, prompt=prompt) is not None
    ]
    if not lines:
        return
    table = axes.table(lines, colLabels=COLUMNS, colWidths=WIDTHS, cellLoc="right", loc="upper left", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.scale(1, 1.55)
    for (line, column), cell in table.get_celld().items():
        cell.set_edgecolor("#d9dee4")
        if line == 0:
            cell.set_height(cell.get_height() * 1.35)
            cell.set_text_props(color=MUTED)
        if column in (0, 1):
            cell.set_text_props(ha="left")
        if line and lines[line - 1][column].startswith(("out of", "diverged", "failed", "timeout")):
            cell.set_text_props(color=RED)


def _line(rows: Sequence[Row], expansion: str, prompt: str) -> list[str]:
    of_k = {k: find(rows, expansion=expansion, prompt=prompt, k=k) for k in KS}
    ran = {k: row for k, row in of_k.items() if row is not None and "ids_sha256" in row}
    middle = ran.get(4) or next(iter(ran.values()), {})
    return [
        LABELS[expansion],
        "whole" if prompt == FULL else "cut",
        f"{middle['tokens_per_row']:,}" if middle else "-",
        f"{middle['dropped_tokens_per_row']:,}" if middle else "-",
        "  ".join(ran[k]["ids_sha256"][:6] if k in ran else "-" for k in KS),
        _value(middle.get("loss")),
        _value(middle.get("grad_norm")),
        *(_peak(of_k[k]) for k in KS),
    ]


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _peak(row: Row | None) -> str:
    if row is None:
        return "-"
    held = held_bytes(row)
    if row["outcome"] == COMPLETED and held is not None:
        return f"{held / GIB:.2f}"
    needs = "" if needed(row) is None or held is None else f"\n(needs {held / GIB:.1f})"
    return ("out of memory" if row["outcome"] == OOM else row["outcome"]) + needs
