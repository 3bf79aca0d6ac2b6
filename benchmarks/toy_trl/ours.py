"""One run of verl_memopt.

``python -m benchmarks.toy_trl.ours PLAN RECORD`` does what ``verl-memopt train`` does; the run is put together here so that the
processor's clock can be read where steps and phases begin.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.toy_trl.work import TRACKED_STEP, WORK, Peak, Plan, Record, hash_of, peak_of, store, stored
from verl_memopt.config.loader import load_settings
from verl_memopt.observe.phase import PhaseClock
from verl_memopt.observe.run_folder import read_timeline
from verl_memopt.run.interrupts import Interrupts
from verl_memopt.trainer.build import build_run
from verl_memopt.trainer.loop import TrainingLoop, start_rewards, start_workers
from verl_memopt.trainer.reporter import Reporter

NAMES = {"gen": "rollout", "reward": "reward", "old_log_prob": "log_prob", "update_actor": "update", "update_weights": "sync"}
"""The benchmark's name of each phase."""
NEVER = 10**6


def overrides(plan: Plan) -> list[str]:
    task, contestant = Path(plan.task), plan.contestant
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"data.train_files={task / 'train.parquet'}", f"data.val_files={task / 'val.parquet'}",
        f"data.train_batch_size={WORK.prompts}", f"data.max_prompt_length={WORK.max_prompt_tokens}",
        f"data.max_response_length={WORK.max_response_tokens}", "data.shuffle=false", f"data.seed={plan.seed}",
        f"actor_rollout_ref.model.path={task / 'model'}", "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        # TRL computes old log-probs in every step of this task, so both do.
        f"{actor}.old_log_prob_pass=always", f"{actor}.ppo_mini_batch_size={WORK.prompts}",
        f"{actor}.ppo_micro_batch_size_per_gpu={contestant.rows_per_micro_batch}", f"{actor}.clip_ratio={WORK.clip_ratio}",
        # TRL reports the entropy of every batch and cannot be told not to.
        f"{actor}.calculate_entropy=true", f"{actor}.fsdp_config.dtype=fp32", f"{actor}.optim.lr={WORK.learning_rate}",
        f"{actor}.optim.weight_decay={WORK.weight_decay}", f"{actor}.optim.clip_grad={WORK.clip_grad}",
        f"{rollout}.name={contestant.rollout}", f"{rollout}.n={WORK.samples}", f"{rollout}.dtype=fp32",
        f"{rollout}.temperature={WORK.temperature}", f"{rollout}.enforce_eager=true", f"{rollout}.kv_cache_memory_gb=0.0625",
        # TRL does not ask its engine for log-probs.
        f"{rollout}.calculate_log_probs=false", "trainer.device=cpu", "trainer.worker_group=local",
        f"trainer.total_training_steps={plan.steps}", f"trainer.track_memory_every_steps={int(plan.track)}",
        f"trainer.test_freq={NEVER}", "trainer.val_before_train=false", "trainer.resume_mode=disable", "trainer.logger=[jsonl]",
        f"trainer.table_every_steps={NEVER}", f"trainer.default_local_dir={plan.folder}/run",
        *([f"trainer.rollout_data_dir={plan.folder}/samples"] if plan.track else ()),
    ]  # fmt: skip


def read_bytes(folder: Path) -> dict[str, Peak]:
    return {
        NAMES[row.phase]: peak_of(row.peak_allocated_bytes, row.kinds)
        for row in read_timeline(folder / "run" / "memory_timeline.csv")
        if row.step == TRACKED_STEP and row.phase in NAMES and row.peak_allocated_bytes is not None
    }


def read_prompts(folder: Path, steps: int) -> str:
    samples = [json_lines(folder / "samples" / f"{step}.jsonl") for step in range(1, steps + 1)]
    return hash_of([[sample["prompt_ids"] for sample in step] for step in samples])


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [row for row in json_lines(folder / "run" / "metrics.jsonl") if row["step"] > 0]


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Clock(PhaseClock):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.process_time()
        with super().phase(name):
            yield
        if self.steps and name in NAMES:
            spent = self.steps[-1]
            spent[NAMES[name]] = spent.get(NAMES[name], 0.0) + time.process_time() - began


class TimedTrainer(TrainingLoop):
    def __init__(self, *args: Any, clock: Clock) -> None:
        super().__init__(*args)
        self.clock = clock
        self.starts: list[float] = []

    def one_step(self, step: int) -> None:
        self.starts.append(time.process_time())
        self.clock.steps.append({})
        super().one_step(step)


def run(plan: Plan) -> Record:
    folder, clock = Path(plan.folder), Clock()
    with Interrupts() as interrupts:
        context = build_run(load_settings("rloo_trainer", overrides(plan)))
        custom, reward_model = context.settings.custom_reward_function, context.settings.reward_model
        with (
            start_rewards(custom, reward_model, context.environment.run_dir) as runner,
            Reporter(context, clock) as reporter,
            start_workers(context, clock) as workers,
        ):
            trainer = TimedTrainer(context, workers, runner, reporter, interrupts, clock=clock)
            trainer.run()
    metrics = read_metrics(folder)
    return Record(
        starts=trainer.starts, phases=clock.steps,
        response_tokens=[round(row["response_length/mean"] * WORK.rows) for row in metrics],
        accuracy=metrics[-1]["val-core/toy/arithmetic/reward/mean@1"],
        peaks=read_bytes(folder) if plan.track else {}, prompt_ids=read_prompts(folder, plan.steps) if plan.track else "",
    )  # fmt: skip


if __name__ == "__main__":
    asked, found = map(Path, sys.argv[1:])
    store(run(stored(asked)), found)
