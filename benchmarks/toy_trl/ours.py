"""The settings of a run of verl_memopt, and what its run folder says afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.toy_trl.work import TRACKED_STEP, WORK, Peak, Plan, hash_of, peak_of
from verl_memopt.observe.timeline import read_timeline

NAMES = {"gen": "rollout", "reward": "reward", "old_log_prob": "log_prob", "update_actor": "update", "update_weights": "sync"}
"""The benchmark's name of each phase."""
NEVER = 10**6


def overrides(plan: Plan) -> list[str]:
    """Gives the settings of a run, on top of the packaged ``rloo_trainer``."""
    return [*_work(plan), *_run(plan)]


def _work(plan: Plan) -> list[str]:
    task, contestant = Path(plan.task), plan.contestant
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"data.train_files={task / 'train.parquet'}",
        f"data.val_files={task / 'val.parquet'}",
        f"data.train_batch_size={WORK.prompts}",
        f"data.max_prompt_length={WORK.max_prompt_tokens}",
        f"data.max_response_length={WORK.max_response_tokens}",
        "data.shuffle=false",
        f"data.seed={plan.seed}",
        f"actor_rollout_ref.model.path={task / 'model'}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        # TRL computes old log-probs in every step of this task, so both do.
        f"{actor}.old_log_prob_pass=always",
        f"{actor}.ppo_mini_batch_size={WORK.prompts}",
        f"{actor}.ppo_micro_batch_size_per_gpu={contestant.rows_per_micro_batch}",
        f"{actor}.clip_ratio={WORK.clip_ratio}",
        # TRL reports the entropy of every batch and cannot be told not to.
        f"{actor}.calculate_entropy=true",
        f"{actor}.fsdp_config.dtype=fp32",
        f"{actor}.optim.lr={WORK.learning_rate}",
        f"{actor}.optim.weight_decay={WORK.weight_decay}",
        f"{actor}.optim.clip_grad={WORK.clip_grad}",
        f"{rollout}.name={contestant.rollout}",
        f"{rollout}.n={WORK.samples}",
        f"{rollout}.dtype=fp32",
        f"{rollout}.temperature={WORK.temperature}",
        f"{rollout}.enforce_eager=true",
        f"{rollout}.kv_cache_memory_gb=0.0625",
        # TRL does not ask its engine for log-probs.
        f"{rollout}.calculate_log_probs=false",
    ]


def _run(plan: Plan) -> list[str]:
    kept = [f"trainer.rollout_data_dir={plan.folder}/samples"] if plan.track else []
    return [
        "trainer.device=cpu",
        "trainer.worker_group=local",
        f"trainer.total_training_steps={plan.steps}",
        f"trainer.track_memory_every_steps={int(plan.track)}",
        f"trainer.test_freq={NEVER}",
        "trainer.val_before_train=false",
        "trainer.resume_mode=disable",
        "trainer.logger=[jsonl]",
        f"trainer.table_every_steps={NEVER}",
        f"trainer.default_local_dir={plan.folder}/run",
        *kept,
    ]


def read_bytes(folder: Path) -> dict[str, Peak]:
    """Gives the peaks of a tracked run from its folder, by phase."""
    return {
        NAMES[row.phase]: peak_of(row.peak_allocated_bytes, row.kinds)
        for row in read_timeline(folder / "run" / "memory_timeline.csv")
        if row.step == TRACKED_STEP and row.phase in NAMES and row.peak_allocated_bytes is not None
    }


def read_prompts(folder: Path, steps: int) -> str:
    """Gives the hash of the prompt ids of a tracked run."""
    samples = [_json_lines(folder / "samples" / f"{step}.jsonl") for step in range(1, steps + 1)]
    return hash_of([[sample["prompt_ids"] for sample in step] for step in samples])


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Gives the metrics of each step."""
    return [row for row in _json_lines(folder / "run" / "metrics.jsonl") if row["step"] > 0]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
