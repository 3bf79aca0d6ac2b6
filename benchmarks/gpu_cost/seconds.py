"""``python -m benchmarks.gpu_cost.seconds``: predicted seconds of an update on a card. Nothing here is measured.

An update is counted (``update.py``) with two small numbers of layers. Its steps are scaled to the layers of the model and
simulated (``schedule.py``). Not modelled: the memory allocator, clock rates, copies and kernels that share the memory's
bandwidth, and a host that other work disturbs. Whether the update fits on the card is not asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import commit, text_table, write_json
from benchmarks.gpu.profile_update import PEAKS, TERA
from benchmarks.gpu.reach_cases import SHAPES
from benchmarks.gpu_cost.schedule import Launch, Machine, Outcome, deepened, simulate
from benchmarks.gpu_cost.update import Case, Update, count
from recipe.rloo.memory_study.fake_guard import call_in_fake_process

# Rates of kernels and of the bus: the seconds of each kind of kernel, and of copies, in both updates that
# docs/evidence/2026-11-26-gpu-h100/profile has, over what is counted for these updates. The host's seconds for a call and for an
# event are chosen so that both updates take what they took within 15 %. A launch, a replay and its gaps are stated.
H100 = Machine(
    peak=PEAKS["H100"]["bfloat16"] * TERA,
    bandwidth=3.35e12,
    bus=53e9,
    product_fraction=0.72,
    attention_fraction=0.24,
    bandwidth_fraction=0.59,
    call_seconds=3e-6,
    launch_seconds=6e-6,
    event_seconds=30e-6,
    least_seconds=2e-6,
    copy_seconds=3e-6,
)
MACHINES = {
    "H100": H100,
    # The same host and bus. Assumed: attention kernels, which were written for Ampere, reach a larger part of its smaller peak.
    "RTX 5090": dataclasses.replace(H100, peak=PEAKS["RTX 5090"]["bfloat16"] * TERA, bandwidth=1.792e12, attention_fraction=0.6),
}
PROFILES: dict[str, tuple[int | None, tuple[str, ...]]] = {
    "default": (16_384, ()),
    "24g": (None, ("memory=24g",)),
    "constrained": (None, ("memory=constrained",)),
}
"""Tokens of a micro-batch (None = those of the profile) and settings, as ``benchmarks.gpu.profile_update`` has them."""
COUNTED_LAYERS = (3, 5)
GRAPHS = "actor_rollout_ref.actor.fsdp_config.cuda_graphs=true"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_cost.seconds", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--profiles", nargs="+", choices=sorted(PROFILES), default=list(PROFILES))
    parser.add_argument("--cards", nargs="+", choices=sorted(MACHINES), default=list(MACHINES))
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt (default: 1024)")
    parser.add_argument("--response", type=int, default=1024, help="tokens of an answer (default: 1024)")
    parser.add_argument("--groups", type=int, default=2, help="prompts (default: 2)")
    parser.add_argument("--group", type=int, default=8, help="answers to each (default: 8)")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("overrides", nargs="*", help="settings of every profile")
    asked, records = parser.parse_args(argv), list[dict[str, Any]]()
    for model in asked.models:
        for profile in asked.profiles:
            budget, settings = PROFILES[profile]
            case = Case(
                SHAPES[model], asked.prompt, asked.response, asked.group, asked.groups, budget, off_policy=True,
                overrides=(*settings, *asked.overrides),
            )  # fmt: skip
            found = call_in_fake_process("benchmarks.gpu_cost.seconds:predicted", case, asked.cards)
            records += [{"model": model, "profile": profile, **each} for each in found]
            if asked.json is not None:
                write_json(asked.json, {"schema": 1, "predicted": True, "commit": commit(), "updates": records})
    print(render(records))
    return 0


def predicted(case: Case, cards: Sequence[str]) -> list[dict[str, Any]]:
    """Return a record for each card, without and with CUDA graphs. In a process that has the fake device."""
    wanted = case.shape.num_layers
    layers = min(wanted, COUNTED_LAYERS[0]), min(wanted, COUNTED_LAYERS[1])

    def counted(*further: str) -> tuple[Update, Update]:
        few, many = (dataclasses.replace(case.shape, num_layers=each) for each in layers)
        asked = dataclasses.replace(case, overrides=(*case.overrides, *further))
        return count(dataclasses.replace(asked, shape=few)), count(dataclasses.replace(asked, shape=many))

    plain, graphs = counted(), counted(GRAPHS)
    return [record_of(plain, graphs, layers, wanted, card) for card in cards]


def record_of(
    plain: tuple[Update, Update], graphs: tuple[Update, Update], layers: tuple[int, int], wanted: int, card: str
) -> dict[str, Any]:
    machine, (few, many) = MACHINES[card], plain
    a_layer = (many.counted.recomputed_flops - few.counted.recomputed_flops) / max(layers[1] - layers[0], 1)
    recomputed = many.counted.recomputed_flops + (wanted - layers[1]) * a_layer
    counts = [sum(len(step.kernels) for step in each.counted.steps if isinstance(step, Launch)) for each in (few, many)]
    launches = counts[1] + (wanted - layers[1]) * (counts[1] - counts[0]) / max(layers[1] - layers[0], 1)
    outcomes = {
        name: simulate(deepened(less.counted.steps, more.counted.steps, layers, wanted, machine), machine)
        for name, (less, more) in (("plain", plain), ("graphs", graphs))
    }
    model_flops = outcomes["plain"].flops - recomputed
    return {
        "card": card, "micro_batches": many.micro_batches, "tokens": many.tokens, "launches": round(launches),
        **{name: figures(outcome, model_flops, machine.peak) for name, outcome in outcomes.items()},
    }  # fmt: skip


def figures(found: Outcome, model_flops: float, peak: float) -> dict[str, Any]:
    """Return seconds, shares, and what bounds each phase: what its computing stream spends most time with."""
    return {
        "seconds": found.wall, "kernels": found.kernels, "copies": found.copies, "bare_copies": found.bare_copies,
        "host": found.host, "busy": found.kernels / found.wall,
        "mfu": model_flops / found.wall / peak, "by_kind": dict(found.by_kind), "bound_by": found.bound(),
        "phases": {phase: dict(split) for phase, split in found.phases.items()},
    }  # fmt: skip


def render(records: Sequence[dict[str, Any]]) -> str:
    heads = ["card", "model", "profile", "micro-\nbatches"]
    for name in ("", "graphs\n"):
        heads += [f"{name}{what}" if name else what for what in ("s", "busy %", "MFU %", "bound by")]
    heads += ["copies\nms", "bare\nms", "launches"]
    rows = []
    for record in sorted(records, key=lambda each: list(MACHINES).index(each["card"])):
        cells = [record["card"], record["model"], record["profile"], str(record["micro_batches"])]
        for name in ("plain", "graphs"):
            found = record[name]
            cells += [
                f"{found['seconds']:.2f}", f"{100 * found['busy']:.0f}", f"{100 * found['mfu']:.0f}", found["bound_by"],
            ]  # fmt: skip
        plain = record["plain"]
        cells += [f"{1e3 * plain['copies']:.0f}", f"{1e3 * (plain['bare_copies']):.0f}", f"{record['launches']:,}"]
        rows.append(cells)
    note = f"Predicted, not measured. `graphs`: with {GRAPHS}; blocks that are not captured then run as without it."
    return "\n".join([text_table(heads, rows, left=(0, 1, 2)), note])


if __name__ == "__main__":
    sys.exit(main())
