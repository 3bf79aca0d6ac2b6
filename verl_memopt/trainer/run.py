"""A run from settings to exit code."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from verl_memopt.config.schema import Settings
from verl_memopt.errors import UnreadableCheckpointError, UserError
from verl_memopt.observe.timing import PhaseClock
from verl_memopt.trainer.build import build_run, start_rewards, start_workers
from verl_memopt.trainer.interrupts import Interrupts, of_process
from verl_memopt.trainer.loop import Trainer
from verl_memopt.trainer.reporter import Reporter

logger = logging.getLogger(__name__)


def train(settings: Settings) -> int:
    """Runs training and gives the exit code: 0 when done, 130, 143 or 129 when a signal stopped it.

    Errors: the UserError of whatever the user must mend; everything that was started is ended by then.
    """
    unreadable: dict[int, str] = {}
    with of_process() as interrupts:
        while True:
            try:
                _train(settings, unreadable, interrupts)
                return interrupts.exit_code or 0
            except UnreadableCheckpointError as error:
                if settings.trainer.resume_mode != "auto":
                    raise
                # Workers that failed to load one are in no known state: new ones load the one before it.
                unreadable[error.step] = error.fault


def _train(settings: Settings, unreadable: Mapping[int, str], interrupts: Interrupts) -> None:
    """Runs from the newest checkpoint that is not among the unreadable ones. Errors: as :func:`train`."""
    clock = PhaseClock()
    context = build_run(settings, unreadable)
    with context.lock, start_rewards(context) as runner, Reporter(context, clock) as reporter:
        try:
            with start_workers(context, clock) as workers:
                Trainer(context, workers, runner, reporter, interrupts).run()
        except KeyboardInterrupt:
            reporter.say("stopped at once; the last checkpoint is where a new start resumes")
        except UnreadableCheckpointError:
            raise
        except UserError:
            reporter.say(f"the record so far: {reporter.folder.path}")
            raise
        reporter.finish()
