"""Memory and time of every phase of a run: rows of ``memory_timeline.csv``."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from verl_memopt.errors import DataError
from verl_memopt.observe.files import append_text, replace_text
from verl_memopt.observe.phase import REWARD_IN_ROLLOUT, PhaseMemory, Span


@dataclass(frozen=True)
class TimelineRow:
    """One phase of one step, over all processes. Bytes that were not counted are None, and empty in the file."""

    timestamp: float
    """When the phase began, in seconds since 1970."""
    elapsed_seconds: float
    """When it began, in seconds of running time. A pause between a stop and a resume does not count."""
    step: int
    """0 = before the first step."""
    phase: str
    """As in ``timing_s/<phase>``."""
    seconds: float
    """Duration as the driver measured it."""
    allocated_bytes: int | None = None
    """Live tensors at the end of the phase, the largest over ranks."""
    peak_allocated_bytes: int | None = None
    """Peak of live tensors, the largest over ranks."""
    peak_reserved_bytes: int | None = None
    """Peak of the caching allocator, the largest over ranks."""
    device_used_bytes: int | None = None
    """Total minus free memory of the device, the largest over ranks."""
    host_rss_bytes: int | None = None
    """Resident memory of driver and workers together."""
    counter: str = ""
    """Source of the live tensor bytes: allocator (GPU), tracker (CPU), or empty."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Bytes by kind at the peak."""


COLUMNS = tuple(column.name for column in fields(TimelineRow))
_TIMES = ("timestamp", "elapsed_seconds", "seconds")
_INTEGERS = ("allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "host_rss_bytes")
_NO_PHASES = ("step", "epoch", "run", REWARD_IN_ROLLOUT)
"""Spans that contain other phases or lie within one. They are timed but have no row in the timeline."""


def timeline_rows(step: int, spans: Sequence[Span], memories: Mapping[str, PhaseMemory]) -> list[TimelineRow]:
    """Return a step's rows in the order in which the phases began. The run folder fills in their running time.

    Args:
        step: Number of the step.
        spans: The phases of the step.
        memories: Figures of each phase over all processes. A phase without figures has empty cells.
    """
    rows = []
    for span in sorted((span for span in spans if span.name not in _NO_PHASES), key=lambda span: span.started):
        memory, figures = memories.get(span.name), dict[str, Any]()
        if memory is not None:
            counter = "tracker" if memory.peak_reserved_bytes is None else "allocator"
            figures |= {name: getattr(memory, name) for name in (*_INTEGERS, "kinds")}
            figures["counter"] = "" if memory.peak_allocated_bytes is None else counter
        rows.append(TimelineRow(span.started, 0.0, step, span.name, span.seconds, **figures))
    return rows


def append_timeline(path: Path, rows: Sequence[TimelineRow]) -> None:
    """Append rows to the file. A new file begins with the header."""
    text = _csv_text(rows, header=not path.exists() or path.stat().st_size == 0)
    append_text(path, text)


def keep_timeline(path: Path, last_step: int) -> None:
    """Drop the rows after a step in one atomic write."""
    if path.exists():
        replace_text(path, _csv_text([row for row in read_timeline(path) if row.step <= last_step], header=True))


def read_timeline(path: Path) -> list[TimelineRow]:
    """Return the rows of a timeline file. An incomplete last line, left by a kill, is ignored.

    Raises:
        DataError: Any other line is not a row. The message names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    # Text after the last newline is a row that a kill has cut off.
    whole = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(io.StringIO(whole, newline=""))
    try:
        return [_parsed(path, reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num + 1}: not a timeline row ({error}). Correct or delete this line.") from error


def _parsed(path: Path, line: int, cells: dict[str, Any]) -> TimelineRow:
    try:
        figures: dict[str, Any] = {name: int(cells[name]) if cells[name] else None for name in _INTEGERS}
        figures |= {name: float(cells[name]) for name in _TIMES}
        kinds = {str(name): int(size) for name, size in json.loads(cells["kinds"] or "{}").items()}
        if not all(math.isfinite(figures[name]) for name in _TIMES):
            raise ValueError("a time is not finite")
        return TimelineRow(step=int(cells["step"]), phase=cells["phase"], counter=cells["counter"], kinds=kinds, **figures)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}:{line}: not a timeline row ({error}). Correct or delete this line.") from error


def _csv_text(rows: Sequence[TimelineRow], header: bool) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if header:
        writer.writeheader()
    for row in rows:
        cells = asdict(row) | {"kinds": json.dumps(row.kinds, sort_keys=True) if row.kinds else ""}
        cells |= {name: round(cells[name], 6) for name in _TIMES}
        writer.writerow(cells)
    return text.getvalue()
