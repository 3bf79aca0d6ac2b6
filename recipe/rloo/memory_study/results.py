"""The results of all cells: the controls, ``combined.csv``, ``summary.json``, and the tables of the study's page."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import os
import platform
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipe.rloo.memory_study.cells import (
    COMPLETED,
    DEVICE_ALLOCATOR,
    DIVERGED,
    EXPANSIONS,
    FULL,
    GIB,
    IDLE_BYTES,
    KS,
    LABELS,
    LAST_GIB,
    LEGACY,
    MIB,
    OOM,
    PEAKS_GIB,
    TRUNCATED,
    WHOLE_RUN,
    Arm,
    CellResult,
    Failure,
    card_bytes,
    predicted_bytes,
    read_result,
    worst,
)
from recipe.rloo.memory_study.runner import CELLS, SAMPLE_COLUMNS, SAMPLES
from verl_memopt.errors import DataError

CSV_NAME, SUMMARY_NAME = "combined.csv", "summary.json"
ID_BYTES = 8
Row = dict[str, Any]


def combine(out: Path) -> dict[str, Any]:
    results, controls = check(read_results(out))
    with (out / CSV_NAME).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        for result in results:
            writer.writerows(csv_rows(result, out / SAMPLES / f"{result.cell.name}.csv"))
    summary = summarize(results, controls)
    (out / SUMMARY_NAME).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def read_results(out: Path) -> list[CellResult]:
    results = [read_result(path) for path in sorted((out / CELLS).glob("*.json"))]
    if not results:
        raise DataError(f"{out / CELLS}: no results. Run the study first: python -m recipe.rloo.memory_study run --out {out}")
    return results


# The controls: the memory of two arms can only be compared if both computed the same values.

TOLERANCE = 1e-5
"""Largest relative difference of losses and of gradient norms between arms with equal ids."""


def check(results: Sequence[CellResult]) -> tuple[list[CellResult], dict[str, Any]]:
    """Compare ids, values and repeats of the completed cells.

    The token-level arm with the published update is the first of each set, and the others are compared with it. A cell that
    differs gets the outcome ``diverged``, with the reason. Values of one run are compared in any precision.
    """
    diverged: dict[str, str] = {}
    ids: dict[Any, tuple[str, str]] = {}
    values: dict[Any, tuple[tuple[float | None, float | None], str]] = {}
    peaks: dict[Any, tuple[list[int], str]] = {}
    errors = [0.0, 0.0]
    order = [result for result in results if result.outcome == COMPLETED]
    order.sort(key=lambda result: (result.cell.arm.update != LEGACY, result.cell.arm.expansion != "token", result.cell.name))
    for result in order:
        cell, records = result.cell, result.records
        for record in [record for record in records if record.ids_sha256]:
            key = (cell.arm.k, cell.arm.prompt, cell.seed, cell.shapes, record.update)
            expected, name = ids.setdefault(key, (record.ids_sha256, cell.name))
            if record.ids_sha256 != expected:
                reason = f"update {record.update}: ids {record.ids_sha256[:12]}, but {expected[:12]} in {name}"
                diverged.setdefault(cell.name, reason)
            run = record.values_from.split(", ", 1)[-1]  # without its dtype
            mine = record.loss, record.grad_norm
            first, name = values.setdefault((record.ids_sha256, record.update, cell.seed, run), (mine, cell.name))
            apart = [_difference(*pair) for pair in zip(mine, first, strict=True)]
            errors = [max(pair) for pair in zip(errors, apart, strict=True)]
            if max(apart) > TOLERANCE:
                reason = f"update {record.update}: loss and gradient norm {mine}, but {first} in {name}"
                diverged.setdefault(cell.name, reason)
        # A tracker and a simulation must count the same bytes in each repeat. A real device may differ.
        if records and records[0].measured_by != DEVICE_ALLOCATOR:
            figures = [record.allocated_peak for record in records]
            known, name = peaks.setdefault((cell.arm, cell.seed, cell.shapes, cell.limit_bytes), (figures, cell.name))
            if figures != known:
                diverged.setdefault(cell.name, f"its peaks are not those of {name}, though nothing but the repeat differs")
    controls = {"ids_groups": len(ids), "values_groups": len(values), "loss_error": errors[0], "grad_norm_error": errors[1]}
    checked = [
        dataclasses.replace(result, outcome=DIVERGED, failure=Failure("Diverged", diverged[result.cell.name]))
        if result.cell.name in diverged
        else result
        for result in results
    ]
    return checked, controls | {"diverged": diverged}


def _difference(value: float | None, expected: float | None) -> float:
    """Return the difference relative to the expected value: 0 if neither was measured, infinity if only one was measured."""
    if value is None or expected is None:
        return 0.0 if value is expected else float("inf")
    return 0.0 if value == expected else abs(value - expected) / max(abs(expected), 1e-30)


# combined.csv

COMBINED_COLUMNS = (
    "method", "rloo_k", "method_rloo", "time_normalized", "gpu_memory_allocated_gb", "gpu_memory_reserved_gb",
    "gpu_memory_free_gb",
)  # fmt: skip
"""Columns of the published combined file, apart from the columns of the sampler."""
STUDY_COLUMNS = (
    "source", "cell", "arm", "expansion", "prompt", "logprob", "k", "b", "m", "prompt_len", "response_len", "total_tokens",
    "dropped_tokens", "vocab", "dtype", "ids_sha256", "seed", "repeat", "update", "phase", "allocated_enter", "allocated_peak",
    "allocated_exit", "reserved_peak", "host_rss", "seconds", "loss", "grad_norm", "values_from", "measured_by", "device",
    "limit_bytes", "outcome", "failed_phase", "failed_shape", "requested_bytes", "held_bytes", "peak_before_failure",
)  # fmt: skip
"""Columns of this study. ``source`` is ``phase`` for a phase of an update, ``sample`` for a reading of a device, and ``outcome``
for a run without records. Sizes are bytes. An empty cell = not measured."""
COLUMNS = (*SAMPLE_COLUMNS, *COMBINED_COLUMNS, *STUDY_COLUMNS)


def csv_rows(result: CellResult, samples: Path) -> Iterator[Row]:
    """Yield one row per record, or one row with the outcome if there is no record, and one row per reading of the device."""
    cell, arm, failure = result.cell, result.cell.arm, result.failure or Failure("", "")
    common = _known(cell, ("seed", "repeat", "device", "limit_bytes")) | _known(arm, ("expansion", "prompt", "k"))
    common |= _known(result, ("host_rss", "outcome"))
    common |= _known(failure, ("requested_bytes", "held_bytes", "peak_before_failure"))
    common |= {"failed_phase": failure.phase, "failed_shape": failure.shape}
    common |= {"cell": cell.name, "arm": arm.name, "logprob": arm.update, "b": 1, "m": arm.micro_batch}
    common |= {"method": arm.expansion, "rloo_k": arm.k, "method_rloo": f"{arm.expansion}_{arm.k}"}
    began = datetime.datetime.fromtimestamp(result.started, tz=datetime.UTC).isoformat()
    began_at = {"timestamp": round(result.started, 6), "datetime": began}
    for record in result.records:
        yield common | began_at | {"source": "phase"} | _known(record, STUDY_COLUMNS)
    if not result.records:
        yield common | began_at | {"source": "outcome"}
    if samples.exists():
        with samples.open(newline="", encoding="utf-8") as file:
            yield from (common | sample for sample in _sample_rows(list(csv.DictReader(file))))


def _known(source: object, names: Iterable[str]) -> Row:
    return {name: value for name in names if (value := getattr(source, name, None)) is not None}


def _sample_rows(readings: Sequence[Row]) -> Iterator[Row]:
    moments = [float(reading["timestamp"]) for reading in readings]
    for moment, reading in zip(moments, readings, strict=True):
        passed = (moment - moments[0]) / (moments[-1] - moments[0]) if moments[-1] > moments[0] else 0.0
        in_gib = {
            f"gpu_memory_{what}_gb": float(megabytes) / 1024 if (megabytes := reading[f"gpu_memory_{what}_mb"]) else ""
            for what in ("allocated", "reserved", "free")
        }
        yield reading | in_gib | {"source": "sample", "time_normalized": round(passed, 6)}


# summary.json


def summarize(results: Sequence[CellResult], controls: Mapping[str, Any]) -> dict[str, Any]:
    rows, counts = rows_of(results), Counter(result.outcome for result in _runs_and_needs(results)[0])
    return {
        "outcome": worst(set(counts)),
        "outcomes": dict(sorted(counts.items())),
        "controls": dict(controls),
        "findings": findings(rows),
        "rows": rows,
        "published_peaks_gib": [{"expansion": expansion, "k": k, "peak_gib": peak} for (expansion, k), peak in PEAKS_GIB.items()],
        "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
        "versions": results[0].versions,
        "devices": sorted({result.cell.device for result in results}),
        "seed": results[0].cell.seed,
        "seconds": round(sum(result.seconds for result in results), 1),
    }


def _runs_and_needs(results: Sequence[CellResult]) -> tuple[list[CellResult], dict[Arm, CellResult]]:
    """Return the runs, and by arm the extra runs without a limit, which show what a limited arm would need."""
    limited = {result.cell.arm for result in results if result.cell.limit_bytes is not None}
    needs = [result for result in results if result.cell.limit_bytes is None and result.cell.arm in limited]
    return [result for result in results if result not in needs], {result.cell.arm: result for result in needs}


def rows_of(results: Sequence[CellResult]) -> list[Row]:
    """Return one row per arm and group size.

    A peak is the largest over the phases of a run, and the median over repeats. A run that did not complete enters neither. Where
    a simulated cell ran out of memory below a limit, ``without_limit`` has what it would have needed.
    """
    runs, needs = _runs_and_needs(results)
    cells: dict[Arm, list[CellResult]] = {}
    for result in runs:
        cells.setdefault(result.cell.arm, []).append(result)

    def order(arm: Arm) -> tuple[object, ...]:
        return arm.update != LEGACY, arm.coupled, arm.prompt, EXPANSIONS.index(arm.expansion), arm.name, arm.k

    return [_row(arm, cells[arm], needs.get(arm)) for arm in sorted(cells, key=order)]


def _row(arm: Arm, results: Sequence[CellResult], need: CellResult | None) -> Row:
    completed = [result for result in results if result.outcome == COMPLETED and result.records]
    failures = [dataclasses.asdict(result.failure) for result in results if result.failure is not None]
    row = dataclasses.asdict(arm) | {
        "coupled": arm.coupled,
        "outcome": worst({result.outcome for result in results}),
        "repeats": len(results),
        "device": results[0].cell.device,
        "limit_bytes": results[0].cell.limit_bytes,
        "failure": failures[0] if failures else None,
        "without_limit": None if need is None or need.outcome != COMPLETED else _peaks([need]),
    }
    if row["outcome"] == COMPLETED:
        row |= _peaks(completed)
    shown = completed or ([need] if need is not None and need.records else [])
    if shown:
        record = shown[0].records[0]
        same = ("rows", "prompt_len", "response_len", "total_tokens", "vocab", "dtype", "ids_sha256", "loss", "grad_norm")
        row |= {name: getattr(record, name) for name in (*same, "values_from")}
        row["tokens_per_row"] = record.prompt_len + record.response_len
        row["dropped_tokens_per_row"] = record.dropped_tokens // record.rows
    return row


def _peaks(results: Sequence[CellResult]) -> Row:
    """Return the figures of completed repeats: bytes, the phase of the peak, and seconds of one update."""
    records = results[0].records
    highest = max(records, key=lambda record: record.allocated_peak)
    reserved = [[record.reserved_peak for record in result.records if record.reserved_peak is not None] for result in results]
    updates = len({record.update for record in records})
    return {
        "measured_by": highest.measured_by,
        "peak_phase": highest.phase,
        "peak": _spread([max(record.allocated_peak for record in result.records) for result in results]),
        "reserved_peak": _spread([max(peaks) for peaks in reserved]) if all(reserved) else None,
        "seconds": _spread([sum(record.seconds for record in result.records) / updates for result in results]),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def needed(row: Row) -> Row | None:
    """Return the figures of a row; if it ran out of memory, those of the run without the limit. None = no figures."""
    if row["outcome"] == COMPLETED:
        return row
    without: Row | None = row["without_limit"] if row["outcome"] == OOM else None
    return without


def held_bytes(row: Row | None) -> float | None:
    """Return the bytes that the run took from the device: reserved bytes if there was an allocator, or else live bytes."""
    figures = None if row is None else needed(row)
    return None if figures is None else float((figures["reserved_peak"] or figures["peak"])["median"])


def card_gib(row: Row | None) -> float | None:
    """Return the memory that a run takes, or would take, on the whole published card."""
    held = held_bytes(row)
    return None if held is None else card_bytes(held) / GIB


def find(rows: Iterable[Row], **values: Any) -> Row | None:
    return next((row for row in rows if all(row[name] == value for name, value in values.items())), None)


def findings(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the findings of the study: formula, truncation, expansion, savings, and a whole step of this project."""
    whole = [row for row in rows if row["update"] == WHOLE_RUN and row["outcome"] == COMPLETED]
    return {
        "formula": _formula_rows(rows),
        "truncation": _truncation_rows(rows),
        "expansion": _expansion_rows(rows),
        "savings": _saving_rows(rows),
        "whole_run": [{name: row[name] for name in ("k", "peak", "peak_phase", "measured_by")} for row in whole],
    }


