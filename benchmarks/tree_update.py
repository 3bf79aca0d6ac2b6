"""``python -m benchmarks.tree_update``: an update over conversations as a forest, against the turns as rows of their own.

Contestants compute the log-probs of the same sampled tokens, and the gradients of their sum, on a CPU in fp32, in one
micro-batch. Rows alone have each turn's whole context. With shared prompts, turns that have the same prompt compute it once. The
forest computes each token once. Their gradients must agree before anything is timed. Contestants take turns, and the seconds are
those of the processor, so that other work on the machine disturbs the ratios little.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.common import CPU, fake_process_group, load, processor, text_table
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
HEAD = ("shape", "contestant", "tokens", "sampled", "rounds", "GFLOP", "peak MiB", "seconds", "alone / own")


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


def beginning_alike(
    draw: random.Random, size: Talk, conversations: int = 8, turns: int = 3, common: int = 2000
) -> list[list[Turn]]:
    """Conversations over prompts of their own, which all begin with one system prompt of ``common`` tokens."""
    system, rows = ids(draw, common), []
    for _ in range(conversations):
        own = straight(draw, size, 1, turns)[0]
        rows.append([Turn([*system, *turn.prompt_ids], turn.output_ids) for turn in own])
    return rows


SHAPES: dict[str, tuple[Callable[..., list[list[Turn]]], Talk]] = {
    "8 conversations of 6 turns": (straight, Talk(128, 32, 24)),
    "the same, each turn forks": (thinking, Talk(128, 32, 24)),
    "16 turns, 4 answers, one goes on": (branching, Talk(128, 32, 24)),
    "8 prompts that begin alike, 3 turns": (beginning_alike, Talk(128, 32, 24)),
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


def lines_of(model: PolicyModel, shape: str, repeats: int) -> list[list[str]]:
    rows, size = SHAPES[shape]
    contestants = packs(rows(random.Random(0), size))
    found = {own: work_of(model, pack) for own, pack in contestants.items()}
    naive, *others = (gradients for _, gradients in found.values())
    assert all((other - naive).norm() <= 1e-4 * naive.norm() for other in others), shape
    timed: dict[str, list[float]] = {own: [] for own in contestants}
    for _ in range(repeats):
        for own, pack in contestants.items():
            began = time.process_time()
            update(model, pack)
            timed[own].append(time.process_time() - began)
    seconds = {own: median(some) for own, some in timed.items()}
    alone = seconds["rows alone"]
    return [[shape, own, *found[own][0], f"{seconds[own]:.2f}", f"{alone / seconds[own]:.2f}"] for own in contestants]


def work_of(model: PolicyModel, pack: Pack) -> tuple[list[str], Tensor]:
    """Return tokens, sampled tokens, rounds, GFLOP and peak MiB of an update, and its gradients."""
    with ByteTracker() as tracker:
        gradients = update(model, pack)
    flops = count(lambda: update(model, pack))  # type: ignore[arg-type, return-value]
    peak = tracker.peaks[DEVICE].bytes / MIB
    facts = f"{pack.input_ids.shape[1]:,}", f"{len(pack.row):,}", str(len(pack.layout.rounds))
    return [*facts, f"{flops / 1e9:.1f}", f"{peak:.0f}"], gradients


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tree_update", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="updates of each that are timed (default: 3)")
    parser.add_argument(
        "--checkpointing",
        nargs="+",
        choices=("on", "off"),
        default=["on", "off"],
        help="with blocks that are computed again in backward, without, or both (default: both)",
    )
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, fake_process_group():
        folder = make_tiny_model(Path(name) / "model", SHAPE)
        for choice in asked.checkpointing:
            settings = Model(path=str(folder), enable_gradient_checkpointing=choice == "on")
            mesh, use = training_mesh("cpu", 1, -1), ModelUse(recompute=choice == "on", trained=True)
            model = build_policy(settings, TrainedFsdp(dtype="fp32"), folder, mesh, CPU, use)
            materialize(model, folder, CPU)
            lines = [line for shape in SHAPES for line in lines_of(model, shape, asked.repeats)]
            print(f"gradient checkpointing {choice}\n\n{text_table(HEAD, lines, left=(0, 1), gaps=(2, 5, 8))}\n", flush=True)
    print(f"{processor()}, one thread, torch {torch.__version__}, load {load()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
