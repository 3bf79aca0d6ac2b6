"""``verl-memopt calibrate``: measure the speed of this machine's device, for the time estimates of ``verl-memopt fit``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from verl_memopt.distributed.device import is_gpu, name_of, synchronize
from verl_memopt.plan.seconds import Rates
from verl_memopt.records import RecordError, checked, parse_json, read_record

SIDES = (2048, 1024)
"""Rows and columns of the matrix products that are timed, about as many as in a micro-batch. A GPU uses four times as many."""
BLOCK_BYTES = 2**27
"""Bytes of the copies that are timed; more than a processor's caches hold."""
CALLS = 1000
"""Number of small operations that are timed together."""
SEQUENCES, VOCABULARY = 16, 16_384
"""Number of sequences for which tokens are sampled at once when sampling is timed, and size of the vocabulary."""


def stored() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verl_memopt" / "machine.json"


def rates_of_machine(device: str) -> Rates | None:
    try:
        figures = parse_json(read_record(stored(), follow=True), dict[str, Any])
        return checked(figures.get("rates"), Rates) if figures.get("device") == device else None
    except (OSError, RecordError):
        return None


def store(rates: Rates, device: str) -> Path:
    file = stored()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"device": device, "rates": asdict(rates)}, indent=1) + "\n")
    return file


def measure(device: torch.device, seconds: float = 30, clock: Callable[[], float] = time.perf_counter) -> Rates:
    """Measure the rates of a device.

    A CPU has no bus between host and device, so the rate of copies within its memory is used for it.

    Args:
        device: The device.
        seconds: About how long the measurement may take.
        clock: Returns the time in seconds.
    """
    share = seconds / 7
    scale = 4 if is_gpu(device) else 1
    rows, side = (scale * size for size in SIDES)
    half, whole = (_products(device, dtype, rows, side, side, share, clock) for dtype in (torch.bfloat16, torch.float32))
    narrow = _products(device, torch.float32, SEQUENCES, SIDES[1], VOCABULARY, share, clock) / whole
    memory = _copies(torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=device), device, share, clock)
    on_host = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, pin_memory=is_gpu(device))
    bus = (_copies(on_host, device, share, clock) if is_gpu(device) else memory) / 2
    scores = torch.rand(SEQUENCES, VOCABULARY, device=device)
    sampled = scores.numel() * _repeated(lambda: torch.multinomial(scores.softmax(-1), 1), 1, device, share, clock)
    linear, one_row = torch.nn.Linear(64, 64, device=device).requires_grad_(False), torch.zeros(1, 64, device=device)
    call = 1 / (CALLS * _repeated(lambda: linear(one_row), CALLS, device, share, clock))
    # On a GPU, reading the weights from memory limits a narrow product, and `memory` already counts that.
    narrow = 1.0 if is_gpu(device) else min(narrow, 1.0)
    name = f"this machine's {name_of(device)}"
    return Rates(name, half, whole, memory, bus, sampled, narrow, call, is_measured=True)


def _products(
    device: torch.device, dtype: torch.dtype, rows: int, inner: int, columns: int, seconds: float, clock: Callable[[], float]
) -> float:
    left, right = (torch.rand(size, inner, device=device, dtype=dtype) for size in (rows, columns))
    return 2 * rows * inner * columns * _repeated(lambda: left @ right.T, 1, device, seconds, clock)


def _copies(source: Tensor, device: torch.device, seconds: float, clock: Callable[[], float]) -> float:
    # Return the bytes that copies read plus those that they write, per second.
    target = torch.empty_like(source, device=device, pin_memory=False)
    return 2 * source.numel() * _repeated(lambda: target.copy_(source, non_blocking=True), 1, device, seconds, clock)


def _repeated(work: Callable[[], Tensor], times: int, device: torch.device, seconds: float, clock: Callable[[], float]) -> float:
    # Return how often per second `times` calls run: the median of all repetitions except the first, which warms up.
    took: list[float] = []
    ends = clock() + seconds
    while clock() < ends or len(took) < 3:
        synchronize(device)
        began = clock()
        for _ in range(times):
            work()
        synchronize(device)
        took.append(max(clock() - began, 1e-9))
    return 1 / median(took[1:])


def lines(rates: Rates) -> str:
    return (
        f"{rates.name}\n"
        f"  matrix products      {rates.half_flops / 1e12:.3g} TFLOP/s in bfloat16, {rates.fp32_flops / 1e12:.3g} in fp32\n"
        f"  memory               {rates.memory_bytes / 1e9:.3g} GB/s read and written\n"
        f"  host to device       {rates.bus_bytes / 1e9:.3g} GB/s\n"
        f"  sampling             {rates.sampled / 1e6:.3g} million vocabulary entries per second\n"
        f"  a small operation    {rates.call_seconds * 1e6:.3g} us\n"
    )


def command(device: torch.device, seconds: float) -> str:
    rates = measure(device, seconds)
    return f"{lines(rates)}stored in {store(rates, device.type)}; verl-memopt fit uses these rates to estimate seconds\n"
