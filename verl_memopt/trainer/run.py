"""A run, from its command line to its exit code. Heavy packages are imported only where a run starts: a dry run needs none."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from verl_memopt.algorithms.records import SFT
from verl_memopt.config.loader import load_settings
from verl_memopt.config.objective import log_objective
from verl_memopt.config.plain import to_yaml
from verl_memopt.config.schema import Settings
from verl_memopt.errors import ConfigError, UnreadableCheckpointError, UserError
from verl_memopt.trainer.interrupts import of_process

USAGE = "%(prog)s [--config-name NAME] [--config-dir FOLDER] [--cfg job] [key=value ...]"


DESCRIPTION = "Train a policy with PPO, RLOO, GRPO and others."
ENTRIES = "ppo_trainer (the default: verl's defaults), rloo_trainer, grpo_trainer, or a file of --config-dir"


def build_parser(
    prog: str, description: str = DESCRIPTION, config_name: str = "ppo_trainer", entries: str = ENTRIES
) -> argparse.ArgumentParser:
    """Return the parser of a training entry.

    Args:
        prog: name of the program.
        description: of the program.
        config_name: config, if the command line names none.
        entries: configs to choose from, in words.
    """
    parser = argparse.ArgumentParser(prog=prog, usage=USAGE, description=description)
    parser.add_argument("--config-name", default=config_name, help=entries)
    parser.add_argument("--config-dir", "--config-path", default=None, help="folder of a recipe's YAML")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved settings as YAML and exit")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="any setting, under verl's key names")
    return parser


def run(arguments: Sequence[str] | None, prog: str = "verl-memopt train") -> int:
    """Run the training entry and return its exit code.

    Args:
        arguments: of the command line; None = those of this process.
        prog: name of the program in its help.

    Raises:
        UserError: for what the user must mend.
    """
    return _run(build_parser(prog), arguments)


def sft(
    arguments: Sequence[str] | None,
    prog: str = "verl-memopt sft",
    config_name: str = "sft_trainer",
    config_dir: str | None = None,
) -> int:
    """Run supervised fine-tuning and return its exit code. It is a training run whose settings say so.

    Args:
        arguments: of the command line; None = those of this process.
        prog: name of the program in its help.
        config_name: config, if the command line names none.
        config_dir: folder of a recipe's YAML, likewise.

    Raises:
        UserError: for what the user must mend.
    """
    description = "Teach a model the responses of a dataset (supervised fine-tuning)."
    parser = build_parser(prog, description, config_name, f"{config_name} (the default), or a file of --config-dir")
    parser.set_defaults(config_dir=config_dir)
    return _run(parser, arguments, estimator=SFT)


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, estimator: str | None = None) -> int:
    """Run what a command line asks for, and return the exit code. Settings with another estimator are refused."""
    from verl_memopt.observe.log_setup import setup_logging

    parsed = parser.parse_intermixed_args(arguments)
    setup_logging(level=logging.INFO)
    settings = load_settings(parsed.config_name, parsed.overrides, parsed.config_dir)
    if estimator not in (None, settings.algorithm.adv_estimator):
        raise ConfigError(
            f"algorithm.adv_estimator={settings.algorithm.adv_estimator}: {parser.prog} learns the responses of the dataset. Set "
            f"algorithm.adv_estimator={estimator}, or use verl-memopt train."
        )
    actor = settings.actor_rollout_ref.actor
    kl_in_loss = f"{actor.kl_loss_coef:g} x {actor.kl_loss_type}" if actor.use_kl_loss else None
    log_objective(settings.algorithm, actor.policy_loss.loss_mode, kl_in_loss)
    if parsed.cfg is not None or settings.debug.mode == "dry":
        sys.stdout.write(to_yaml(settings))
        return 0
    return train(settings)


def train(settings: Settings) -> int:
    """Run training and return the exit code: 0 when done, 130, 143 or 129 when a signal stopped it.

    With ``trainer.resume_mode=auto`` a checkpoint that cannot be loaded is skipped: the run starts again from the one before.

    Raises:
        UserError: for what the user must mend. Everything that was started has ended by then.
    """
    from verl_memopt.observe.timing import PhaseClock
    from verl_memopt.trainer.build import build_run
    from verl_memopt.trainer.debug_run import debug_settings, mode_of
    from verl_memopt.trainer.loop import Trainer
    from verl_memopt.trainer.reporter import Reporter
    from verl_memopt.trainer.start import start_rewards, start_workers

    unreadable: dict[int, str] = {}
    settings = debug_settings(settings)
    scores = mode_of(settings).scores
    custom, reward_model = settings.custom_reward_function, settings.reward_model
    with of_process() as interrupts:
        while True:
            clock = PhaseClock()
            context = build_run(settings, unreadable)
            with (
                context.lock,
                start_rewards(custom, reward_model, context.environment.run_dir) if scores else nullcontext() as rewards,
                Reporter(context, clock) as reporter,
            ):
                try:
                    with start_workers(context, clock) as workers:
                        Trainer(context, workers, rewards, reporter, interrupts).run()
                except KeyboardInterrupt:
                    reporter.say("stopped at once; a new start resumes at the last checkpoint")
                except UnreadableCheckpointError as error:
                    if settings.trainer.resume_mode != "auto":
                        raise
                    # The workers that failed to load it are in no known state, so new ones load the one before.
                    unreadable[error.step] = error.fault
                    continue
                except UserError:
                    reporter.say(f"the record so far: {reporter.folder.path}")
                    raise
                reporter.finish()
                return interrupts.exit_code or 0
