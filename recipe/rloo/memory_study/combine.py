"""Combine the cells of a study: ``combined.csv`` for plotting, and ``summary.json`` with the figures and what they say."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import os
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipe.rloo.memory_study.controls import Controls, check
from recipe.rloo.memory_study.findings import findings, is_need, limited_arms, rows_of
from recipe.rloo.memory_study.monitor import COLUMNS as SAMPLE_COLUMNS
from recipe.rloo.memory_study.published import PEAKS_GIB
from recipe.rloo.memory_study.records import CellResult, Failure, UpdateRecord, read_result, worst
from recipe.rloo.memory_study.runner import CELLS, SAMPLES
from verl_memopt.errors import DataError

CSV_NAME, SUMMARY_NAME = "combined.csv", "summary.json"
COMBINED_COLUMNS = ("method", "rloo_k", "method_rloo", "time_normalized", "gpu_memory_allocated_gb", "gpu_memory_reserved_gb",
                    "gpu_memory_free_gb")  # fmt: skip
"""Columns that the published combined file has beside those of the sampler."""
PHASE_COLUMNS = (
    "source", "cell", "arm", "expansion", "prompt", "logprob", "k", "b", "m", "prompt_len", "response_len", "total_tokens",
    "dropped_tokens", "vocab", "dtype", "ids_sha256", "seed", "repeat", "update", "phase", "allocated_enter", "allocated_peak",
    "allocated_exit", "reserved_peak", "host_rss", "seconds", "loss", "grad_norm", "values_from", "measured_by", "device",
    "limit_bytes", "outcome", "failed_phase", "failed_shape", "requested_bytes", "held_bytes", "peak_before_failure",
)  # fmt: skip
"""Columns of this study. ``source`` is ``phase`` for a phase of an update, ``sample`` for a reading of a device, and ``outcome``
for a run without records. Sizes are bytes. An empty cell means that nobody measured it."""
COLUMNS = (*SAMPLE_COLUMNS, *COMBINED_COLUMNS, *PHASE_COLUMNS)

ONE_PROMPT = 1
"""Prompts of an update, as in the published runs."""


def combine(out: Path) -> dict[str, Any]:
    """Write both files of a results folder, and return the summary.

    Raises:
        DataError: The folder has no cells.
    """
    results, controls = check(read_results(out))
    with (out / CSV_NAME).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        for result in results:
            writer.writerows(phase_rows(result))
            writer.writerows(sample_rows(result, out / SAMPLES / f"{result.cell.name}.csv"))
    summary = summarize(results, controls)
    (out / SUMMARY_NAME).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def read_results(out: Path) -> list[CellResult]:
    """Return the results of a folder, in the order of their names.

    Raises:
        DataError: There are none.
    """
    results = [read_result(path) for path in sorted((out / CELLS).glob("*.json"))]
    if not results:
        raise DataError(f"{out / CELLS}: no results. Run the study first: python -m recipe.rloo.memory_study run --out {out}")
    return results


def summarize(results: Sequence[CellResult], controls: Controls) -> dict[str, Any]:
    """Return the summary: rows, findings, controls, published figures, outcomes, and where it ran."""
    rows = rows_of(results)
    limited = limited_arms(results)
    # What a simulation needs without the limit says nothing about whether the study went well.
    counts = Counter(result.outcome for result in results if not is_need(result, limited))
    return {
        "outcome": worst(set(counts)),
        "outcomes": dict(sorted(counts.items())),
        "controls": dataclasses.asdict(controls),
        "findings": findings(rows),
        "rows": rows,
        "published_peaks_gib": [{"expansion": expansion, "k": k, "peak_gib": peak} for (expansion, k), peak in PEAKS_GIB.items()],
        "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
        "versions": results[0].versions,
        "devices": sorted({result.cell.device for result in results}),
        "seed": results[0].cell.seed,
        "seconds": round(sum(result.seconds for result in results), 1),
    }


def phase_rows(result: CellResult) -> Iterator[dict[str, Any]]:
    """Yield a row per record, or one row with the outcome where there is no record."""
    common = _common(result) | {"timestamp": round(result.started, 6), "datetime": _iso(result.started)}
    for record in result.records:
        yield common | {"source": "phase"} | _figures(record)
    if not result.records:
        yield common | {"source": "outcome"}


def _figures(record: UpdateRecord) -> dict[str, Any]:
    figures = {name: getattr(record, name) for name in PHASE_COLUMNS if hasattr(record, name)}
    return {name: "" if value is None else value for name, value in figures.items()}


def _common(result: CellResult) -> dict[str, Any]:
    cell, arm = result.cell, result.cell.arm
    failure = result.failure or Failure("", "")
    entries = {
        "method": arm.expansion,
        "rloo_k": arm.k,
        "method_rloo": f"{arm.expansion}_{arm.k}",
        "cell": cell.name,
        "arm": arm.name,
        "expansion": arm.expansion,
        "prompt": arm.prompt,
        "logprob": arm.update,
        "k": arm.k,
        "b": ONE_PROMPT,
        "m": arm.micro_batch,
        "seed": cell.seed,
        "repeat": cell.repeat,
        "device": cell.device,
        "limit_bytes": cell.limit_bytes,
        "host_rss": result.host_rss,
        "outcome": result.outcome,
        "failed_phase": failure.phase,
        "failed_shape": failure.shape,
        "requested_bytes": failure.requested_bytes,
        "held_bytes": failure.held_bytes,
        "peak_before_failure": failure.peak_before_failure,
    }
    return {name: "" if value is None else value for name, value in entries.items()}


def sample_rows(result: CellResult, path: Path) -> Iterator[dict[str, Any]]:
    """Yield a row per reading of the device during a cell. Without a sampler there are none."""
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        readings = list(csv.DictReader(file))
    if not readings:
        return
    first, last = float(readings[0]["timestamp"]), float(readings[-1]["timestamp"])
    for reading in readings:
        passed = (float(reading["timestamp"]) - first) / (last - first) if last > first else 0.0
        in_gib = {
            f"gpu_memory_{what}_gb": float(megabytes) / 1024 if (megabytes := reading[f"gpu_memory_{what}_mb"]) else ""
            for what in ("allocated", "reserved", "free")
        }
        yield _common(result) | reading | in_gib | {"source": "sample", "time_normalized": round(passed, 6)}


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC).isoformat()
