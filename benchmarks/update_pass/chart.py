"""The record as pictures: seconds and bytes of each contestant, and how both grow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.update_pass.contest import NOT_INSTALLED, OURS, Row
from verl_memopt.observe.charts import INK, PALETTE, figure, save, style
from verl_memopt.observe.phase import MIB

OURS_COLOUR, PEER_COLOUR = "#3b6ea5", "#b8c2cc"
MUTED = "#5b6670"


def draw(rows: Sequence[Row], title: str, source: str, path: Path) -> Path:
    """Writes a picture of the largest group size that most contestants ran, a line of bars per setting of checkpointing."""
    rows = [row for row in rows if row.status != NOT_INSTALLED]
    k = max({row.k for row in rows}, key=lambda size: (sum(row.k == size for row in rows), size))
    parts = [part for on in (False, True) if (part := [row for row in rows if row.checkpointing is on and row.k == k])]
    drawing = figure(13, 0.42 * sum(map(len, parts)) + 1.2 * len(parts) + 0.8)
    grid = drawing.subplots(len(parts), 3, squeeze=False, height_ratios=[len(part) for part in parts], sharey="row")
    for line, part in zip(grid, parts, strict=True):
        _bars(line, part, k)
    drawing.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    drawing.supxlabel(source, x=0.01, ha="left", fontsize=8.5, color=MUTED)
    return save(drawing, path)


def _bars(line: Sequence[Any], rows: Sequence[Row], k: int) -> None:
    places = range(len(rows))
    on = "on" if rows[0].checkpointing else "off"
    seconds, peaks = [row.seconds for row in rows], [_mib(row.peak_bytes) for row in rows]
    work = [None if row.flops is None else row.flops / 1e9 for row in rows]
    slowest = [max(row.runs, default=None) for row in rows]
    columns = (
        (f"k = {k}, checkpointing {on}", "seconds, median; whisker: least and most", seconds, slowest),
        ("Peak", "live MiB; dark: parameters and gradients", peaks, peaks),
        ("Work", "GFLOP; line: the floor", work, work),
    )
    colours = [OURS_COLOUR if row.contestant in OURS else PEER_COLOUR for row in rows]
    for axes, (title, unit, values, ends) in zip(line, columns, strict=True):
        style(axes, title, unit, "", grid="x")
        axes.barh(places, [value or 0.0 for value in values], height=0.62, color=colours)
        for place, value, end, row in zip(places, values, ends, rows, strict=True):
            text = row.status if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
            # On white, as the floor's line may run behind.
            white = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
            place_of = {"xy": (end or 0.0, place), "xytext": (5, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(text, **place_of, fontsize=8.5, bbox=white)
        axes.set_xlim(0, 1.2 * max((end for end in ends if end), default=1.0))
    for row, place in zip(rows, places, strict=True):
        if row.seconds is not None:
            spread = [[row.seconds - min(row.runs)], [max(row.runs) - row.seconds]]
            line[0].errorbar([row.seconds], [place], xerr=spread, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
    line[1].barh(places, [row.param_grad_bytes / MIB for row in rows], height=0.62, color="#7d8894")
    line[2].axvline(rows[0].floor_flops / 1e9, color=INK, linewidth=1)
    line[0].set_yticks(places, [row.contestant for row in rows])
    line[0].invert_yaxis()


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB


def draw_growth(series: dict[str, list[tuple[int, list[Row]]]], source: str, path: Path) -> Path:
    """Writes a picture of seconds and bytes beyond parameters and gradients against each of the sizes that were doubled."""
    drawing = figure(4.3 * len(series), 6.6)
    grid = drawing.subplots(2, len(series), squeeze=False)
    for column, (what, points) in enumerate(series.items()):
        names = [row.contestant for row in points[0][1]]
        for axes, unit, value in (
            (grid[0][column], "seconds", lambda row: row.seconds),
            (grid[1][column], "MiB beyond parameters and gradients", lambda row: _mib(row.beyond_bytes)),
        ):
            style(axes, f"{unit} against {what}" if unit == "seconds" else "", what, unit)
            for index, name in enumerate(names):
                found = [(size, value(row)) for size, rows in points for row in rows if row.contestant == name]
                known = [(size, number) for size, number in found if number is not None]
                sizes, numbers = [size for size, _ in known], [number for _, number in known]
                axes.plot(sizes, numbers, "o-", color=PALETTE[index % len(PALETTE)], label=name, markersize=4)
            # From zero and to scale, so that what grows linearly is a straight line.
            axes.set_xlim(0, 1.04 * points[-1][0])
            axes.set_ylim(0, 1.04 * axes.get_ylim()[1])
            axes.set_xticks([size for size, _ in points], [f"{size:,}" for size, _ in points])
    grid[0][0].legend(frameon=False, fontsize=8.5)
    drawing.supxlabel(source, x=0.01, ha="left", fontsize=8.5, color=MUTED)
    return save(drawing, path)
