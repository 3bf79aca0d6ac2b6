"""``python -m benchmarks.fit --runs 200 --out FILE``: verdicts of ``verl-memopt fit`` against the runs they are about.

Each draw is a small random run: a tiny model of random sizes, RLOO, GRPO with a KL, PPO, LoRA, SFT or RLT, random knobs, lengths
and batches; one in 23 has two ranks. It runs for two steps on a CPU under a ``memory.device_limit_gb`` near the predicted peak. A
run that was let through must not run out of memory. One that was refused and runs all the same shows how careful the verdict is.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.gpu.reach_cases import size_of
from verl_memopt.config.loader import load_settings
from verl_memopt.errors import ConfigError, DeviceMemoryError
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.model.sizes import size_of as folder_size
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.phase import GIB, MIB
from verl_memopt.plan.peaks import Peaks, Sizes, predict
from verl_memopt.plan.verdict import phases_of
from verl_memopt.trainer.main_ppo import train

AR = "actor_rollout_ref"
WAYS = ("rloo", "grpo", "ppo", "lora", "lora_ppo", "rloo", "grpo", "ppo", "sft", "rlt")
ESTIMATORS = {"grpo": "grpo", "ppo": "gae", "lora_ppo": "gae", "rlt": "grpo", "sft": "sft"}
TWO_RANKS = 23
"""One draw in so many has two ranks, by Ray. It has no divisor in common with the number of ways, so each way has its turn."""
SCORE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return float(len(solution_str) % 3)\n"


@dataclass(frozen=True)
class Draw:
    """One random run: its model, its settings, and the limit as a share of the predicted peak."""

    number: int
    way: str
    shape: TinyShape
    settings: tuple[str, ...]
    share: float
    student: TinyShape | None = None
    """RLT's model that scores."""
    teacher: TinyShape | None = None
    """The model that a run distills from, beside what its settings say of ``teacher`` and ``distill``."""

    @property
    def config(self) -> str:
        """Name of the packaged config that it starts from."""
        return "sft_trainer" if self.way == "sft" else "ppo_trainer"


def draw(number: int) -> Draw:
    """Gives the run of a number, the same each time."""
    pick = random.Random(number)
    way = WAYS[number % len(WAYS)]
    shape = _shape(pick)
    settings = tuple(_settings(pick, way, number % TWO_RANKS == TWO_RANKS - 1))
    share = pick.choice([0.7, 0.8, 0.9, 0.95, 1.0, 1.0, 1.02, 1.1])
    # A student has the tokenizer of the policy, and a row for each id that the policy samples; one that is swapped in, its shape.
    student = replace(_shape(pick), model_type=shape.model_type, vocab_size=shape.vocab_size) if way == "rlt" else None
    student = shape if "reward_model.residency=swap" in settings else student
    return Draw(number, way, shape, settings, share, student)


def _shape(pick: random.Random) -> TinyShape:
    kv_heads = pick.choice([1, 2, 3])
    heads = kv_heads * pick.choice([1, 2, 3])
    return TinyShape(
        model_type=pick.choice(["qwen3", "qwen3", "qwen2", "llama"]),
        vocab_size=pick.choice([320, 1000, 4001, 12_000, 20_000]), hidden_size=32 * heads * pick.randint(1, 2),
        intermediate_size=64 * pick.randint(2, 12), num_layers=pick.randint(1, 4), num_heads=heads, num_kv_heads=kv_heads,
        head_dim=pick.choice([32, 64]), tie_embeddings=pick.random() < 0.5,
    )  # fmt: skip


