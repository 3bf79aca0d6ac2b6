"""What the results say: one row per arm and group size, and the comparisons that answer the study's questions."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recipe.rloo.memory_study.arms import EXPANSIONS, FULL, KS, LEGACY, TRUNCATED, WHOLE_RUN, Arm
from recipe.rloo.memory_study.formula import IDLE_BYTES, device_bytes, predicted_bytes
from recipe.rloo.memory_study.published import PEAKS_GIB
from recipe.rloo.memory_study.records import COMPLETED, OOM, CellResult, UpdateRecord, worst

MIB = 2**20
LEAST_DIFFERENCE = 2 * MIB
"""Peaks that differ by no more than this are called equal."""
ID_BYTES = 8
"""Bytes of a token's id."""

Row = dict[str, Any]


def rows_of(results: Sequence[CellResult]) -> list[Row]:
    """Return one row per arm and group size, in the order of their names.

    A peak is the largest over the phases of a run, without warm-up, and the median over repeats. A run that did not complete
    enters neither. Where a simulated cell ran out of memory below a limit, ``without_limit`` has what it would have needed.
    """
    cells: dict[Arm, list[CellResult]] = {}
    needs: dict[Arm, CellResult] = {}
    limited = limited_arms(results)
    for result in results:
        if is_need(result, limited):
            needs[result.cell.arm] = result
        else:
            cells.setdefault(result.cell.arm, []).append(result)
    return [_row(arm, cells[arm], needs.get(arm)) for arm in sorted(cells, key=_order)]


def limited_arms(results: Sequence[CellResult]) -> set[Arm]:
    """Return the arms that ran below a limit."""
    return {result.cell.arm for result in results if result.cell.limit_bytes is not None}


def is_need(result: CellResult, limited: set[Arm]) -> bool:
    """Return whether a result only shows what an arm that ran below a limit would need without it."""
    return result.cell.limit_bytes is None and result.cell.arm in limited


def _order(arm: Arm) -> tuple[object, ...]:
    return (arm.update != LEGACY, arm.coupled, arm.prompt, EXPANSIONS.index(arm.expansion), arm.name, arm.k)


def _row(arm: Arm, results: Sequence[CellResult], need: CellResult | None) -> Row:
    completed = [result for result in results if result.outcome == COMPLETED and counted(result)]
    row = dataclasses.asdict(arm) | {
        "coupled": arm.coupled,
        "outcome": worst({result.outcome for result in results}),
        "repeats": len(results),
        "device": results[0].cell.device,
        "limit_bytes": results[0].cell.limit_bytes,
    }
    failures = [result.failure for result in results if result.failure is not None]
    row["failure"] = dataclasses.asdict(failures[0]) if failures else None
    row["without_limit"] = None if need is None or need.outcome != COMPLETED else _peaks([need])
    if row["outcome"] == COMPLETED:
        row |= _peaks(completed)
    shown = completed or ([need] if need is not None and counted(need) else [])
    return row | (_what_ran(shown[0]) if shown else {})


def counted(result: CellResult) -> list[UpdateRecord]:
    """Return the records of a run without those of its warm-up update."""
    return [record for record in result.records if record.update >= 0]


def _peaks(results: Sequence[CellResult]) -> Row:
    """Return the figures of completed repeats: bytes, the phase of the peak, and seconds of one update."""
    records = counted(results[0])
    highest = max(records, key=lambda record: record.allocated_peak)
    live = [max(record.allocated_peak for record in counted(result)) for result in results]
    reserved = [
        max(record.reserved_peak for record in counted(result) if record.reserved_peak is not None)
        for result in results
        if any(record.reserved_peak is not None for record in counted(result))
    ]
    updates = len({record.update for record in records})
    return {
        "measured_by": highest.measured_by,
        "peak_phase": highest.phase,
        "peak": spread(live),
        "reserved_peak": spread(reserved) if reserved else None,
        "seconds": spread([sum(record.seconds for record in counted(result)) / updates for result in results]),
    }


