"""The record of a run as text: who took how long, held how much, and how far that is from the floor."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.update_pass.contest import OURS, Row
from verl_memopt.observe.phase import MIB

COLUMNS = (
    "contestant", "k", "seconds\nmedian", "least", "most", "peak\nMiB", "params+\ngrads MiB", "beyond\nMiB", "GFLOP",
    "of the\nfloor", "gradient\nerror",
)  # fmt: skip
NONE = "–"


def row_from(found: dict[str, Any]) -> Row:
    """Gives a row as it was written to JSON."""
    return Row(**{**found, "runs": tuple(found["runs"])})


def to_json(row: Row) -> dict[str, Any]:
    """Gives a row as it is written to JSON."""
    return asdict(row)


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


def render(rows: Sequence[Row], width: int = 140) -> str:
    """Gives the table as text, one part without checkpointing and one with, a rule between group sizes."""
    return "\n\n".join(
        f"Activation checkpointing {'on' if on else 'off'}\n{_table(part, width)}"
        for on in (False, True)
        if (part := [row for row in rows if row.checkpointing is on])
    )


def _table(rows: Sequence[Row], width: int) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(*cells(row), end_section=following is not None and following.k != row.k)
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    notes = [f"{row.contestant}, k = {row.k}: {row.note}" for row in rows if row.note]
    return "\n".join(["\n".join(lines).strip("\n"), *notes])


def ratios(rows: Sequence[Row]) -> list[str]:
    """Gives, in words, how our contestants stand against the best of the others and against the naive update.

    Best is taken column by column: the fastest other, and the one with the least beyond parameters and gradients.
    """
    return [
        line
        for ours in rows
        if ours.contestant in OURS and ours.seconds is not None
        for line in _against(ours, [row for row in rows if _same_work(row, ours)])
    ]


def _same_work(row: Row, ours: Row) -> bool:
    same = row.k == ours.k and row.checkpointing == ours.checkpointing
    return same and row.contestant not in OURS and row.seconds is not None


def _against(ours: Row, others: Sequence[Row]) -> list[str]:
    peers = [row for row in others if not row.contestant.startswith("naive")]
    lines = []
    head = f"{ours.contestant}, k = {ours.k}, checkpointing {'on' if ours.checkpointing else 'off'}"
    if peers:
        fastest = min(peers, key=lambda row: row.seconds or 0.0)
        leanest = min(peers, key=lambda row: row.beyond_bytes or 0)
        lines.append(f"{head}: {_speed(ours, fastest)}; {_share(ours, leanest)}")
    lines += [f"{head}: {_speed(ours, row)}; {_share(ours, row)}" for row in others if row.contestant.startswith("naive")]
    return lines


def _speed(ours: Row, other: Row) -> str:
    assert ours.seconds is not None
    assert other.seconds is not None
    return f"{other.seconds / ours.seconds:.2f} x as fast as {other.contestant}"


def _share(ours: Row, other: Row) -> str:
    assert ours.beyond_bytes is not None
    assert other.beyond_bytes is not None
    return f"{ours.beyond_bytes / other.beyond_bytes:.3f} of the bytes beyond parameters and gradients of {other.contestant}"
