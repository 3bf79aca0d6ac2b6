"""Measures how a student of RLT scores in fp32, bf16, int8 and nf4: ranks, bytes and speed.

    python -m benchmarks.rlt_student [--questions 64] [--samples 16] [--layers 4] [--hidden 1024] [--vocabulary 151936]
                                     [--rows 4] [--think 96] [--solution 32] [--repeats 5] [--json FILE]

Three parts. ``toy``: the trained student and teacher of the toy task. Explanations that the teacher samples are scored in each
precision, and their order within each question is compared. ``shape``: random weights in the shape of Qwen3-0.6B with fewer
layers; bytes of the weights and peaks of a scoring pass. ``logits``: the same model in bf16, with logits in chunks and with whole
logits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.rlt_student.ranks import ranks
from benchmarks.rlt_student.shapes import chunked_against_whole, precisions, random_rows
from verl_memopt.distributed.device import join_process_group, leave_process_group
from verl_memopt.model.tiny import SHAPES, make_tiny_model
from verl_memopt.recipes.rlt.lessons import RltToyRecipe, RltWarmUp, make_rlt_toy


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its result as JSON."""
    options = _options(arguments)
    torch.set_num_threads(1)
    join_process_group(torch.device("cpu"), 0, 1, "127.0.0.1", 0, 60)
    try:
        with TemporaryDirectory() as folder:
            result = _measure(Path(folder), options)
    finally:
        leave_process_group()
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0


def _measure(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    warm_up = RltWarmUp(steps=options.warm_up)
    toy = make_rlt_toy(folder / "toy", 0, RltToyRecipe(student=warm_up, teacher=warm_up))
    heads = options.hidden // 64
    shape = replace(
        SHAPES["qwen3-0.6b"],
        num_layers=options.layers,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_heads=heads,
        num_kv_heads=max(heads // 2, 1),
        vocab_size=options.vocabulary,
    )
    model = make_tiny_model(folder / "shape", shape)
    rows = random_rows(options.rows, 4, options.think, options.solution, min(options.vocabulary, 320))
    fewer = rows.select(range(min(2 * options.rows, rows.num_rows)))
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "arguments": {name: value for name, value in vars(options).items() if name != "json"},
        "toy": ranks(toy, options.questions, options.samples),
        "shape": precisions(model, rows, 4),
        "logits": chunked_against_whole(model, fewer, options.repeats),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rlt_student")
    for name, default in (
        ("questions", 64), ("samples", 16), ("layers", 4), ("hidden", 1024), ("vocabulary", 151_936), ("rows", 4), ("think", 96),
        ("solution", 32), ("repeats", 5), ("warm-up", 300),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
