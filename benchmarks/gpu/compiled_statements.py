"""``python -m benchmarks.gpu.compiled_statements``: elementwise statements in tiles and compiled, for any width and for one.

Prints median milliseconds of a call between two waits for the device, beside the time that the device needs to move the bytes (at
3 TB/s). Where the bytes take less time than a launch, the figure is the host's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.common import seconds_of
from verl_memopt.distributed.device import local_device, resolve_device
from verl_memopt.memory import fused
from verl_memopt.memory import recompute_elementwise_torch as ops
from verl_memopt.model import rotary

BYTES_PER_SECOND = 3e12


def main(argv: Sequence[str] | None = None) -> None:
    """Times all statements at the widths of Qwen3-0.6B."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.compiled_statements", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=30)
    asked = parser.parse_args(argv)
    device = local_device(resolve_device(asked.device), 0)
    print(f"{'statement':12s} {'bytes moved':>12s} {'tiles':>8s} {'any width':>10s} {'its width':>10s}  (ms)")
    for name, statement, tensors, others, moved in cases(asked.tokens, device):
        any_width = torch.compile(statement, dynamic=True)
        calls: tuple[Callable[[], Any], ...] = (
            lambda s=statement, t=tensors, o=others: fused.over_rows(s, t, *o),
            lambda s=any_width, t=tensors, o=others: s(*t, *o),
            lambda s=statement, t=tensors, o=others: fused.compiled_for_width(s, t, o),
        )
        floor = moved * sum(tensor.nbytes for tensor in tensors) / len(tensors) / BYTES_PER_SECOND * 1e3
        in_tiles, dynamic, static = (milliseconds(call, device, asked.repeats) for call in calls)
        print(f"{name:12s} {floor:12.3f} {in_tiles:8.3f} {dynamic:10.3f} {static:10.3f}", flush=True)


def cases(tokens: int, device: torch.device) -> list[tuple[str, Callable[..., None], list[torch.Tensor], tuple[Any, ...], int]]:
    """Gives name, statement, tensors with rows, further arguments, and how many tensors of rows are read or written."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    x, grad, out, weight = drawn(tokens, 1024), drawn(tokens, 1024), drawn(tokens, 1024), drawn(1024)
    sums = torch.zeros(1024, device=device)
    heads, above, turned, scale = drawn(tokens, 16, 128), drawn(tokens, 16, 128), drawn(tokens, 16, 128), drawn(128)
    cos, sin = drawn(tokens, 128), drawn(tokens, 128)
    gate, up, gated = drawn(tokens, 3072), drawn(tokens, 3072), drawn(tokens, 3072)
    return [
        ("norm", ops._norm, [x, out], (weight, 1e-6), 2),
        ("norm weight", ops.norm_weight_gradient, [grad, x], (1e-6, sums), 2),
        ("norm grad", ops.norm_gradient, [grad, x, out], (weight, 1e-6, None), 3),
        ("rotary", rotary._forward_statement, [heads, cos, sin, turned], (scale, 1e-6), 4),
        ("rotary grad", rotary._backward_statement, [above, heads, cos, sin, turned], (scale, 1e-6, None), 5),
        ("gate", ops._gate, [gate, up, gated], (), 3),
        ("gate grad", ops._gate_gradient, [gated, gate, up, gate, up], (), 5),
    ]


def milliseconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Gives the median milliseconds of a call, after five that are not counted."""
    for _ in range(5):
        call()
    return 1e3 * statistics.median(seconds_of(call, device) for _ in range(repeats))


if __name__ == "__main__":
    main()
