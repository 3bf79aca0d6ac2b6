"""How many operations a second a device can do: what its maker says, and what a large product reaches on it."""

from __future__ import annotations

import statistics
import time

import torch

from verl_memopt.distributed import device as device_room

TERA = 1e12

PEAKS = {
    "H100 PCIe": {"bfloat16": 756.0, "tf32": 378.0, "fp32": 51.0},
    "H100 NVL": {"bfloat16": 835.0, "tf32": 417.5, "fp32": 60.0},
    "H100": {"bfloat16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H200": {"bfloat16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "A100": {"bfloat16": 312.0, "tf32": 156.0, "fp32": 19.5},
    "L40S": {"bfloat16": 362.0, "tf32": 183.0, "fp32": 91.6},
    "RTX 5090": {"bfloat16": 209.5, "tf32": 104.8, "fp32": 104.8},
    "RTX 4090": {"bfloat16": 165.2, "tf32": 82.6, "fp32": 82.6},
    "RTX 3090": {"bfloat16": 71.0, "tf32": 35.6, "fp32": 35.6},
}
"""Dense TFLOP/s, half precision with fp32 accumulation. NVIDIA's data sheets of H100, H200, A100 and L40S, which give twice as
much for sparse products, and its architecture papers of Ampere GA102, Ada and RTX Blackwell. The first name that a device's
contains counts."""


def stated_peak(device_name: str, dtype: str) -> float | None:
    """Gives the FLOP/s that the maker states for a device; None for one that is not listed."""
    words = set(device_name.replace("-", " ").split())
    found = next((peaks for name, peaks in PEAKS.items() if set(name.split()) <= words), None)
    return None if found is None or dtype not in found else found[dtype] * TERA


def measured_peak(device: torch.device, dtype: torch.dtype, size: int | None = None, repeats: int = 10) -> float:
    """Gives the FLOP/s that a product of two square matrices reaches; size: 8,192 on a GPU, 512 on a CPU."""
    size = size or (8192 if device_room.is_gpu(device) else 512)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(repeats + 2):  # the first choose a kernel and raise the clock
        device_room.synchronize(device)
        started = time.perf_counter()
        left @ right
        device_room.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(seconds[2:])