def _formula_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the published formula beside each run of the published trainer with the published coupling."""
    compared = []
    for row in rows:
        held = held_bytes(row)
        if row["update"] == LEGACY and row["coupled"] and held is not None and row["expansion"] in ("token", "string"):
            expected = predicted_bytes(row["k"], row["prompt_len"], row["response_len"], row["vocab"])
            run = {name: row[name] for name in ("name", "expansion", "prompt", "k")}
            measured = IDLE_BYTES + held
            compared.append(run | {"formula_bytes": expected, "run_bytes": measured, "error": measured / expected - 1})
    return compared


def _truncation_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the memory that truncation alone saves, and the published saving of "String-level" against "Basic"."""
    compared = []
    for k in sorted({row["k"] for row in rows}):
        basic, string = PEAKS_GIB.get(("token", k)), PEAKS_GIB.get(("string", k))
        published = None if basic is None or string is None else 1 - string / basic
        for expansion in EXPANSIONS:
            common = {"update": LEGACY, "coupled": True, "expansion": expansion, "k": k}
            full, cut = (held_bytes(find(rows, prompt=prompt, **common)) for prompt in (FULL, TRUNCATED))
            if full is None or cut is None:
                continue
            sizes = {"full_bytes": card_bytes(full), "truncated_bytes": card_bytes(cut)}
            saving = 1 - sizes["truncated_bytes"] / sizes["full_bytes"]
            compared.append({"expansion": expansion, "k": k} | sizes | {"saving": saving, "published_saving": published})
    return compared


