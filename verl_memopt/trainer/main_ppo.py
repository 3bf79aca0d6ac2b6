"""A training run, from its command line to its exit code. verl's name for it is ``python -m verl_memopt.trainer.main_ppo``.

Heavy packages are imported only when a run starts, because a dry run needs none of them.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from verl_memopt.errors import ConfigError, DeviceMemoryError, HostMemoryError, UnreadableCheckpointError, UserError
from verl_memopt.run.interrupts import guarded

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings
    from verl_memopt.data.python_rows import PythonRows
    from verl_memopt.run.interrupts import Interrupts
    from verl_memopt.trainer.listener import Listener
    from verl_memopt.worker.ray_group import RayGroup

ENTRIES = "ppo_trainer (the default: verl's defaults), rloo_trainer, grpo_trainer, or a file of --config-dir"


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the arguments say, and return the exit code. A :class:`UserError` is printed without a traceback.

    Args:
        argv: The arguments. None = the command line of this process. Only then its signals are handled too.
    """
    return guarded(lambda: run(argv, build_parser("python -m verl_memopt.trainer.main_ppo")), watched=argv is None)


def build_parser(
    prog: str,
    description: str = "Train a policy with PPO, RLOO, GRPO and others.",
    config_name: str = "ppo_trainer",
    entries: str = ENTRIES,
) -> argparse.ArgumentParser:
    usage = "%(prog)s [--config-name NAME] [--config-dir FOLDER] [--cfg job] [--until-it-fits] [key=value ...]"
    parser = argparse.ArgumentParser(prog=prog, usage=usage, description=description)
    parser.add_argument("--config-name", default=config_name, help=entries)
    parser.add_argument("--config-dir", "--config-path", default=None, help="folder of a recipe's YAML")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved settings as YAML and exit")
    parser.add_argument(
        "--until-it-fits",
        action="store_true",
        help="when memory runs out, set what the error advises and start again, up to eight times",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="any setting, under verl's key names")
    return parser


def run(arguments: Sequence[str] | None, parser: argparse.ArgumentParser | None = None, estimator: str | None = None) -> int:
    """Run the training that a command line describes, and return the exit code.

    Args:
        arguments: None = the command line of this process.
        parser: None = the parser of ``verl-memopt train``.
        estimator: The only ``algorithm.adv_estimator`` that this command accepts. None = any.
    """
    from verl_memopt.observe.log_setup import lasting_console, setup_logging

    parser = parser or build_parser("verl-memopt train")
    parsed = parser.parse_intermixed_args(arguments)
    setup_logging(level=logging.INFO)
    with lasting_console():
        return _run(parsed, parser.prog, estimator)


def _run(parsed: argparse.Namespace, prog: str, estimator: str | None) -> int:
    from verl_memopt.config.loader import load_settings, log_objective, to_yaml
    from verl_memopt.observe.files import folder_refusals

    settings = load_settings(parsed.config_name, parsed.overrides, parsed.config_dir)
    if estimator not in (None, settings.algorithm.adv_estimator):
        raise ConfigError(
            f"algorithm.adv_estimator={settings.algorithm.adv_estimator}: {prog} trains on the dataset's responses. Set "
            f"algorithm.adv_estimator={estimator}, or use verl-memopt train."
        )
    log_objective(settings)
    if settings.debug.mode == "dry" and parsed.cfg is None:
        from verl_memopt.plan.verdict import say_verdict

        say_verdict(settings)
    if parsed.cfg is not None or settings.debug.mode == "dry":
        sys.stdout.write(to_yaml(settings))
        return 0
    with folder_refusals(str(settings.trainer.default_local_dir)):
        if not parsed.until_it_fits:
            more = "\n  Or add --until-it-fits to the command: it finds settings that fit, and prints them"
            return train_or_advise(settings, more)
        from verl_memopt.plan.until_it_fits import CommandLine, train_until_it_fits

        return train_until_it_fits(CommandLine(prog, parsed.config_name, parsed.config_dir, tuple(parsed.overrides)), train)


def train_or_advise(settings: Settings, more: str = "", listener: Listener | None = None, rows: PythonRows | None = None) -> int:
    """Call :func:`train`. Append to an out-of-memory error the settings that together free enough memory, and ``more``."""
    try:
        return train(settings, listener, rows)
    except (DeviceMemoryError, HostMemoryError) as error:
        from verl_memopt.plan.until_it_fits import set_together

        error.args = (f"{error}{set_together(error, settings)}{more}",)
        raise


