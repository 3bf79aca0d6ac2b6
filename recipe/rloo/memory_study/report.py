"""The study as text: a line for each cell as it ends, and the tables of a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipe.rloo.memory_study.arms import EXPANSIONS, FULL, TRUNCATED
from recipe.rloo.memory_study.findings import find, held_bytes, process_bytes
from recipe.rloo.memory_study.formula import device_bytes
from recipe.rloo.memory_study.published import LABELS
from recipe.rloo.memory_study.records import COMPLETED, OOM, CellResult

MIB, GIB = 2**20, 2**30


def cell_line(result: CellResult) -> str:
    """Return a line about a cell: its name, outcome, seconds, and its peak or what ended it."""
    head = f"{result.cell.name:58} {result.cell.device:5} {result.outcome:9} {result.seconds:6.1f} s"
    if result.failure is not None:
        return f"{head}  {result.failure.message[:120]}"
    peak = max((record.allocated_peak for record in result.records), default=0)
    return f"{head}  {peak / MIB:10,.1f} MiB live"


def report(summary: Mapping[str, Any]) -> str:
    """Return the tables of a summary."""
    rows = summary["rows"]
    parts = [
        _expansion_table(rows, coupled=True),
        _expansion_table(rows, coupled=False),
        _formula_table(summary["findings"]["formula"]),
        _saving_table(summary["findings"]["savings"], rows),
        _whole_run(summary["findings"]["whole_run"]),
        _controls(summary),
    ]
    return "\n\n".join(part for part in parts if part)


def _expansion_table(rows: Sequence[Mapping[str, Any]], coupled: bool) -> str:
    shown = [dict(row) for row in rows if row["update"] == "legacy" and row["coupled"] == coupled]
    if not shown:
        return ""
    ks = sorted({row["k"] for row in shown})
    how = "micro-batch = k, as published" if coupled else f"micro-batch {shown[0]['micro_batch']} at every k"
    lines = [
        f"Published trainer, {how}: GiB of the whole published device",
        _line("prompt", "expansion", *(f"k={k}" for k in ks)),
    ]
    for prompt in (FULL, TRUNCATED):
        for expansion in EXPANSIONS:
            found_rows = [find(shown, prompt=prompt, expansion=expansion, k=k) for k in ks]
            if any(found_rows):
                lines.append(_line(prompt, LABELS[expansion], *(_whole_device(row) for row in found_rows)))
    return "\n".join(lines)


def _whole_device(row: Mapping[str, Any] | None) -> str:
    """Return a run's use of the published device, or its status. A run out of memory shows in brackets what it would need."""
    if row is None:
        return "-"
    held = held_bytes(dict(row))
    size = "" if held is None else f"{device_bytes(process_bytes(held)) / GIB:.2f}"
    if row["outcome"] == COMPLETED:
        return size
    return f"oom ({size})" if row["outcome"] == OOM and size else str(row["outcome"])


def _formula_table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    lines = ["Published formula, M = 641 MiB + B V (14 T + 8 R), beside the runs: MiB above the desktop"]
    lines.append(_line("prompt", "expansion", "k", "formula", "run", "error"))
    for row in rows:
        sizes = (f"{row['formula_bytes'] / MIB:,.0f}", f"{row['run_bytes'] / MIB:,.0f}", f"{100 * row['error']:+.1f} %")
        lines.append(_line(row["prompt"], LABELS[row["expansion"]], row["k"], *sizes))
    return "\n".join(lines)


def _saving_table(savings: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    if not savings:
        return ""
    lines = ["What really saves, with the whole prompt: live MiB of one update, and times smaller than the published trainer"]
    ks = sorted({row["k"] for row in savings})
    lines.append(_line("", "update", *(f"k={k}" for k in ks)))
    names = list(dict.fromkeys(row["name"] for row in rows if row["name"] in {saving["name"] for saving in savings}))
    for name in names:
        found_rows = [find([dict(row) for row in savings], name=name, k=k) for k in ks]
        lines.append(_line("", name.removeprefix("token_full_"), *(_smaller(row) for row in found_rows)))
    return "\n".join(lines)


def _smaller(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    times = row["times_smaller"]
    return f"{row['peak_bytes'] / MIB:,.0f}" + ("" if times is None else f" ({times:,.1f}x)")


def _whole_run(rows: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(
        f"A whole step of this project at k = {row['k']} (rollout, log-probs, update, weight sync): "
        f"{row['peak']['median'] / MIB:,.0f} MiB live, in {row['peak_phase']} ({row['measured_by']})."
        for row in rows
    )


def _controls(summary: Mapping[str, Any]) -> str:
    controls = summary["controls"]
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in summary["outcomes"].items())
    lines = [
        f"Cells: {outcomes}.",
        f"Ids were compared in {controls['ids_groups']} sets of updates. Losses differ by at most {controls['loss_error']:.1e}, "
        f"gradient norms by {controls['grad_norm_error']:.1e}, relative, in {controls['values_groups']} sets with equal ids.",
    ]
    lines += [f"diverged: {name}: {reason}" for name, reason in controls["diverged"].items()]
    return "\n".join(lines)


def _line(first: object, second: object, *cells: object) -> str:
    return f"  {first!s:10} {second!s:28}" + "".join(f"{cell!s:>16}" for cell in cells)
