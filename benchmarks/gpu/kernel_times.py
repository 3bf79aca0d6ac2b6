"""Times of this project's GPU kernels beside the compiled statements whose places they take.

``python -m benchmarks.gpu.kernel_times``: medians in microseconds at the sizes of one block of Qwen3-0.6B, with the bytes that a
kernel must move as a share of what the device moves. Needs a GPU. Writes a table, and JSON lines with ``--json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from benchmarks.common import text_table
from benchmarks.gpu_cost.device import kernel_bytes
from verl_memopt.memory.fused import compiled_for_width, fused_statements
from verl_memopt.memory.kernels import KERNELS
from verl_memopt.memory.logit_tiles import product_gradient_, product_statistics
from verl_memopt.memory.recompute_elementwise_torch import (
    _gate,
    _gate_gradient,
    _gate_gradient_and_value,
    _norm,
    _norm_gradient_plus,
    _norm_of_sum,
    norm_gradient,
)
from verl_memopt.model.attention_fused import _merge_statement
from verl_memopt.model.rotary import (
    _backward_statement,
    _both_back_statement,
    _both_statement,
    _forward_statement,
)

EPS, INVERSE = 1e-6, 0.7
ROUNDS = 30

Call: TypeAlias = tuple[Callable[..., None], Sequence[Tensor | None], Sequence[Any]]
"""A statement, its tensors, and its other arguments."""


def calls(
    rows: int, width: int, heads: tuple[int, int, int], vocabulary: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Call]:
    """Return calls of every statement that has a kernel, over random values. ``heads``: of queries, of keys, and their size.

    Gate and up, and queries, keys and values, are columns of one tensor, as they are after a product of joined weights.
    """
    generator = torch.Generator(device).manual_seed(0)
    queries, keys, size = heads

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def of(*shape: int) -> Tensor:
        return drawn(rows, *shape)

    def gates() -> tuple[Tensor, Tensor]:
        gate, up = of(2 * width).chunk(2, 1)
        return gate, up

    def together() -> Sequence[Tensor]:
        return of(queries + 2 * keys, size).split([queries, keys, keys], 1)

    def lse() -> Tensor:
        return drawn(queries, rows, dtype=torch.float32).t()

    def each() -> Tensor:
        return drawn(rows, dtype=torch.float32)

    def statistics_of(columns: int) -> Tensor:
        return drawn(rows, columns, dtype=torch.float32)

    def sums(length: int) -> Tensor:
        return torch.ones(length, device=device)

    weight, query_weight, key_weight = drawn(width), drawn(size), drawn(size)
    (q, k, v), (q2, k2, _), (q3, k3, _) = together(), together(), together()
    x, total, gate, merged, merged_lse = of(width), of(width), gates(), of(queries, size), lse()
    # Some targets are in other tiles of the vocabulary.
    targets = torch.randint(-vocabulary // 4, vocabulary + vocabulary // 4, (rows,), generator=generator, device=device)
    both_grads = of(queries, size), of(keys, size)
    return {
        "norm": (_norm, (of(width), of(width)), (weight, EPS)),
        "norm by 1 + w": (_norm, (of(width), of(width)), (weight.float() + 1, EPS)),
        "norm in place": (_norm, (x, x), (weight, EPS)),
        "norm of a sum": (_norm_of_sum, (of(width), total, total, of(width)), (weight, EPS)),
        "norm gradient": (norm_gradient, (of(width), of(width), of(width)), (weight, EPS, None)),
        "norm gradient and sum": (norm_gradient, (of(width), of(width), of(width)), (weight, EPS, sums(width))),
        "norm gradient and rounded sum": (
            _norm_gradient_plus, (of(width), of(width), of(width), of(width)), (weight, EPS, sums(width).to(dtype)),
        ),
        "gate": (_gate, (*gate, gate[0]), ()),
        "gate gradient": (_gate_gradient, (of(width), *gates(), of(width), of(width)), ()),
        "gate gradient and value": (_gate_gradient_and_value, (of(width), *gates()), ()),
        "rotary": (_forward_statement, (q, of(size), of(size), of(queries, size)), (None, EPS)),
        "rotary and norm": (_forward_statement, (q, of(size), of(size), of(queries, size)), (query_weight, EPS)),
        "rotary and norm by 1 + w": (
            _forward_statement, (q, of(size), of(size), of(queries, size)), (query_weight.float() + 1, EPS),
        ),
        "rotary of both": (
            _both_statement, (q, k, of(size), of(size), of(queries, size), of(keys, size)), (None, None, EPS),
        ),
        "rotary and norm of both": (
            _both_statement, (q, k, of(size), of(size), of(queries, size), of(keys, size)), (query_weight, key_weight, EPS),
        ),
        "rotary gradient": (
            _backward_statement, (of(queries, size), None, of(size), of(size), of(queries, size)), (None, EPS, None),
        ),
        "rotary and norm gradient": (
            _backward_statement, (of(queries, size), q2, of(size), of(size), q2), (query_weight, EPS, sums(size)),
        ),
        "rotary gradient of both": (
            _both_back_statement, (*both_grads, q3, k3, of(size), of(size), None, None), (None, None, EPS, None, None),
        ),
        "rotary and norm gradient of all": (
            _both_back_statement, (*both_grads, q, k, of(size), of(size), of(keys, size), v),
            (query_weight, key_weight, EPS, sums(size), sums(size)),
        ),
        "rotary and norm gradient, one sum": (
            _both_back_statement, (*both_grads, q2, k2, of(size), of(size), None, None),
            (query_weight, key_weight, EPS, None, sums(size)),
        ),
        "merge": (_merge_statement, (merged, merged_lse, of(queries, size), lse(), merged, merged_lse), ()),
        "statistics of logits": (product_statistics, (of(vocabulary), targets, statistics_of(3), statistics_of(3)), (INVERSE,)),
        "and entropy": (product_statistics, (of(vocabulary), targets, statistics_of(4), statistics_of(4)), (INVERSE,)),
        "gradient of logits": (
            product_gradient_, (of(vocabulary), targets, statistics_of(1), each(), None, None), (INVERSE,),
        ),
        "gradient of logits and entropy": (
            product_gradient_, (of(vocabulary), targets, statistics_of(4)[:, :2], each(), each(), each()), (INVERSE,),
        ),
    }  # fmt: skip


def microseconds(run: Callable[[], Any]) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def measured(name: str, call: Call) -> dict[str, Any]:
    statement, tensors, others = call
    kernel = KERNELS[statement]
    runs = kernel.fits(tensors, others) and kernel.run(tensors, others)
    moved = sum(read + written for read, written in kernel_bytes(kernel, tensors, others))
    record = {"name": name, "runs": runs, "kernel_us": None, "compiled_us": None, "moved_bytes": moved}
    if runs:
        record["kernel_us"] = microseconds(lambda: kernel.run(tensors, others))
    # A compiled statement may not sum over rows that it overwrites; what it would compute then is timed, not checked.
    detached = [None if tensor is None else tensor.detach() for tensor in tensors]
    try:
        record["compiled_us"] = microseconds(lambda: compiled_for_width(statement, detached, others))
    except RuntimeError as error:
        record["error"] = str(error).splitlines()[0]
    return record


def render(records: Sequence[dict[str, Any]]) -> str:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f}"

    rows = [
        [record["name"], shown(record["kernel_us"]), shown(record["compiled_us"]),
         "-" if record["kernel_us"] is None else f"{record['moved_bytes'] / record['kernel_us'] / 1e3:,.0f}"]
        for record in records
    ]  # fmt: skip
    return text_table(("statement", "kernel, us", "compiled, us", "GB/s of the kernel"), rows)


def main() -> int:
    """Measure every kernel, or say that there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernel_times: no CUDA device is visible, so nothing was measured")
        return 0
    device, records = torch.device("cuda", 0), []
    with fused_statements(True):
        for name, call in calls(options.rows, 1024, (16, 8, 128), 1024, torch.bfloat16, device).items():
            if call[0] not in (product_statistics, product_gradient_):
                records.append(measured(name, call))
        for name, call in calls(2048, 64, (2, 1, 64), 151936, torch.bfloat16, device).items():
            if call[0] in (product_statistics, product_gradient_):
                records.append(measured(name, call))
    print(render(records))
    if options.json:
        options.json.write_text("".join(json.dumps(record) + "\n" for record in records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
