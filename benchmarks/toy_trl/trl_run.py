"""``python -m benchmarks.toy_trl.trl_run PLAN RECORD``: one run of TRL. Runs in TRL's own environment."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.toy_trl.trl_trainer import build, greedy_accuracy
from benchmarks.toy_trl.work import TRACKED_STEP, Plan, Record, hash_of


def run(plan: Plan) -> Record:
    """Trains and gives the record."""
    task = Path(plan.task)
    trainer = build(plan.contestant, task, Path(plan.folder) / "run", plan.steps, plan.seed, plan.track)
    trainer.train()
    meter = trainer.meter
    return Record(
        starts=meter.starts,
        phases=meter.phases,
        response_tokens=trainer.response_tokens,
        rewards=trainer.rewards,
        accuracy=greedy_accuracy(trainer, task),
        peaks=meter.peaks[TRACKED_STEP - 1] if plan.track else {},
        prompt_ids=hash_of(trainer.prompt_ids) if plan.track else "",
    )


if __name__ == "__main__":
    run(Plan.read(Path(sys.argv[1]))).write(Path(sys.argv[2]))
