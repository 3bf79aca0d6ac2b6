"""``python -m benchmarks.ranks``: what each of 1 to 512 ranks holds and sends in a step, and how fast the driver cuts the rows.

Peaks are those of ``verl-memopt fit``. Bytes over the wire follow from the micro-batches that the driver's code cuts. Both are
predicted; ``--check`` prints them beside the real step of the first of 8 ranks, on fake tensors and a fake process group. The
driver's seconds are measured on this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import processor, text_table
from benchmarks.gpu.reach_cases import SHAPES, size_of
from benchmarks.gpu_cost.one_copy import settings_of
from benchmarks.gpu_cost.update import Case
from recipe.rloo.memory_study.fake_guard import call_in_fake_process
from verl_memopt.config.loader import load_settings
from verl_memopt.config.schema import Settings
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.memory.fit import Sizes, predict
from verl_memopt.memory.formulas import PUBLISHED, ModelSize
from verl_memopt.memory.knob import num_devices
from verl_memopt.observe.phase import GIB
from verl_memopt.trainer.fit import phases_of
from verl_memopt.trainer.micro_batching import budgets, cut_ranks, rows_per_rank

RANKS, A_NODE, CHECKED = (1, 2, 4, 8, 64, 512), 8, 8
# Qwen3-8B, and the sizes of Llama 3.1 70B.
MODELS = {"8B": PUBLISHED["Qwen/Qwen3-8B"], "70B": ModelSize(8192, 28_672, 80, 64, 8, 128, 128_256, False)}
GROUPS, GROUP, PROMPT, RESPONSE, KV_GIB = 512, 8, 1024, 2048, 8
FLOPS = 400e12  # of a device each second: stated, not measured
ROWS, UPDATE, OLD, REFERENCE = (4_096, 12_288, 102_400), 0, 1, 2
NOTHING = ("data.train_files=none", "data.val_files=null", "actor_rollout_ref.model.path=none")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PROFILE = ("memory=large_multi_gpu", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.old_log_prob_pass=always")
PHASES = ("old_log_prob", "ref", "update_actor", "update_weights")


def settings(name: str, ranks: int) -> Settings:
    """Return the settings of a run of RLOO with a reference. Only the engine of the larger model is tensor parallel."""
    nodes, on_one = max(ranks // A_NODE, 1), min(ranks, A_NODE)
    engine = [f"{ROLLOUT}.tensor_model_parallel_size={on_one if name == '70B' else 1}", f"{ROLLOUT}.kv_cache_memory_gb={KV_GIB}"]
    lengths = [f"data.max_prompt_length={PROMPT}", f"data.max_response_length={RESPONSE}", f"data.train_batch_size={GROUPS}"]
    devices = [f"trainer.n_gpus_per_node={on_one}", f"trainer.nnodes={nodes}", "trainer.device=cuda", *NOTHING]
    batch = [f"{ACTOR}.ppo_mini_batch_size={GROUPS}", f"{ROLLOUT}.n={GROUP}"]
    return load_settings("rloo_trainer", [*PROFILE, *engine, *lengths, *devices, *batch])


def rows(count: int, ragged: bool) -> RolloutBatch:
    """Return groups of rows: all of the longest lengths, or of random ones (answers log-normal, median 700)."""
    pick, group = random.Random(0), torch.arange(count) // GROUP
    prompts = [pick.randint(PROMPT // 8, PROMPT) if ragged else PROMPT for _ in range(count // GROUP)]
    answers = [min(round(pick.lognormvariate(6.55, 0.7)) + 2, RESPONSE) if ragged else RESPONSE for _ in range(count)]
    both = (
        Ragged(flat=torch.ones(sum(each), dtype=torch.int64), lengths=torch.tensor(each), batch_size=[])
        for each in ([prompts[row // GROUP] for row in range(count)], answers)
    )
    return RolloutBatch(prompts=next(both), responses=next(both), group=group, prompt_group=group, batch_size=[])


def cut(batch: RolloutBatch, of: Settings, which: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return each rank's rows, and the tokens of its micro-batches, cut as the driver cuts a pass with one of the budgets."""
    tokens = batch.row_tokens()
    shares = rows_per_rank(tokens, range(len(tokens)), num_devices(of), True)
    chosen = [tokens.select(share) for share in shares]
    cuts = cut_ranks(chosen, [[f"row {row}" for row in share] for share in shares], budgets(of.actor_rollout_ref)[which])
    return shares, [[each.cost(members) for members in bins] for each, bins in zip(chosen, cuts, strict=True)]


