"""A run from settings to exit code."""

from __future__ import annotations

import logging

from verl_memopt.config.schema import Settings
from verl_memopt.errors import UserError
from verl_memopt.observe.timing import PhaseClock
from verl_memopt.trainer.assemble import prepare, reward_processes, workers
from verl_memopt.trainer.interrupts import of_process
from verl_memopt.trainer.loop import Trainer
from verl_memopt.trainer.reporter import Reporter

logger = logging.getLogger(__name__)


def train(settings: Settings) -> int:
    """Runs training and gives the exit code: 0 when done, 130, 143 or 129 when a signal stopped it.

    Errors: the UserError of whatever the user must mend; everything that was started is ended by then.
    """
    clock = PhaseClock()
    with of_process() as interrupts:
        job = prepare(settings)
        with reward_processes(job) as runner, Reporter(job, clock) as reporter:
            try:
                with workers(job, clock) as crew:
                    Trainer(job, crew, runner, reporter, interrupts).run()
            except KeyboardInterrupt:
                reporter.say("stopped at once; the last checkpoint is where a new start resumes")
            except UserError:
                reporter.say(f"the record so far: {reporter.folder.path}")
                raise
            reporter.finish()
    return interrupts.exit_code or 0
