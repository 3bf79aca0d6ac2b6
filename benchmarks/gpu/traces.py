"""What a profiled call did: its kernels on a GPU, with their times and, by their names, what each does.

On a CPU, where there are no kernels, operations stand for them, with their own times.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from verl_memopt.distributed import device as device_room

PRODUCTS, ATTENTION, ELEMENTWISE, REDUCTIONS = "products", "attention", "elementwise", "reductions"
TO_DEVICE, TO_HOST, ON_DEVICE = "copies H2D", "copies D2H", "copies D2D"
OPTIMIZER, INDEXING, COLLECTIVES, OTHER = "optimizer", "indexing", "collectives", "other"

GROUPS = (
    PRODUCTS, ATTENTION, ELEMENTWISE, REDUCTIONS, ON_DEVICE, TO_DEVICE, TO_HOST, OPTIMIZER, INDEXING, COLLECTIVES, OTHER,
)  # fmt: skip
"""In the order of the table."""

KERNELS = (
    (TO_DEVICE, r"^memcpy htod"),
    (TO_HOST, r"^memcpy dtoh"),
    (ON_DEVICE, r"^memcpy|direct_copy_kernel|bfloat16_copy_kernel|float16_copy_kernel|catarraybatchedcopy|split_with_sizes"),
    (COLLECTIVES, r"^nccl"),
    # Before products: attention of Cutlass, cuDNN and flash-attn is built of them.
    (ATTENTION, r"flash|fmha|sdpa|attention|attn"),
    # Norms of many tensors at once are sums, whatever the optimizer does beside them.
    (REDUCTIONS, r"lpnorm"),
    (OPTIMIZER, r"multi_tensor_apply|multitensorapply|adam|_sgd|foreach"),
    (PRODUCTS, r"gemm|gemv|nvjet|xmma|cutlass|cublas|splitkreduce|triton_(tem|mm|bmm)|dot_kernel|wgmma|_mm_"),
    # Before elementwise: an index kernel is one in its outer name.
    (INDEXING, r"index|gather|scatter|embedding|radixsort|sort|nonzero|deviceselect|masked_select|compute_grad_weight|bitonic"),
    (REDUCTIONS, r"reduce|softmax|logsumexp|triton_(red|per)_|layer_?norm|rms_?norm|scan|cumsum|argmax|topk"),
    (ELEMENTWISE, r"elementwise|triton_poi_|triton_for_|pointwise|fillfunctor|arange|distribution|dropout"),
)
"""Of a GPU, by lower-case name; the first that fits."""

OPERATIONS = (
    (OPTIMIZER, r"adam|_foreach|_fused_"),
    (ATTENTION, r"attention"),
    (PRODUCTS, r"::(mm|addmm|bmm|baddbmm|mv|addmv|dot)_?$|mkldnn_linear"),
    (COLLECTIVES, r"c10d|gloo|nccl"),
    (INDEXING, r"index|gather|scatter|embedding|sort|nonzero|masked_select|::select$|where"),
    (REDUCTIONS, r"sum|mean|softmax|norm|amax|amin|::max$|::min$|argmax|cumsum|::any$|::all$"),
    (ON_DEVICE, r"copy|clone|contiguous|::cat$|::stack$|::to$|repeat_interleave|constant_pad"),
    (
        ELEMENTWISE,
        r"::(add|sub|rsub|mul|div|neg|exp|log|sqrt|rsqrt|pow|square|sigmoid|silu|tanh|fill|zero|clamp|maximum|minimum|lerp|"
        r"addcmul|addcdiv|cos|sin|abs|eq|ne|ge|gt|le|lt|logical_\w+|bitwise_\w+|masked_fill|triu|tril|reciprocal|"
        r"threshold|isfinite|isnan|logaddexp|silu_backward|sigmoid_backward|ones_like|zeros|ones|full|arange|randint)_?$",
    ),
)
"""Of a CPU, by the operation's name. What only calls others, as matmul does, is ``other``."""


def kernel_group(name: str) -> str:
    return _first(KERNELS, name.lower())


def operation_group(name: str) -> str:
    return _first(OPERATIONS, name.lower())


def _first(rules: tuple[tuple[str, str], ...], name: str) -> str:
    return next((group for group, pattern in rules if re.search(pattern, name)), OTHER)


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
    launches: int
    seconds: float


def profiled(call: Callable[[], Any], device: torch.device) -> list[Launch]:
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
    names: dict[str, Launch] = {}
    for launch in found:
        before = names.get(launch.name)
        calls, seconds = (0, 0.0) if before is None else (before.calls, before.seconds)
        names[launch.name] = Launch(launch.name, launch.group, seconds + launch.seconds, calls=calls + launch.calls)
    return sorted(names.values(), key=lambda launch: -launch.seconds)[:count]