def _expansion_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the difference between the four expansions with equal prompts, and the ids that a late expansion saves."""
    compared = []
    for coupled, prompt, k in [(coupled, prompt, k) for coupled in (False, True) for prompt in (FULL, TRUNCATED) for k in KS]:
        group = [row for row in rows if (row["update"], row["coupled"], row["prompt"], row["k"]) == (LEGACY, coupled, prompt, k)]
        held = {row["expansion"]: size for row in group if (size := held_bytes(row)) is not None}
        if len(held) < 2:
            continue
        group = [row for row in group if row["expansion"] in held]
        least, most = card_bytes(min(held.values())), card_bytes(max(held.values()))
        compared.append(
            {
                "prompt": prompt,
                "k": k,
                "coupled": coupled,
                "expansions": list(held),
                "smallest_bytes": least,
                "largest_bytes": most,
                "apart": most / least - 1,
                "ids_equal": len({row["ids_sha256"] for row in group}) == 1,
                "ids_bytes_saved_by_waiting": (k - 1) * group[0]["prompt_len"] * ID_BYTES,
            }
        )
    return compared


def _saving_rows(rows: Sequence[Row]) -> list[Row]:
    """Compare the live bytes of each update with the published update at the same group size, with the whole prompt."""
    compared = []
    for row in rows:
        if row["update"] in (LEGACY, WHOLE_RUN) or row["outcome"] != COMPLETED:
            continue
        base = find(rows, update=LEGACY, coupled=True, expansion="token", prompt=FULL, k=row["k"])
        figures = None if base is None else needed(base)
        legacy, live = None if figures is None else figures["peak"]["median"], row["peak"]["median"]
        compared.append(
            {name: row[name] for name in ("name", "update", "k", "micro_batch", "measured_by", "peak_phase")}
            | {"peak_bytes": live, "legacy_bytes": legacy}
            | {"times_smaller": legacy and legacy / live, "saving": legacy and 1 - live / legacy}
        )
    return compared


# The tables of the page in Markdown. The page contains them word for word.

WORDS = {FULL: "whole", TRUNCATED: "cut", OOM: "out of memory"}
STEPS = {
    f"token_{FULL}_{LEGACY}_coupled": "published trainer",
    f"token_{TRUNCATED}_{LEGACY}_coupled": "the same, prompt cut to 1,024 tokens: another task",
    f"token_{FULL}_no_retention": "its output and scores are not kept",
    f"token_{FULL}_response_only": "+ logits of the response alone",
    f"token_{FULL}_chunked": "+ no logits: log-probs in chunks",
    f"token_{FULL}_chunked_one_row": "+ one row in a forward",
    f"token_{FULL}_shared_prompt": "the prompt is computed once, rows packed together",
    f"token_{FULL}_shared_prompt_checkpointing": "+ activation checkpointing: this project's update",
}
"""Arm -> its label, from the most memory to the least."""


def report(summary: Mapping[str, Any]) -> str:
    controls, whole = summary["controls"], summary["findings"]["whole_run"]
    tables = {
        "GiB of the whole published card, micro-batch = k as published": methods_table(summary),
        "GiB of the whole published card, 2 rows in a forward": methods_table(summary, coupled=False),
        "What the cut saves": cause_table(summary),
        "M = 641 MiB + B V (14 T + 8 R), above the desktop": formula_table(summary),
        "What really saves: live MiB of one update, and times smaller than published": savings_table(summary, times=True),
    }
    parts = [
        *(f"{title}:\n\n{table}" for title, table in tables.items() if table),
        *(
            f"A whole step of this project at k = {row['k']} (rollout, log-probs, update, weight sync): "
            f"{row['peak']['median'] / MIB:,.0f} MiB live, in {row['peak_phase']} ({row['measured_by']})."
            for row in whole
        ),
        "Cells: " + ", ".join(f"{count} {outcome}" for outcome, count in summary["outcomes"].items()) + ".",
        f"Ids were compared in {controls['ids_groups']} sets of updates. Losses differ by at most {controls['loss_error']:.1e}, "
        f"gradient norms by {controls['grad_norm_error']:.1e}, relative, in {controls['values_groups']} sets with equal ids.",
        *(f"diverged: {name}: {reason}" for name, reason in controls["diverged"].items()),
    ]
    return "\n\n".join(parts)


def methods_table(summary: Mapping[str, Any], coupled: bool = True) -> str:
    """Return the peaks of the card by method, prompt and group size in GiB, beside the published ones, which were coupled."""
    rows = [row for row in summary["rows"] if row["update"] == LEGACY and row["coupled"] == coupled]
    ks = sorted({*KS, *(row["k"] for row in rows)})
    heads = ["prompt", "method", *(f"published, k = {k}" for k in KS if coupled), *(f"here, k = {k}" for k in ks)]
    lines = []
    for prompt in (FULL, TRUNCATED):
        for expansion in EXPANSIONS:
            # Only the published string-level runs had truncated prompts.
            was_run = (prompt == TRUNCATED) == (expansion == "string")
            published = [_published((expansion, k)) if was_run else "" for k in KS if coupled]
            found = [find(rows, prompt=prompt, expansion=expansion, k=k) for k in ks]
            if coupled or any(found):
                here = (_status(row, card_gib(row), ".2f") for row in found)
                lines.append([WORDS[prompt], LABELS[expansion], *published, *here])
    return _table(heads, lines, 2)


def _published(run: tuple[str, int]) -> str:
    """Return a published peak. For a run that ran out of memory, return that word, with its last reading if it was published."""
    peak, last = PEAKS_GIB[run], f"{LAST_GIB[run]:.2f}, " if run in LAST_GIB else ""
    return f"{last}{WORDS[OOM]}" if peak is None else f"{peak:.2f}"


def _status(row: Row | None, size: float | None, digits: str) -> str:
    """Return the size of a completed run. For another run, return its status and the memory that it would need."""
    text = "" if size is None else format(size, digits)
    if row is None or row["outcome"] == COMPLETED:
        return text
    status = WORDS.get(row["outcome"], row["outcome"])
    return f"{status} ({text})" if text else f"{status}"


def cause_table(summary: Mapping[str, Any], k: int = 4) -> str:
    """Return two methods with both prompts at one group size: tokens per row, GiB of the card, and what truncation saves."""
    lines = []
    for expansion in ("token", "string"):
        whole = None
        for prompt in (FULL, TRUNCATED):
            row = find(summary["rows"], update=LEGACY, coupled=True, prompt=prompt, expansion=expansion, k=k)
            size = card_gib(row)
            if row is not None and size is not None:
                saved = f"{100 * (1 - size / whole):.1f} %" if whole else ""
                lines.append([LABELS[expansion], WORDS[prompt], f"{row['tokens_per_row']:,}", f"{size:.2f}", saved])
                whole = whole or size
    return _table(["method", "prompt", "tokens of a row", f"GiB, k = {k}", "saved"], lines, 2)


def formula_table(summary: Mapping[str, Any]) -> str:
    """Return the formula beside the runs of the token-level arm: MiB above the desktop, and the error."""
    lines = []
    for row in summary["findings"]["formula"]:
        if row["expansion"] == "token":
            sizes = (f"{row[name] / MIB:,.0f}" for name in ("formula_bytes", "run_bytes"))
            lines.append([WORDS[row["prompt"]], str(row["k"]), *sizes, f"{100 * row['error']:+.1f} %"])
    return _table(["prompt", "k", "formula, MiB", "run, MiB", "difference"], lines, 1)


def savings_table(summary: Mapping[str, Any], times: bool = False) -> str:
    """Return the live MiB of one update by arm and group size, from the published trainer to this project's."""
    rows = summary["rows"]
    ks, lines = sorted({row["k"] for row in rows}), []
    for name, words in STEPS.items():
        found = [find(rows, name=name, k=k) for k in ks]
        cells = [_status(row, live_mib(row), ",.0f") for row in found]
        if times:
            savings = [find(summary["findings"]["savings"], name=name, k=k) for k in ks]
            smaller = [row["times_smaller"] if row else None for row in savings]
            cells = [cell + (f" ({factor:,.1f}x)" if factor else "") for cell, factor in zip(cells, smaller, strict=True)]
        if any(found):
            lines.append([words, *cells])
    return _table(["update", *(f"k = {k}" for k in ks)], lines, 1)


def live_mib(row: Row | None) -> float | None:
    """Return the live peak of a run, or what it would have needed without the limit."""
    figures = None if row is None else needed(row)
    return None if figures is None else float(figures["peak"]["median"]) / MIB


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]], words: int) -> str:
    """Return a table in Markdown. The first ``words`` columns are words, and the others figures. Empty = it has no lines."""
    ruler = "|" + "|".join("---" if place < words else "---:" for place in range(len(heads))) + "|"
    head, *rest = ("| " + " | ".join(cells) + " |" for cells in (heads, *lines))
    return "\n".join([head, ruler, *rest]) if rest else ""