def _settings(pick: random.Random, way: str, two_ranks: bool) -> list[str]:
    prompts, n = pick.choice([1, 2, 4]), pick.choice([1, 2, 4]) if "ppo" in way else pick.choice([2, 4])
    prompt, response = pick.choice([16, 64, 200, 400]), pick.choice([4, 8, 16])
    if two_ranks:
        prompts = max(prompts, 2)
    if way == "rlt":
        prompt, response = max(prompt, 64), pick.choice([24, 40])
    lora = way.startswith("lora")
    # Forged rows have the largest lengths and need neither generation nor a reward process, so these runs are quick.
    forged = pick.random() < 0.7 and way not in ("sft", "rlt")
    chosen: dict[str, Any] = {
        "debug.mode": "forge" if forged else "off",
        "algorithm.adv_estimator": ESTIMATORS.get(way, "rloo"),
        "data.train_batch_size": prompts, f"{AR}.actor.ppo_mini_batch_size": pick.choice([prompts, 2 if two_ranks else 1]),
        f"{AR}.rollout.n": 1 if way == "sft" else n,
        "data.max_prompt_length": prompt, "data.max_response_length": response, f"{AR}.rollout.ignore_eos": pick.random() < 0.7,
        f"{AR}.actor.use_kl_loss": way in ("grpo", "rlt") or (way != "sft" and pick.random() < 0.2),
        f"{AR}.model.lora_rank": pick.choice([4, 16]) if lora else 0,
        "algorithm.use_kl_in_reward": way != "sft" and pick.random() < 0.1,
    }  # fmt: skip
    for role in ("actor", "ref", "critic"):
        key = "critic.model.fsdp_config" if role == "critic" else f"{AR}.{role}.fsdp_config"
        chosen[f"{key}.dtype"] = pick.choice(["fp32", "bfloat16"])
        chosen[f"{key}.model_dtype"] = pick.choice(["fp32", "fp32", "bfloat16"])
        chosen[f"{key}.param_offload"] = pick.random() < 0.4
        chosen[f"{key}.reshard_after_forward"] = pick.random() < 0.7
        chosen[f"{key}.own_units"] = pick.random() < 0.7
        if role == "ref":
            continue
        chosen[f"{key}.optimizer_offload"] = pick.random() < 0.4
        chosen[f"{key}.gradient_sync"] = pick.choice(["every", "every", "last"])
        model, optim = ("critic.model", "critic.optim") if role == "critic" else (f"{AR}.model", f"{AR}.actor.optim")
        chosen[f"{model}.enable_gradient_checkpointing"] = pick.random() < 0.6
        chosen[f"{model}.gradient_checkpointing_mode"] = pick.choice(["full", "full", "every_n", "selective"])
        chosen[f"{model}.recompute_elementwise"] = pick.random() < 0.8
        chosen[f"{model}.prune_last_block"] = pick.random() < 0.8
        chosen[f"{model}.tiled_mlp.enabled"] = pick.random() < 0.2
        chosen[f"{model}.enable_activation_offload"] = pick.random() < 0.3
        chosen[f"{model}.activation_offload_min_bytes"] = pick.choice([1024, 1048576])
        chosen[f"{optim}.state_dtype"] = pick.choice([None, None, None, "bfloat16", "int8", "int4"])
        chosen[f"{optim}.bucket_megabytes"] = pick.choice([64, 0.1])
        if role == "critic" and lora:
            chosen["critic.model.lora_rank"] = pick.choice([0, 4])
    chosen[f"{AR}.model.logprob_chunk_tokens"] = pick.choice([0, 16, 256, 512])
    chosen[f"{AR}.model.logprob_vocab_tile"] = pick.choice([0, 0, 2048])
    chosen[f"{AR}.actor.use_prefix_grouper"] = pick.random() < 0.8
    chosen[f"{AR}.actor.policy_loss.loss_mode"] = "sequence" if way in ("rloo", "lora") and pick.random() < 0.7 else "vanilla"
    chosen[f"{AR}.actor.entropy_coeff"] = pick.choice([0, 0, 0.01])
    if way == "sft":
        chosen |= {f"{AR}.actor.policy_loss.loss_mode": "gpg", f"{AR}.actor.entropy_coeff": 0}
    chosen[f"{AR}.actor.ppo_epochs"] = pick.choice([1, 1, 2])
    chosen[f"{AR}.ref.quantization"] = pick.choice(["none", "none", "int8", "nf4"]) if not lora else "none"
    chosen[f"{AR}.rollout.dtype"] = pick.choice(["fp32", "bfloat16"])
    chosen[f"{AR}.rollout.free_cache_engine"] = pick.random() < 0.6
    chosen[f"{AR}.rollout.max_num_seqs"] = pick.choice([2, 256])
    chosen[f"{AR}.rollout.top_p"] = pick.choice([1, 1, 0.9])
    longest = prompt + response
    if pick.random() < 0.6:
        chosen[f"{AR}.actor.use_dynamic_bsz"] = True
        chosen[f"{AR}.actor.adaptive_token_budget"] = pick.random() < 0.2
        chosen[f"{AR}.actor.ppo_max_token_len_per_gpu"] = pick.choice([longest, 2 * longest, 16_384])
        chosen["critic.ppo_max_token_len_per_gpu"] = pick.choice([longest, 2 * longest, 16_384])
    else:
        chosen[f"{AR}.actor.use_dynamic_bsz"] = False
        chosen[f"{AR}.actor.ppo_micro_batch_size_per_gpu"] = pick.choice([1, 2, 3])
        chosen["critic.ppo_micro_batch_size_per_gpu"] = pick.choice([1, 2])
    if way == "rlt":
        student = "reward_model.model.fsdp_config"
        chosen |= {
            "reward_model.enable": True, "reward_model.reward_manager": "rlt", "reward_model.rlt.tag_format": "short",
            "reward_model.rlt.max_tokens_per_micro_batch": pick.choice([256, 1024]),
            "reward_model.residency": pick.choice(["auto", "auto", "swap"]),
            f"{student}.dtype": pick.choice(["fp32", "bfloat16"]), f"{student}.param_offload": pick.random() < 0.5,
        }  # fmt: skip
        if chosen["reward_model.residency"] == "swap":
            chosen |= {
                f"{student}.param_offload": True,
                f"{AR}.ref.fsdp_config.param_offload": True,
                f"{AR}.ref.quantization": "none",
            }
    if two_ranks:
        chosen |= {"trainer.n_gpus_per_node": 2, "trainer.worker_group": "ray"}
    texts = {True: "true", False: "false", None: "null"}
    return [f"{key}={texts[value] if value is None or isinstance(value, bool) else value}" for key, value in chosen.items()]


