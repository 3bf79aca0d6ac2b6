"""The loop: resume, validate, step, save, until the last step or until asked to stop."""

from __future__ import annotations

import logging
from typing import Any

from verl_memopt.config.resume_diff import kept_settings
from verl_memopt.errors import CheckpointError, UnreadableCheckpointError
from verl_memopt.observe.validation import headline_score
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.trainer.assemble import Job
from verl_memopt.trainer.crew import Crew
from verl_memopt.trainer.interrupts import Interrupts
from verl_memopt.trainer.reporter import Reporter
from verl_memopt.trainer.resume import plain_shapes
from verl_memopt.trainer.step import Stepper
from verl_memopt.trainer.validate import Validation, validate

logger = logging.getLogger(__name__)

ALWAYS_TRACKED = 2
"""First steps whose bytes are counted on a CPU: the second is the first with optimizer state."""


class Trainer:
    """Drives a run whose workers are ready."""

    def __init__(self, job: Job, crew: Crew, runner: RewardRunner, reporter: Reporter, interrupts: Interrupts) -> None:
        self.job = job
        self.crew = crew
        self.runner = runner
        self.reporter = reporter
        self.interrupts = interrupts
        self.stepper = Stepper(job, crew, runner)
        self.step = 0
        self.saved_step = 0
        self.score: float | None = None
        """Validation score of the present step, None where it was not validated."""

    def run(self) -> None:
        """Runs to the end, or to the end of the step in which a stop was asked for, and saves then."""
        try:
            self._run()
        finally:
            self.stepper.close()

    def _run(self) -> None:
        trainer = self.job.settings.trainer
        self.resume()
        self.track(0)
        self.crew.all("update_weights", "update_weights")
        if trainer.val_only or (trainer.val_before_train and self.step == 0):
            self.validate_first()
        self.reporter.started(self.step, self.crew.take_memories())
        if trainer.val_only:
            return
        while self.step < self.job.total_steps and not self.interrupts.asked:
            self.one_step(self.step + 1)
        if self.interrupts.asked and self.saved_step < self.step:
            self.save()

    def one_step(self, step: int) -> None:
        """Runs, validates, logs and saves one step."""
        self.track(step)
        with self.crew.clock.phase("step"):
            result = self.stepper.run(step)
            validation = self.validation(step)
        self.step = step
        self.score = None if validation is None else headline_score(validation.metrics)
        self.reporter.step(step, self.stepper.feed.epoch, result, validation, self.crew.take_memories())
        if self.due(self.job.settings.trainer.save_freq):
            # After the log: a kill between the two resumes before this step, and its rows are dropped then.
            self.save()

    def validation(self, step: int) -> Validation | None:
        """Validates when it is due."""
        trainer = self.job.settings.trainer
        last = step == self.job.total_steps
        due = trainer.test_freq > 0 and (last or step % trainer.test_freq == 0)
        return validate(self.job, self.crew, self.runner, step) if due and self.job.validation is not None else None

    def validate_first(self) -> None:
        """Validates before the first step, where there is something to validate with."""
        if self.job.validation is not None:
            found = validate(self.job, self.crew, self.runner, self.step)
            self.reporter.first_validation(self.step, found, self.crew.take_memories())

    def due(self, every: int) -> bool:
        """Says whether something done every so many steps, and at the last, is due."""
        return every > 0 and (self.step % every == 0 or self.step == self.job.total_steps)

    def track(self, step: int) -> None:
        """Decides whether the bytes of a step are counted on a CPU."""
        every = self.job.settings.trainer.track_memory_every_steps
        first = ALWAYS_TRACKED + (0 if self.job.checkpoint is None else self.job.checkpoint.step)
        self.crew.track = self.job.site.device == "cpu" and every > 0 and (step <= first or step % every == 0)

    def resume(self) -> None:
        """Load the checkpoint that was found. A fresh start moves those of an earlier run aside.

        Raises:
            UnreadableCheckpointError: it cannot be loaded.
        """
        checkpoint = self.job.checkpoint
        if checkpoint is None:
            self.set_aside()
            return
        for fault in checkpoint.passed_over:
            self.reporter.say(f"passed over {fault}")
        contents = list(self.job.settings.actor_rollout_ref.actor.checkpoint.load_contents or [])
        try:
            self.crew.all("load_checkpoint", "load", str(checkpoint.folder / "actor"), contents)
        except CheckpointError as error:
            text = f"{checkpoint.folder}: looks whole and cannot be loaded: {error} Name another step, or use resume_mode=auto."
            raise UnreadableCheckpointError(text, checkpoint.step, str(error)) from error
        self.step = self.saved_step = checkpoint.step
        self.stepper.kl_control.load_state_dict(checkpoint.driver["kl_control"])
        self.reporter.say(f"resumed from {checkpoint.folder} (step {checkpoint.step} of {self.job.total_steps})")

    def set_aside(self) -> None:
        """Move the checkpoints of an earlier run to ``previous/``, so that a fresh start loses none of them."""
        if self.step > 0 or self.job.settings.trainer.val_only:
            return
        aside = self.job.store.set_aside()
        if aside is not None:
            self.reporter.say(f"the checkpoints of the run that was here before are in {aside}; delete it to free its space")

    def save(self) -> None:
        """Saves the present step; what was saved before stays until this one is whole."""
        store, step = self.job.store, self.step
        contents = list(self.job.settings.actor_rollout_ref.actor.checkpoint.save_contents)
        aside = store.begin(step)
        try:
            written = self.crew.all("save_checkpoint", "save", str(aside / "actor"), contents)
        except CheckpointError as error:
            raise store.failed(step, str(error)) from error
        records = {f"actor/{name}": record for part in written for name, record in part.items()}
        with self.crew.clock.phase("save_checkpoint"):
            store.commit(step, self.driver_state(), self.crew.world_size, records, self.score)
        self.saved_step = step
        self.reporter.saved(step, self.crew.take_memories())

    def driver_state(self) -> dict[str, Any]:
        """Gives what the driver itself must remember."""
        return {
            "step": self.step,
            "seed": self.job.settings.data.seed,
            "loader": self.stepper.feed.state_dict(),
            "kl_control": self.stepper.kl_control.state_dict(),
            "settings": kept_settings(self.job.settings),
            "weights": plain_shapes(self.job.site.weights),
        }
