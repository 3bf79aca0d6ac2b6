"""The record of a run as text and as pictures: who took how long, held how much, and how far that is from the floor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import NONE, text_table
from benchmarks.update_pass.contest import NOT_INSTALLED, OURS, Row
from verl_memopt.observe.charts import INK, PALETTE, figure, save, style
from verl_memopt.observe.phase import MIB

COLUMNS = (
    "contestant", "k", "seconds\nmedian", "least", "most", "peak\nMiB", "params+\ngrads MiB", "beyond\nMiB", "GFLOP",
    "of the\nfloor", "gradient\nerror",
)  # fmt: skip
OURS_COLOUR, PEER_COLOUR = "#3b6ea5", "#b8c2cc"
MUTED = "#5b6670"
Series = dict[str, list[tuple[int, list[Row]]]]
"""What was doubled -> its values, each with its rows."""


def row_from(found: dict[str, Any]) -> Row:
    return Row(**{**found, "runs": tuple(found["runs"])})


def series_of(record: dict[str, Any]) -> Series:
    """Gives the growth that a record holds."""
    return {
        what: [(point["size"], [row_from(row) for row in point["rows"]]) for point in points]
        for what, points in record["growth"].items()
    }


def text(record: dict[str, Any]) -> str:
    head = [source(record), f"Workload {record['workload']}: {record['work']['what']}; ids {record['ids']}.", ""]
    if "floors" in record:
        lines = [
            f"k = {floor['k']}: {floor['off'] / 1e9:,.1f} GFLOP, with checkpointing {floor['on'] / 1e9:,.1f}"
            for floor in record["floors"]
        ]
        return "\n".join([*head, *lines])
    if "growth" in record:
        parts = [f"{what} = {size:,}\n{render(rows)}" for what, points in series_of(record).items() for size, rows in points]
        return "\n\n".join(["\n".join(head).rstrip(), *parts])
    rows = [row_from(row) for row in record["rows"]]
    return "\n".join([*head, render(rows), "", rounds(record, rows), *ratios(rows)])


def source(record: dict[str, Any]) -> str:
    """Gives a line on when, where and with what the figures were measured."""
    where = record["machine"]
    load = f"load {where['load_before']} to {where['load_after']}"
    packages = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    device = "" if where["device"] == "cpu" else f"{where['device']}, beside "
    return (
        f"Measured {record['date']} on {device}{where['processor']}, {where['cores']} cores ({load}), "
        f"{where['threads']} threads; {packages}."
    )


def rounds(record: dict[str, Any], rows: Sequence[Row]) -> str:
    """Gives, in words, how the times were taken."""
    kept = [len(row.runs) for row in rows if row.runs]
    order = "one contestant after another" if record["order"] == "alone" else "contestants in turns"
    limit = "" if record["budget_seconds"] is None else f", within {record['budget_seconds']:.0f} s for all"
    made = f"{min(kept)} to {max(kept)}" if kept else "none"
    return f"Timed rounds: {record['repeats']} asked for, {made} made{limit}; {order}, after one that is not kept."


def said(row: Row) -> str:
    """Gives a row in a line, for whoever waits."""
    found = f"{row.seconds:.3f} s, {len(row.runs)} rounds" if row.seconds is not None else row.status
    return f"{row.contestant}, k = {row.k}, checkpointing {_switch(row)}: {found}"


def _switch(row: Row) -> str:
    return "on" if row.checkpointing else "off"


def render(rows: Sequence[Row]) -> str:
    """Gives the table as text, one part without checkpointing and one with, a gap between group sizes."""
    return "\n\n".join(
        f"Activation checkpointing {_switch(part[0])}\n{_table(part)}"
        for on in (False, True)
        if (part := [row for row in rows if row.checkpointing is on])
    )


def _table(rows: Sequence[Row]) -> str:
    gaps = [at for at, (row, following) in enumerate(pairwise(rows)) if following.k != row.k]
    notes = [f"{row.contestant}, k = {row.k}: {row.note}" for row in rows if row.note]
    return "\n".join([text_table(COLUMNS, [cells(row) for row in rows], gaps=gaps), *notes])


def cells(row: Row) -> list[str]:
    """Gives a row's cells in the order of ``COLUMNS``."""
    seconds = [row.seconds, min(row.runs, default=None), max(row.runs, default=None)]
    sizes = [row.peak_bytes, row.param_grad_bytes, row.beyond_bytes]
    return [
        row.contestant,
        str(row.k),
        *(words if one is None else f"{one:.3f}" for one, words in zip(seconds, (row.status, NONE, NONE), strict=True)),
        *(NONE if size is None else f"{size / MIB:,.1f}" for size in sizes),
        NONE if row.flops is None else f"{row.flops / 1e9:,.1f}",
        NONE if row.flops is None else f"{row.flops / row.floor_flops:.2f}",
        NONE if row.grad_rel_err is None else f"{row.grad_rel_err:.1e}",
    ]