@dataclass(frozen=True)
class Outcome:
    """What was said of a run and what came of it. Bytes; phase -> peak where the run ended well."""

    number: int
    way: str
    limit: int
    predicted: dict[str, int]
    measured: dict[str, int]
    ran: bool
    error: str = ""
    host: tuple[int, int] = (0, 0)
    """Host buffers of this process: predicted, and the most that were held, but for those of an export."""

    @property
    def verdict(self) -> bool:
        """Whether the run was let through."""
        return max(self.predicted.values()) <= self.limit


def run(drawn: Draw, folder: Path, limited: bool = True) -> tuple[Outcome, Peaks, dict[str, Any]]:
    """Runs a draw for two steps under its limit. Gives the outcome, the prediction and what was measured by kind."""
    folder.mkdir(parents=True)
    model = make_tiny_model(folder / "model", drawn.shape)
    longest = int(next(each for each in drawn.settings if each.startswith("data.max_prompt_length")).split("=")[1])
    further = _inputs(drawn, folder, longest)
    fixed = [
        f"{AR}.model.path={model}", f"data.train_files={folder}/rows.jsonl", "data.val_files=null", "data.seed=0",
        f"{AR}.rollout.name=hf", "trainer.device=cpu", "trainer.total_training_steps=2", "trainer.val_before_train=false",
        "trainer.save_freq=2", "trainer.save_final_model=false", "trainer.logger=[jsonl]", "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}/run", "trainer.max_actor_ckpt_to_keep=null",
        "trainer.max_skipped_steps=9", "trainer.track_memory_every_steps=1",
        f"{AR}.rollout.max_logprob_diff=null", *further,
    ]  # fmt: skip
    local = [] if "trainer.worker_group=ray" in drawn.settings else ["trainer.worker_group=local"]
    fixed += local
    settings = load_settings(drawn.config, [*drawn.settings, *fixed])
    others = {"student": drawn.student, "teacher": drawn.teacher}
    sizes = Sizes(
        folder_size(settings.actor_rollout_ref.model, f"{AR}.model"),
        **{role: size_of(shape) for role, shape in others.items() if shape is not None},
    )
    peaks = predict(settings, sizes, phases_of(settings), "cpu")
    limit = round(peaks.device_bytes * drawn.share)
    if limited:
        settings = load_settings(drawn.config, [*drawn.settings, *fixed, f"memory.device_limit_gb={limit / GIB}"])
    measured: dict[str, Any] = {}
    error = ""
    try:
        with redirect_stdout(io.StringIO()), _host_bytes() as host:
            train(settings)
    except DeviceMemoryError as refusal:
        error = str(refusal)
    else:
        measured = json.loads(next((folder / "run").rglob("summary.json")).read_text())["phases"]
    phases = {name: figures["peak_allocated_bytes"] for name, figures in measured.items() if figures["peak_allocated_bytes"]}
    return (
        Outcome(drawn.number, drawn.way, limit, peaks.totals, phases, not error, error, (peaks.host_bytes, max(host))),
        peaks,
        measured,
    )


