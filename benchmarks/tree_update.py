"""``python -m benchmarks.tree_update``: an update over conversations as a forest, against the turns as rows of their own.

Contestants compute the log-probs of the same sampled tokens, and the gradients of their sum, on a CPU in fp32, in one
micro-batch with checkpointed blocks. Rows alone have each turn's whole context. With shared prompts, turns that have the same
prompt compute it once. The forest computes each token once. Their gradients must agree before anything is timed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.common import CPU, fake_process_group, load, processor, seconds_of, text_table
from benchmarks.update_pass.flops import count
from verl_memopt.config.schema import Model, TrainedFsdp
from verl_memopt.distributed.device import training_mesh
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.forest import Turn, build_forest
from verl_memopt.model.packed_model import PolicyModel
from verl_memopt.model.packing import Pack, pack_forest, pack_groups, pack_rows
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker

SHAPE = TinyShape(hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32)
MIB = 2**20
HEAD = ("shape", "contestant", "tokens", "sampled", "rounds", "GFLOP", "peak MiB", "seconds")


@dataclass(frozen=True)
class Talk:
    """Sizes of conversations: tokens of the prompt, of an answer, and of what a tool adds after it."""

    prompt: int
    answer: int
    tool: int


def straight(draw: random.Random, size: Talk, conversations: int = 8, turns: int = 6) -> list[list[Turn]]:
    """Conversations over one prompt, of which each turn goes on where the last one ended."""
    prompt, rows = ids(draw, size.prompt), []
    for _ in range(conversations):
        seen, row = list(prompt), []
        for _ in range(turns):
            row.append(Turn(seen, ids(draw, size.answer)))
            seen = [*seen, *row[-1].output_ids, *ids(draw, size.tool)]
        rows.append(row)
    return rows


def thinking(draw: random.Random, size: Talk, conversations: int = 8, turns: int = 6) -> list[list[Turn]]:
    """Conversations whose next prompt drops all of an answer but its last quarter, so that each turn forks."""
    rows = straight(draw, size, conversations, turns)
    for row in rows:
        seen = list(row[0].prompt_ids)
        for place, turn in enumerate(row):
            row[place] = Turn(seen, turn.output_ids)
            seen = [*seen, *turn.output_ids[-(size.answer // 4) :], *ids(draw, size.tool)]
    return rows


def branching(draw: random.Random, size: Talk, turns: int = 16, answers: int = 4) -> list[list[Turn]]:
    """Turns of several answers each, of which one goes on."""
    seen, rows = ids(draw, size.prompt), []
    for _ in range(turns):
        rows += [[Turn(seen, ids(draw, size.answer))] for _ in range(answers)]
        seen = [*seen, *rows[-1][0].output_ids, *ids(draw, size.tool)]
    return rows


SHAPES: dict[str, tuple[Callable[..., list[list[Turn]]], Talk]] = {
    "8 conversations of 6 turns": (straight, Talk(128, 32, 24)),
    "the same, each turn forks": (thinking, Talk(128, 32, 24)),
    "16 turns, 4 answers, one goes on": (branching, Talk(128, 32, 24)),
}


def ids(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(SHAPE.vocab_size) for _ in range(length)]


def packs(rows: Sequence[Sequence[Turn]]) -> dict[str, Pack]:
    turns = [turn for row in rows for turn in row]
    prompts, outputs = ([turn[part] for turn in turns] for part in (0, 1))
    numbers: dict[tuple[int, ...], int] = {}
    groups = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
    given = flat(prompts), [*map(len, prompts)], flat(outputs), [*map(len, outputs)]
    forest = build_forest(rows)
    lengths = [sum(len(turn.output_ids) for turn in row) for row in rows]
    found = {"rows alone": pack_rows(*given), "shared prompts": pack_groups(*given, groups)}
    return found | {"forest": pack_forest(forest.tokens, forest.sizes, forest.parent, forest.place, lengths)}


def flat(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([token for row in rows for token in row], dtype=torch.int64)


def update(model: PolicyModel, pack: Pack) -> Tensor:
    model.zero_grad()
    log_probs, _ = model(pack)
    log_probs.mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def line(model: PolicyModel, pack: Pack, repeats: int) -> list[str]:
    with ByteTracker() as tracker:
        update(model, pack)
    flops = count(lambda: update(model, pack))  # type: ignore[arg-type, return-value]
    seconds = median(seconds_of(lambda: update(model, pack)) for _ in range(repeats))
    peak = tracker.peaks[DEVICE].bytes / MIB
    facts = f"{pack.input_ids.shape[1]:,}", f"{len(pack.row):,}", str(len(pack.layout.rounds))
    return [*facts, f"{flops / 1e9:.1f}", f"{peak:.0f}", f"{seconds:.2f}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tree_update", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="updates of each that are timed (default: 3)")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines = []
    with tempfile.TemporaryDirectory() as name, fake_process_group():
        folder = make_tiny_model(Path(name) / "model", SHAPE)
        settings = Model(path=str(folder), enable_gradient_checkpointing=True)
        mesh, use = training_mesh("cpu", 1, -1), ModelUse(recompute=True, trained=True)
        model = build_policy(settings, TrainedFsdp(dtype="fp32"), folder, mesh, CPU, use)
        materialize(model, folder, CPU)
        for shape, (rows, size) in SHAPES.items():
            contestants = packs(rows(random.Random(0), size))
            naive, *others = (update(model, pack) for pack in contestants.values())
            assert all((other - naive).norm() <= 1e-4 * naive.norm() for other in others), shape
            lines += [[shape, own, *line(model, pack, asked.repeats)] for own, pack in contestants.items()]
    print(text_table(HEAD, lines, left=(0, 1), gaps=(2, 5)))
    print(f"\n{processor()}, one thread, torch {torch.__version__}, load {load()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