def wire(size: ModelSize, ranks: int, micro_batches: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the bytes that a rank sends in a step, gathered (bfloat16; blocks and an untied head twice) and reduced (fp32)."""
    once = 2 * size.params * (ranks - 1) / ranks
    again = once - 2 * (size.vocab * size.hidden + size.hidden) * (ranks - 1) / ranks
    updates, old, ref = micro_batches
    found = {"old_log_prob": {"gathered": old * once}, "ref": {"gathered": ref * once}, "update_weights": {"gathered": once}}
    return found | {"update_actor": {"gathered": updates * (once + again), "reduced": updates * 2 * once}}


def predicted_tables() -> str:
    """Return the table of peaks, and that of bytes over the wire."""
    peaks, sent, batch = [], [], rows(GROUPS * GROUP, False)
    for (name, size), ranks in itertools.product(MODELS.items(), RANKS):
        of = settings(name, ranks)
        found = predict(of, Sizes(size), phases_of(of), "cuda", 80 * GIB)
        updates, old, ref = (cut(batch, of, which)[1] for which in (UPDATE, OLD, REFERENCE))
        sizes = (*found.totals.values(), found.host_bytes, found.host_bytes * min(ranks, A_NODE))
        peaks.append((name, str(ranks), *(f"{each / GIB:,.1f}" for each in sizes)))
        crossing = wire(size, ranks, [len(each[0]) for each in (updates, old, ref)])
        cells = (f"{sum(crossing[phase].values()) / GIB:,.0f}" for phase in PHASES)
        seconds = (2 * 2 + 8) * size.params * max(map(sum, updates)) / FLOPS  # two forwards, and an update with one more
        sent.append((name, str(ranks), str(len(updates[0])), *cells, f"{seconds:,.0f}", f"{GROUPS * GROUP / seconds:,.1f}"))
    head = ("model", "ranks", "micro-batches", *PHASES, "seconds", "rows a second")
    table = text_table(("model", "ranks", *found.phases, "host, a rank", "host, a node"), peaks)
    return f"{table}\n\nPredicted: GiB that a rank sends in a step, and seconds of its products\n{text_table(head, sent)}"


def driver_table() -> str:
    """Return the table of the driver's speed, measured."""
    lines = []
    for count, ranks in itertools.product(ROWS, (1, 8, 64, 512)):
        batch, of = rows(count, True), settings("8B", ranks)
        begun = time.process_time()
        shares, cuts = cut(batch, of, UPDATE)
        packed = time.process_time()
        for share in shares:
            batch.select(share)
        seconds = (packed - begun, time.process_time() - packed)
        speeds = (f"{count / each:,.0f}" for each in (seconds[0], sum(seconds)))
        lines.append((f"{count:,}", str(ranks), str(len(cuts[0])), *(f"{each:.2f}" for each in seconds), *speeds))
    return text_table(("rows", "ranks", "micro-batches", "cut", "copy", "rows a second, cut", "with copy"), lines)


def check_table(model: str, layers: int) -> str:
    """Return the formulas beside the real step of the first of some ranks."""
    case = Case(dataclasses.replace(SHAPES[model], num_layers=layers), PROMPT, RESPONSE, GROUP, groups=2, overrides=PROFILE)
    step, size = call_in_fake_process("benchmarks.gpu_cost.one_copy:phases", case, False, CHECKED), size_of(case.shape)
    peaks = predict(settings_of(case, Path("none"), CHECKED), Sizes(size), PHASES, "cuda")
    sent, lines = wire(size, CHECKED, step["passes"]), []
    for phase in PHASES:
        had, kinds = step["phases"][phase], peaks.phases[phase]
        live = sum(each for kind, each in kinds.items() if kind not in ("context", "allocator", "engine"))
        pairs = [(sent[phase].get(way, 0), had["bus"].get(way, 0)) for way in ("gathered", "reduced")]
        lines.append((phase, *(f"{each / GIB:.2f}" for pair in ((live, had["peak"]), *pairs) for each in pair)))
    return text_table(("phase", "peak", "of the step", "gathered", "of the step", "reduced", "of the step"), lines)


def main(argv: list[str] | None = None) -> int:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--check", nargs=2, metavar=("MODEL", "LAYERS"), help=f"run the real step of one of {', '.join(SHAPES)}")
    asked = parser.parse_args(argv)
    if asked.check:
        print(f"GiB by the formulas, and of a step of the first of {CHECKED} ranks on fake tensors: {asked.check} layers")
        print(check_table(asked.check[0], int(asked.check[1])))
        return 0
    print(f"Predicted: GiB of each rank's card at most, {GROUPS * GROUP:,} rows of {PROMPT} + {RESPONSE} tokens")
    print(f"{predicted_tables()}\n\nMeasured: processor seconds of the driver ({processor()})\n{driver_table()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