@contextmanager
def _host_bytes() -> Iterator[list[int]]:
    """Gives a list that gets the bytes in host buffers, but for those of an export, whenever one is taken."""
    allocator = host_allocator()
    before, held = allocator.held_bytes, [0]

    def followed(method: str) -> Callable[..., Any]:
        original = getattr(allocator, method)

        def follow(*args: Any) -> Any:
            given = original(*args)
            held.append(allocator.held_bytes - before - allocator.kinds["export"])
            return given

        return follow

    with ExitStack() as stack:
        for method in ("empty", "count_elsewhere"):
            stack.enter_context(mock.patch.object(allocator, method, followed(method)))
        yield held


def _inputs(drawn: Draw, folder: Path, longest: int) -> list[str]:
    """Writes the rows of a draw, its reward function or its student, and gives the settings that name them."""
    reader = random.Random(drawn.number)
    rows: list[dict[str, Any]] = [{"prompt": "ab" * reader.randint(1, 8), "answer": "1", "data_source": "toy"} for _ in range(8)]
    for row in rows[:6]:
        row["prompt"] = "7" * (longest - 1)
    if drawn.way == "sft":
        most = int(next(each for each in drawn.settings if each.startswith("data.max_response_length")).split("=")[1])
        rows = [{**row, "answer": "1" * (most - 1)} for row in rows]
    if drawn.student is not None:
        student = make_tiny_model(folder / "student", drawn.student)
        question = "7" * max(longest - 60, 4)  # the rest is the prompt's own
        rows = [{"question": question, "solution": "1", "reasoning_trace": "7"} for _ in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "score.py").write_text(SCORE)
    if drawn.student is not None:
        return [f"reward_model.model.path={student}"]
    found = ["data.response_key=answer"] if drawn.way == "sft" else [f"custom_reward_function.path={folder}/score.py"]
    if drawn.teacher is not None:
        found.append(f"teacher.model.path={make_tiny_model(folder / 'teacher', drawn.teacher)}")
    return found


def line(outcome: Outcome) -> str:
    """Gives an outcome as a line of the log."""
    said, came = "fits" if outcome.verdict else "refused", "ran" if outcome.ran else "out of memory"
    high, low = max(outcome.predicted.values()), max(outcome.measured.values(), default=0)
    ratio = f", predicted {high / low:.2f} of the peak" if low else ""
    return (
        f"{outcome.number:4} {outcome.way:8} limit {outcome.limit / MIB:7.2f} MiB: {said:7} {came}{ratio} {outcome.error[:160]}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the draws and gives 1 where a run that was let through ran out of memory."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="draws (default: 20)")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--out", type=Path, help="file for one line of JSON a run")
    parser.add_argument("--no-limit", action="store_true", help="run without a limit, and show every phase")
    asked = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    outcomes = []
    for number in range(asked.first, asked.first + asked.runs):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as parent:
            try:
                outcome, peaks, measured = run(draw(number), Path(parent) / "draw", not asked.no_limit)
            except ConfigError as error:
                print(f"{number:4} is no run: {error}", flush=True)
                continue
        outcomes.append(outcome)
        if outcome.host[1] > outcome.host[0]:
            print(f"{number:4} HOST TOO LOW: {outcome.host[0] / MIB:.3f} of {outcome.host[1] / MIB:.3f} MiB")
        print(line(outcome), f"{time.monotonic() - began:.0f} s", flush=True)
        for phase, total in peaks.totals.items() if asked.no_limit else ():
            had = outcome.measured.get(phase)
            if had:
                flag = "" if total >= had else "   TOO LOW"
                print(f"       {phase:16} {total / MIB:8.3f} of {had / MIB:8.3f} MiB {total / had:6.2f}{flag}")
                if flag or total > 1.1 * had:
                    for kind in sorted({*peaks.phases[phase], *measured[phase]["kinds"]}):
                        one, two = peaks.phases[phase].get(kind, 0), measured[phase]["kinds"].get(kind, 0)
                        print(f"           {kind:22} {one / MIB:8.3f} {two / MIB:8.3f}")
        if asked.out:
            with asked.out.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    through = [each for each in outcomes if each.verdict]
    failed = [each for each in through if not each.ran]
    careful = [each for each in outcomes if not each.verdict and each.ran]
    print(f"{len(outcomes)} runs: {len(through)} let through, of which {len(failed)} ran out of memory; "
          f"{len(outcomes) - len(through)} refused, of which {len(careful)} would have run")  # fmt: skip
    return 1 if failed or any(each.host[1] > each.host[0] for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
