"""One run of verl_memopt: ``python -m benchmarks.whole_step.ours PLAN RECORD`` does what ``verl-memopt train`` does, timed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.toy_trl.ours import json_lines, read_metrics
from benchmarks.toy_trl.work import hash_of, store, stored
from benchmarks.whole_step.work import Plan, Record, Stopwatch
from verl_memopt.config.loader import load_settings
from verl_memopt.observe.phase import PhaseClock
from verl_memopt.run.interrupts import Interrupts
from verl_memopt.trainer.build import build_run
from verl_memopt.trainer.loop import TrainingLoop, start_rewards, start_workers
from verl_memopt.trainer.reporter import Reporter

NAMES = {"gen": "rollout", "reward": "reward", "ref": "reference", "update_actor": "update", "update_weights": "sync"}
"""The benchmark's name of each phase."""
REWARD = Path(__file__).resolve().parents[2] / "recipe" / "real_model" / "reward.py"
NEVER = 10**6


def overrides(plan: Plan) -> list[str]:
    work, actor, rollout = plan.work, "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    task, dtype = Path(plan.task), {"fp32": "fp32", "bf16": "bfloat16"}[work.dtype]
    return [
        f"data.train_files={task / 'train.parquet'}", f"data.val_files={task / 'val.parquet'}", "data.shuffle=false",
        f"data.train_batch_size={work.prompts}", f"data.max_prompt_length={work.max_prompt_tokens}", f"data.seed={plan.seed}",
        f"data.max_response_length={work.response_tokens}", f"custom_reward_function.path={REWARD}",
        f"actor_rollout_ref.model.path={plan.model}", "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"{actor}.ppo_mini_batch_size={work.prompts}", f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu=4096", f"{actor}.clip_ratio={work.clip_ratio}", f"{actor}.use_kl_loss=true",
        f"{actor}.kl_loss_coef={work.kl}", f"{actor}.fsdp_config.dtype={dtype}", f"{actor}.optim.lr={work.learning_rate}",
        f"actor_rollout_ref.ref.fsdp_config.dtype={dtype}", f"{actor}.optim.weight_decay={work.weight_decay}",
        f"{actor}.optim.clip_grad={work.clip_grad}", f"{rollout}.name={plan.contestant.engine}", f"{rollout}.n={work.samples}",
        f"{rollout}.dtype={dtype}", f"{rollout}.ignore_eos=true", f"{rollout}.enforce_eager=true",
        f"{rollout}.kv_cache_memory_gb=0.5",
        # TRL does not ask generate for log-probs.
        f"{rollout}.calculate_log_probs=false", "trainer.device=cpu", "trainer.worker_group=local",
        f"trainer.total_training_steps={plan.steps}", "trainer.track_memory_every_steps=0", "trainer.test_freq=-1",
        "trainer.val_before_train=false", "trainer.save_freq=-1", "trainer.resume_mode=disable", "trainer.logger=[jsonl]",
        f"trainer.table_every_steps={NEVER}", f"trainer.default_local_dir={plan.folder}/run",
        f"trainer.rollout_data_dir={plan.folder}/samples",
    ]  # fmt: skip


class Clock(PhaseClock):
    def __init__(self, stopwatch: Stopwatch) -> None:
        super().__init__()
        self.stopwatch = stopwatch

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.stopwatch.phase(NAMES.get(name, name)), super().phase(name):
            yield


class TimedLoop(TrainingLoop):
    def __init__(self, *args: Any, stopwatch: Stopwatch) -> None:
        super().__init__(*args)
        self.stopwatch = stopwatch

    def one_step(self, step: int) -> None:
        with self.stopwatch.step():
            super().one_step(step)


def run(plan: Plan) -> Record:
    folder, stopwatch = Path(plan.folder), Stopwatch()
    clock = Clock(stopwatch)
    with Interrupts() as interrupts:
        context = build_run(load_settings("grpo_trainer", overrides(plan)))
        custom, reward_model = context.settings.custom_reward_function, context.settings.reward_model
        with (
            start_rewards(custom, reward_model, context.environment.run_dir) as runner,
            Reporter(context, clock) as reporter,
            start_workers(context, clock) as workers,
        ):
            TimedLoop(context, workers, runner, reporter, interrupts, stopwatch=stopwatch).run()
    samples = [json_lines(folder / "samples" / f"{step}.jsonl") for step in range(1, plan.steps + 1)]
    metrics = read_metrics(folder)
    return Record(
        steps=stopwatch.steps,
        prompt_tokens=[sum(len(sample["prompt_ids"]) for sample in step) // plan.work.samples for step in samples],
        prompt_ids=[hash_of([[sample["prompt_ids"] for sample in step]]) for step in samples],
        response_tokens=[round(row["response_length/mean"] * plan.work.rows) for row in metrics],
        rewards=[row["critic/score/mean"] for row in metrics],
    )  # fmt: skip


if __name__ == "__main__":
    asked, found = map(Path, sys.argv[1:])
    store(run(stored(asked)), found)
