"""Linear layers by kernels of flash-linear-attention beside torch's own operators, on a GPU.

``python -m benchmarks.gpu.linear_layers``: milliseconds and bytes of the rule of one layer at the sizes of Qwen3.5, in bfloat16,
for a long row, prompts with their answers, and short rows; and how far results by kernels are from those of torch's operators.
Kernels are also measured with longer calls. Bytes are the allocator's peak above the inputs. Without a GPU a small shape is
computed once, to try the script. JSON lines with ``--json``. The kernels need fla-core.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import text_table
from benchmarks.gpu.environment import environment
from verl_memopt.distributed.device import max_memory_allocated, memory_allocated, name_of, reset_peak_memory, synchronize
from verl_memopt.model import delta_rule
from verl_memopt.model.delta_kernels import largest_difference, with_kernels
from verl_memopt.model.delta_rule import DeltaShape, gated_delta_rule
from verl_memopt.model.families import POLICY_KEY
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.state_chunks import TAIL, state_chunks

SHAPES = {"0.8B": DeltaShape(16, 16, 128, 128), "9B": DeltaShape(16, 32, 128, 128)}
PACKS = {
    "a row of 16,384": ((16_384, ()),),
    "2 prompts of 1,024, 8 answers of 1,024 each": ((1024, (1024,) * 8),) * 2,
    "64 rows of 256": ((256, ()),) * 64,
}
SMALL = {"tiny": DeltaShape(2, 4, 16, 16)}, {"a prompt of 70, answers of 3 and 130": ((70, (3, 130)),)}
ROUNDS = 10
LONGER = (1, 2, 4, 8)
"""How many times as many tokens a call of kernels has."""


def measured(shape: DeltaShape, groups: tuple[tuple[int, tuple[int, ...]], ...], device: torch.device) -> dict[str, Any]:
    """Return milliseconds of forward and of both, and the peak bytes above the inputs, of the rule of one layer."""
    layout = PrefixLayout.of(groups).map(lambda tensor: tensor.to(device))
    tokens, channels, heads = len(layout.stops), 2 * shape.keys + shape.values, shape.value_heads
    sizes = (tokens, channels), (tokens, heads), (tokens, heads), (channels, 1, TAIL + 1), (heads,), (heads,)
    qkv, b, a, *weights = inputs = [torch.randn(size, device=device).bfloat16().requires_grad_() for size in sizes]
    grad = torch.randn(tokens, shape.values, device=device).bfloat16()
    chunks, is_gpu = state_chunks(layout, None, shape.sizes(device)), device.type == "cuda"
    before, forward, both = memory_allocated(device) if is_gpu else 0, [], []
    for number in range(ROUNDS + 2 if is_gpu else 1):
        if number == 2:  # kernels are tuned in the first rounds, and this needs memory of its own
            reset_peak_memory(device)
        synchronize(device)
        start = time.perf_counter()
        out = gated_delta_rule(qkv, b, a, (weights[0], weights[1], weights[2]), chunks, shape)[0]
        synchronize(device)
        forward.append(time.perf_counter() - start)
        torch.autograd.grad(out, inputs, grad)
        synchronize(device)
        both.append(time.perf_counter() - start)
        del out
    return {
        "forward_ms": 1e3 * statistics.median(forward[-ROUNDS:]),
        "both_ms": 1e3 * statistics.median(both[-ROUNDS:]),
        "peak_bytes": max_memory_allocated(device) - before if is_gpu else None,
    }


def main() -> int:
    """Measure both forms, print a table, and say which kernels were used or why none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    is_gpu = torch.cuda.is_available()
    device, (shapes, packs) = torch.device("cuda", 0) if is_gpu else torch.device("cpu"), (SHAPES, PACKS) if is_gpu else SMALL
    records: list[dict[str, Any]] = []
    for name, plain in shapes.items():
        faster = with_kernels(plain, "auto", device, torch.bfloat16, POLICY_KEY)
        if faster.by_kernels is not None:
            print(f"{name}: largest difference {largest_difference(faster, device, torch.bfloat16):.2e}")
        for pack, groups in packs.items():
            records.append({"shape": name, "pack": pack, "form": "torch", **measured(plain, groups, device)})
            for times in LONGER if faster.by_kernels is not None else ():
                delta_rule.ELEMENTS[device.type] = times * 2**26
                form = f"kernels, calls of {faster.most_tokens(device):,}"
                records.append({"shape": name, "pack": pack, "form": form, **measured(faster, groups, device)})
            delta_rule.ELEMENTS.pop("cuda", None)
    rows = [
        [record["shape"], record["pack"], record["form"], f"{record['forward_ms']:,.1f}", f"{record['both_ms']:,.1f}",
         "-" if record["peak_bytes"] is None else f"{record['peak_bytes'] / 2**20:,.0f}"]
        for record in records
    ]  # fmt: skip
    print(name_of(device))
    print(text_table(("shape", "pack", "form", "forward, ms", "and backward, ms", "peak, MiB"), rows, left=(0, 1, 2)))
    if options.json:
        options.json.write_text("".join(json.dumps(record) + "\n" for record in (environment(), *records)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
