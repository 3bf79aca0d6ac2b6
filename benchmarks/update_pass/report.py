"""The record of a run as text: who took how long, held how much, and how far that is from the floor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.common import NONE, text_table
from benchmarks.update_pass.contest import OURS, Row
from verl_memopt.observe.phase import MIB

COLUMNS = (
    "contestant", "k", "seconds\nmedian", "least", "most", "peak\nMiB", "params+\ngrads MiB", "beyond\nMiB", "GFLOP",
    "of the\nfloor", "gradient\nerror",
)  # fmt: skip


def row_from(found: dict[str, Any]) -> Row:
    return Row(**{**found, "runs": tuple(found["runs"])})


def text(record: dict[str, Any]) -> str:
    head = [source(record), f"Workload {record['workload']}: {record['work']['what']}; ids {record['ids']}.", ""]
    rows = [row_from(row) for row in record["rows"]]
    return "\n".join([*head, render(rows), "", rounds(record, rows), *ratios(rows)])


def source(record: dict[str, Any]) -> str:
    where = record["machine"]
    load = f"load {where['load_before']} to {where['load_after']}"
    packages = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    device = "" if where["device"] == "cpu" else f"{where['device']}, beside "
    return (
        f"Measured {record['date']} on {device}{where['processor']}, {where['cores']} cores ({load}), "
        f"{where['threads']} threads; {packages}."
    )


def rounds(record: dict[str, Any], rows: Sequence[Row]) -> str:
    kept = [len(row.runs) for row in rows if row.runs]
    order = "one contestant after another" if record["order"] == "alone" else "contestants in turns"
    limit = "" if record["budget_seconds"] is None else f", within {record['budget_seconds']:.0f} s for all"
    made = f"{min(kept)} to {max(kept)}" if kept else "none"
    return f"Timed rounds: {record['repeats']} asked for, {made} made{limit}; {order}, after one that is not kept."


def said(row: Row) -> str:
    found = f"{row.seconds:.3f} s, {len(row.runs)} rounds" if row.seconds is not None else row.status
    return f"{row.contestant}, k = {row.k}, checkpointing {_switch(row)}: {found}"


def _switch(row: Row) -> str:
    return "on" if row.checkpointing else "off"


def render(rows: Sequence[Row]) -> str:
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
    seconds = [row.seconds, min(row.runs, default=None), max(row.runs, default=None)]
    sizes = [row.peak_bytes, row.param_grad_bytes, row.beyond_bytes]
    return [
        row.contestant, str(row.k),
        *(words if one is None else f"{one:.3f}" for one, words in zip(seconds, (row.status, NONE, NONE), strict=True)),
        *(NONE if size is None else f"{size / MIB:,.1f}" for size in sizes),
        NONE if row.flops is None else f"{row.flops / 1e9:,.1f}",
        NONE if row.flops is None else f"{row.flops / row.floor_flops:.2f}",
        NONE if row.grad_rel_err is None else f"{row.grad_rel_err:.1e}",
    ]  # fmt: skip


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