def train(settings: Settings, listener: Listener | None = None, rows: PythonRows | None = None) -> int:
    """Train, and return the exit code: 0 = done; 130, 143 or 129 = a signal stopped the run.

    With ``trainer.resume_mode=auto`` a checkpoint that cannot be loaded is skipped, and the run resumes at the one before it.
    All processes of the run have ended when this function returns or raises.

    Args:
        settings: Settings of the run.
        listener: Called at every ``Moment`` of the run. It may end the run.
        rows: The training rows, if this process streams them.
    """
    from verl_memopt.model.folder import resolve_folder
    from verl_memopt.observe.own_files import private_files
    from verl_memopt.run.interrupts import process_interrupts

    # Download the model before Ray's processes start, because they would wait for it.
    model = settings.actor_rollout_ref.model
    resolve_folder(model.path, "actor_rollout_ref.model.path", bool(model.trust_remote_code))
    with private_files(settings.trainer.private_files), process_interrupts() as interrupts:
        unreadable: dict[int, str] = {}
        while True:
            with _begun_workers(settings) as begun:
                try:
                    return _train(settings, begun, unreadable, interrupts, listener, rows)
                except UnreadableCheckpointError as error:
                    if settings.trainer.resume_mode != "auto":
                        raise
                    # Workers that failed to load a checkpoint are in an unknown state, so new workers load the one before it.
                    unreadable[error.step] = error.fault


def _train(
    settings: Settings,
    begun: RayGroup | None,
    unreadable: dict[int, str],
    interrupts: Interrupts,
    listener: Listener | None,
    rows: PythonRows | None,
) -> int:
    from verl_memopt.observe.phase import PhaseClock
    from verl_memopt.trainer.build import build_run
    from verl_memopt.trainer.loop import TrainingLoop, start_rewards, start_workers
    from verl_memopt.trainer.replay import debug_settings, mode_of
    from verl_memopt.trainer.reporter import Reporter

    settings, clock = debug_settings(settings), PhaseClock()
    custom, reward_model, scores = settings.custom_reward_function, settings.reward_model, mode_of(settings).scores
    context = build_run(settings, unreadable, rows)
    with (
        context.lock,
        start_rewards(custom, reward_model, context.environment.run_dir) if scores else nullcontext() as rewards,
        Reporter(context, clock) as reporter,
    ):
        try:
            if begun is not None:  # use the time in which this process waits for Ray's workers
                _import_aside("matplotlib.backends.backend_agg")
            with start_workers(context, clock, begun) as workers:
                TrainingLoop(context, workers, rewards, reporter, interrupts, listener).run()
                reporter.draw_aside()
        except KeyboardInterrupt:
            reporter.say("stopped at once; a new start resumes at the last checkpoint")
        except UnreadableCheckpointError:
            raise
        except UserError:
            reporter.say(f"the record so far: {reporter.folder.path}")
            raise
        reporter.finish()
        return interrupts.exit_code or 0


@contextmanager
def _begun_workers(settings: Settings) -> Iterator[RayGroup | None]:
    """Start Ray's processes early. They import a worker's modules while this process checks the run. Yield None without Ray."""
    if settings.trainer.worker_group != "ray" or settings.debug.mode != "off":
        yield None
        return
    from verl_memopt.run.builds import device_of
    from verl_memopt.run.processes import uncollected
    from verl_memopt.worker.ray_group import group_of

    device = device_of(settings.trainer.device)
    ahead = ("verl_memopt.worker.worker:import_ahead", settings.actor_rollout_ref.rollout.name, device)
    group = group_of(settings, device, ahead)
    try:
        # Import only after Ray has started: on two cores, importing at the same time would slow Ray's start by half.
        with uncollected():
            importlib.import_module("verl_memopt.trainer.loop")
        gc.freeze()  # garbage collections during the run skip the imported objects
        yield group
    finally:
        group.shutdown()
        gc.unfreeze()


def _import_aside(module: str) -> threading.Thread:
    # Ignore the error of a broken package here. The next import of the module, outside this thread, raises it again.
    from verl_memopt.run.processes import uncollected

    def quietly() -> None:
        with suppress(Exception), uncollected():
            importlib.import_module(module)

    thread = threading.Thread(target=quietly, name=f"imports {module}")
    thread.start()
    return thread


if __name__ == "__main__":
    sys.exit(main())
