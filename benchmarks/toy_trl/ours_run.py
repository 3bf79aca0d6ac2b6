"""``python -m benchmarks.toy_trl.ours_run PLAN RECORD``: one run of verl_memopt.

The run is that of ``verl_memopt train``; it is put together here so that both clocks can be read where steps and phases begin.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.toy_trl.ours import NAMES, overrides, read_bytes, read_metrics, read_prompts
from benchmarks.toy_trl.work import NOTHING, WORK, Moment, Plan, Record
from verl_memopt.config.loader import load_settings
from verl_memopt.observe.phase import PhaseClock
from verl_memopt.run.interrupts import Interrupts
from verl_memopt.trainer.build import build_run
from verl_memopt.trainer.loop import Trainer, start_rewards, start_workers
from verl_memopt.trainer.reporter import Reporter


class Clock(PhaseClock):
    """The run's clock, which also reads the processor's."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, Moment]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = Moment.now()
        with super().phase(name):
            yield
        if self.steps and name in NAMES:
            spent = self.steps[-1]
            spent[NAMES[name]] = spent.get(NAMES[name], NOTHING) + (Moment.now() - began)


class TimedTrainer(Trainer):
    """The trainer, with a note of when each step began."""

    def __init__(self, *args: Any, clock: Clock) -> None:
        super().__init__(*args)
        self.clock = clock
        self.starts: list[Moment] = []

    def one_step(self, step: int) -> None:
        self.starts.append(Moment.now())
        self.clock.steps.append({})
        super().one_step(step)


def run(plan: Plan) -> Record:
    """Trains and gives the record."""
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
        starts=trainer.starts,
        phases=clock.steps,
        response_tokens=[round(row["response_length/mean"] * WORK.rows) for row in metrics],
        rewards=[row["critic/score/mean"] for row in metrics],
        accuracy=metrics[-1]["val-core/toy/arithmetic/reward/mean@1"],
        peaks=read_bytes(folder) if plan.track else {},
        prompt_ids=read_prompts(folder, plan.steps) if plan.track else "",
    )


if __name__ == "__main__":
    run(Plan.read(Path(sys.argv[1]))).write(Path(sys.argv[2]))