def _what_ran(result: CellResult) -> Row:
    record = counted(result)[0]
    return {
        "rows": record.rows,
        "prompt_len": record.prompt_len,
        "response_len": record.response_len,
        "tokens_per_row": record.prompt_len + record.response_len,
        "dropped_tokens_per_row": record.dropped_tokens // record.rows,
        "total_tokens": record.total_tokens,
        "vocab": record.vocab,
        "dtype": record.dtype,
        "ids_sha256": record.ids_sha256,
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "values_from": record.values_from,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, smallest and largest of the repeats."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def differs(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    """Return whether two peaks differ: by more than 2 MiB and by more than three times the spread between repeats."""
    scatter = max(first["max"] - first["min"], second["max"] - second["min"])
    return abs(first["median"] - second["median"]) > max(LEAST_DIFFERENCE, 3 * scatter)


def needed(row: Row) -> Row | None:
    """Return the figures of a row, or those without the limit where it ran out of memory. None = there are none."""
    if row["outcome"] == COMPLETED:
        return row
    without: Row | None = row["without_limit"] if row["outcome"] == OOM else None
    return without


def held_bytes(row: Row) -> float | None:
    """Return what the run took from the device: reserved bytes where an allocator was there, else live bytes."""
    figures = needed(row)
    if figures is None:
        return None
    return float((figures["reserved_peak"] or figures["peak"])["median"])


def process_bytes(held: float) -> float:
    """Return what a process takes above the desktop: the published idle level, and what its allocator holds."""
    return IDLE_BYTES + held


def find(rows: Iterable[Row], **values: Any) -> Row | None:
    """Return the row with these values, or None."""
    return next((row for row in rows if all(row[name] == value for name, value in values.items())), None)


def findings(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the study's answers: formula, truncation, expansion, savings, and a whole step of this project."""
    return {
        "formula": formula_rows(rows),
        "truncation": truncation_rows(rows),
        "expansion": expansion_rows(rows),
        "savings": saving_rows(rows),
        "whole_run": [_named(row) for row in rows if row["update"] == WHOLE_RUN and row["outcome"] == COMPLETED],
    }


def _named(row: Row) -> Row:
    """Return what a whole step of this project took."""
    return {name: row[name] for name in ("k", "peak", "peak_phase", "measured_by")}


def formula_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the published formula beside each run of the published trainer with the published coupling."""
    compared = []
    for row in rows:
        held = held_bytes(row)
        if row["update"] != LEGACY or not row["coupled"] or held is None or row["expansion"] not in ("token", "string"):
            continue
        expected = predicted_bytes(row["k"], row["prompt_len"], row["response_len"], row["vocab"])
        measured = process_bytes(held)
        compared.append(
            {name: row[name] for name in ("name", "expansion", "prompt", "k")}
            | {"formula_bytes": expected, "run_bytes": measured, "error": measured / expected - 1}
        )
    return compared


def truncation_rows(rows: Sequence[Row]) -> list[Row]:
    """Return what truncation alone takes off the whole device, per expansion and group size, beside the published saving."""
    compared = []
    for k in sorted({row["k"] for row in rows}):
        for expansion in EXPANSIONS:
            common = {"update": LEGACY, "coupled": True, "expansion": expansion, "k": k}
            pair = [find(rows, prompt=prompt, **common) for prompt in (FULL, TRUNCATED)]
            held = [None if row is None else held_bytes(row) for row in pair]
            if held[0] is None or held[1] is None:
                continue
            full, cut = (device_bytes(process_bytes(size)) for size in (held[0], held[1]))
            compared.append(
                {"expansion": expansion, "k": k, "full_bytes": full, "truncated_bytes": cut, "saving": 1 - cut / full}
                | {"published_saving": published_saving(k)}
            )
    return compared


def published_saving(k: int) -> float | None:
    """Return the share that the published string-level run saved against the published basic run. None = one did not end."""
    basic, string = PEAKS_GIB.get(("token", k)), PEAKS_GIB.get(("string", k))
    return None if basic is None or string is None else 1 - string / basic


def expansion_rows(rows: Sequence[Row]) -> list[Row]:
    """Return how far apart the four expansions are with the same prompts, and the ids that waiting to expand saves."""
    compared = []
    for coupled in (False, True):
        for prompt in (FULL, TRUNCATED):
            for k in KS:
                common = (LEGACY, coupled, prompt, k)
                group = [row for row in rows if (row["update"], row["coupled"], row["prompt"], row["k"]) == common]
                group = [row for row in group if held_bytes(row) is not None]
                if len(group) < 2:
                    continue
                whole = [device_bytes(process_bytes(held_bytes(row) or 0.0)) for row in group]
                compared.append(
                    {"prompt": prompt, "k": k, "coupled": coupled, "expansions": [row["expansion"] for row in group]}
                    | {"smallest_bytes": min(whole), "largest_bytes": max(whole)}
                    | {"apart": max(whole) / min(whole) - 1}
                    | {"ids_equal": len({row["ids_sha256"] for row in group}) == 1}
                    | {"ids_bytes_saved_by_waiting": (k - 1) * group[0]["prompt_len"] * ID_BYTES}
                )
    return compared


def saving_rows(rows: Sequence[Row]) -> list[Row]:
    """Return what each update with the whole prompt takes, against the published one at the same group size. Live bytes."""
    compared = []
    for row in rows:
        if row["update"] in (LEGACY, WHOLE_RUN) or row["outcome"] != COMPLETED:
            continue
        base = find(rows, update=LEGACY, coupled=True, expansion="token", prompt=FULL, k=row["k"])
        figures = None if base is None else needed(base)
        legacy = None if figures is None else figures["peak"]["median"]
        live = row["peak"]["median"]
        compared.append(
            {name: row[name] for name in ("name", "update", "k", "micro_batch", "measured_by", "peak_phase")}
            | {"peak_bytes": live, "legacy_bytes": legacy}
            | {"times_smaller": None if legacy is None else legacy / live}
            | {"saving": None if legacy is None else 1 - live / legacy}
        )
    return compared