def ratios(rows: Sequence[Row]) -> list[str]:
    """Gives, in words, how our contestants stand against the best of the others and against the naive update.

    Best is taken column by column: the fastest other, and the one with the least beyond parameters and gradients.
    """
    timed = [row for row in rows if row.seconds is not None]
    lines = []
    for ours in (row for row in timed if row.contestant in OURS):
        work = (ours.k, ours.checkpointing)
        others = [row for row in timed if row.contestant not in OURS and (row.k, row.checkpointing) == work]
        peers = [row for row in others if not row.contestant.startswith("naive")]
        pairs = [(row, row) for row in others if row not in peers]
        if peers:
            fastest = min(peers, key=lambda row: row.seconds or 0.0)
            pairs.insert(0, (fastest, min(peers, key=lambda row: row.beyond_bytes or 0)))
        lines += [_ratio(ours, fastest, leanest) for fastest, leanest in pairs]
    return lines


def _ratio(ours: Row, fastest: Row, leanest: Row) -> str:
    assert ours.seconds is not None
    assert fastest.seconds is not None
    assert ours.beyond_bytes is not None
    assert leanest.beyond_bytes is not None
    return (
        f"{ours.contestant}, k = {ours.k}, checkpointing {_switch(ours)}: {fastest.seconds / ours.seconds:.2f} x as fast as "
        f"{fastest.contestant}; {ours.beyond_bytes / leanest.beyond_bytes:.3f} of the bytes beyond parameters and gradients of "
        f"{leanest.contestant}"
    )


def draw(record: dict[str, Any], path: Path) -> Path:
    """Writes a picture of the largest group size that most contestants ran, a line of bars per setting of checkpointing."""
    rows = [row for row in map(row_from, record["rows"]) if row.status != NOT_INSTALLED]
    k = max({row.k for row in rows}, key=lambda size: (sum(row.k == size for row in rows), size))
    parts = [part for on in (False, True) if (part := [row for row in rows if row.checkpointing is on and row.k == k])]
    drawing = figure(13, 0.42 * sum(map(len, parts)) + 1.2 * len(parts) + 0.8)
    grid = drawing.subplots(len(parts), 3, squeeze=False, height_ratios=[len(part) for part in parts], sharey="row")
    for line, part in zip(grid, parts, strict=True):
        _bars(line, part, k)
    what = record["work"]["what"]
    drawing.suptitle(what[:1].upper() + what[1:], x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    drawing.supxlabel(source(record), x=0.01, ha="left", fontsize=8.5, color=MUTED)
    return save(drawing, path)


def _bars(line: Sequence[Any], rows: Sequence[Row], k: int) -> None:
    places = range(len(rows))
    seconds, peaks = [row.seconds for row in rows], [_mib(row.peak_bytes) for row in rows]
    work = [None if row.flops is None else row.flops / 1e9 for row in rows]
    slowest = [max(row.runs, default=None) for row in rows]
    columns = (
        (f"k = {k}, checkpointing {_switch(rows[0])}", "seconds, median; whisker: least and most", seconds, slowest),
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


def draw_growth(record: dict[str, Any], path: Path) -> Path:
    """Writes a picture of seconds and bytes beyond parameters and gradients against each of the sizes that were doubled."""
    series = series_of(record)
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
    drawing.supxlabel(source(record), x=0.01, ha="left", fontsize=8.5, color=MUTED)
    return save(drawing, path)
