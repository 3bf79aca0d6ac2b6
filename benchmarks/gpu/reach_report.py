"""What `reach` found, as JSON, a table and a chart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.reach import FITS, NO_HOST_MEMORY, probes_of
from benchmarks.gpu.reach_cases import Case
from benchmarks.gpu.reach_search import FINE, STEP, Known
from verl_memopt.observe.charts import figure, save, style
from verl_memopt.observe.phase import GIB

NOTE = """memory=constrained. A probe is one update of {rows} answers to a prompt of {prompt} tokens: old log-probs, reference
log-probs, update, weight sync. The engine sleeps but for the sync, and generation is not part of a probe. Weights are zeros:
bytes do not depend on values. computed: an estimate of the update's peak from the knobs' formulas, made without running it.
error: computed against measured, of the update. lora: rank 16 on a bfloat16 base; full: fp32 masters; full_bf16: bfloat16
masters."""


def write_report(out: Path, cases: Sequence[Case]) -> None:
    """Writes reach.json, reach.txt and reach.png from the probes on record."""
    found = [summary(case, probes_of(out / "probes.jsonl", case)) for case in cases]
    (out / "reach.json").write_text(json.dumps({"schema": 1, "cases": found}, indent=1) + "\n")
    first = cases[0]
    (out / "reach.txt").write_text(f"{table(found)}\n\n{NOTE.format(rows=first.rows, prompt=first.prompt)}\n")
    if any(case["longest"] for case in found):
        draw(found, first.limit_gb, out / "reach.png")


def summary(case: Case, probes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Gives what the probes of one case say. longest: tokens of the longest response that fits; 0 where none does."""
    known = Known.of((probe["response"], probe["status"] == FITS) for probe in probes)
    best = next((probe for probe in reversed(probes) if probe["status"] == FITS and probe["response"] == known.fits), None)
    failed = next((probe for probe in reversed(probes) if probe["status"] != FITS), None)
    return {
        "name": case.name,
        "case": asdict(case),
        "status": _status(known, probes, failed),
        "longest": known.fits,
        "shortest_that_fails": known.fails,
        "measured": best,
        "fails_in": None if failed is None else failed.get("phase"),
        "message": None if failed is None else failed.get("message"),
        "error": None if best is None else best["computed_peak_bytes"] / best["update_peak_bytes"] - 1,
        "probes": list(probes),
    }


def _status(known: Known, probes: Sequence[dict[str, Any]], failed: dict[str, Any] | None) -> str:
    if not probes:
        return "not tried"
    if failed is not None and failed["status"] == NO_HOST_MEMORY:
        return NO_HOST_MEMORY
    if known.fits == 0:
        return "does not fit"
    if known.fails is None:
        return "fits at every length tried"
    return "found" if known.fails - known.fits <= max(STEP, known.fails // FINE) else "not searched to the end"


def table(found: Sequence[dict[str, Any]]) -> str:
    """Gives the cases as text."""
    heads = ("case", "longest", "fails at", "GiB", "in", "update GiB", "computed", "error", "s", "probes", "status")
    rows = [heads]
    for case in found:
        best = case["measured"]
        fails = f"{case['shortest_that_fails']:,}" if case["shortest_that_fails"] else "-"
        if best is None:
            rows.append((case["name"], "-", fails, *["-"] * 6, str(len(case["probes"])), case["status"]))
            continue
        sizes = (best["peak_bytes"], best["update_peak_bytes"], best["computed_peak_bytes"])
        peak, update, computed = (f"{size / GIB:.4g}" for size in sizes)
        shown = (case["name"], f"{case['longest']:,}", fails, peak, best["peak_phase"], update, computed)
        rows.append((*shown, f"{case['error']:+.1%}", f"{best['seconds']:.1f}", str(len(case["probes"])), case["status"]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    left = {0, 4, len(heads) - 1}
    lines = [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(text.rstrip() for text in lines)


def draw(found: Sequence[dict[str, Any]], limit_gb: float, path: Path) -> None:
    """Draws the longest response of each case, and at that length the measured peak of the update beside the computed one."""
    fitting = [case for case in found if case["longest"]]
    drawing = figure(11.0, 1.8 + 0.55 * len(fitting))
    lengths, peaks = drawing.subplots(1, 2)
    places = range(len(fitting))
    style(lengths, f"Longest response under {limit_gb:g} GiB", "tokens of a response", "", grid="x")
    lengths.barh(places, [case["longest"] for case in fitting], height=0.6)
    for place, case in zip(places, fitting, strict=True):
        more = " or more" if case["shortest_that_fails"] is None else ""
        lengths.text(case["longest"], place, f"  {case['longest']:,}{more}", va="center", fontsize=9)
    lengths.set_yticks(list(places), [case["name"] for case in fitting])
    lengths.margins(x=0.3)
    lengths.invert_yaxis()
    style(peaks, "Peak of the update at that length", "GiB", "", grid="x")
    for offset, key, label in ((-0.2, "update_peak_bytes", "measured"), (0.2, "computed_peak_bytes", "computed")):
        sizes = [case["measured"][key] / GIB for case in fitting]
        peaks.barh([place + offset for place in places], sizes, height=0.36, label=label)
    peaks.axvline(limit_gb, linestyle="--", linewidth=1, color="0.4", label="limit")
    peaks.set_yticks(list(places), [""] * len(fitting))
    peaks.invert_yaxis()
    peaks.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, frameon=False, fontsize=9)
    save(drawing, path)
