"""What a profiled call did: its kernels with their times on a GPU, its operations with their own times on a CPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.kernel_groups import GROUPS, kernel_group, operation_group
from verl_memopt.distributed import device as device_room

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace that occupy the device. Ranges that a program has named lie there too, and do nothing."""

MICRO = 1e-6


@dataclass(frozen=True)
class Launch:
    """Something the device did. start: seconds in the trace, None where only sums are known. calls: how often, in ``seconds``."""

    name: str
    group: str
    seconds: float
    start: float | None = None
    calls: int = 1


@dataclass(frozen=True)
class Share:
    """A group's part of a profile."""

    launches: int
    seconds: float


def profiled(call: Callable[[], Any], device: torch.device) -> list[Launch]:
    """Gives what a call did on a device."""
    on_gpu = device_room.is_gpu(device)
    device_room.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        call()
        device_room.synchronize(device)
    if not on_gpu:
        return [
            Launch(event.key, operation_group(event.key), event.self_cpu_time_total * MICRO, calls=event.count)
            for event in found.key_averages()
            if "::" in event.key
        ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        found.export_chrome_trace(str(file))
        return launches(json.loads(file.read_text()))


def launches(trace: dict[str, Any]) -> list[Launch]:
    """Gives what occupied the device in a trace as torch's profiler exports it; times there are microseconds."""
    return [
        Launch(event["name"], kernel_group(event["name"]), event["dur"] * MICRO, event["ts"] * MICRO)
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ON_GPU
    ]


def by_group(found: Iterable[Launch]) -> dict[str, Share]:
    """Gives launches and seconds of each group that has any, in the order of the table."""
    found = list(found)
    shares = {}
    for group in GROUPS:
        own = [launch for launch in found if launch.group == group]
        if own:
            shares[group] = Share(sum(launch.calls for launch in own), sum(launch.seconds for launch in own))
    return shares


def busy_seconds(found: Sequence[Launch]) -> float | None:
    """Gives how long the device did anything: what runs at the same time counts once. None where only sums are known."""
    spans = sorted((launch.start, launch.start + launch.seconds) for launch in found if launch.start is not None)
    if not spans:
        return None
    busy, (start, end) = 0.0, spans[0]
    for first, last in spans[1:]:
        if first > end:
            busy, start, end = busy + end - start, first, last
        end = max(end, last)
    return busy + end - start


def span_seconds(found: Sequence[Launch]) -> float | None:
    """Gives the time from the first start to the last end. None where only sums are known."""
    timed = [launch for launch in found if launch.start is not None]
    if not timed:
        return None
    return max(launch.start + launch.seconds for launch in timed) - min(launch.start for launch in timed)


def longest(found: Iterable[Launch], count: int) -> list[Launch]:
    """Gives the names that took most time together, with their calls."""
    names: dict[str, Launch] = {}
    for launch in found:
        before = names.get(launch.name)
        calls, seconds = (0, 0.0) if before is None else (before.calls, before.seconds)
        names[launch.name] = Launch(launch.name, launch.group, seconds + launch.seconds, calls=calls + launch.calls)
    return sorted(names.values(), key=lambda launch: -launch.seconds)[:count]
