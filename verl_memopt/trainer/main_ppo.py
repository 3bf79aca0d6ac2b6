"""``python -m verl_memopt.trainer.main_ppo``: the training entry under verl's module name, with the same overrides."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from verl_memopt.errors import UserError
from verl_memopt.trainer.signal_watch import SignalWatch

USAGE = "%(prog)s [--config-name NAME] [--config-dir FOLDER] [--cfg job] [key=value ...]"


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Gives the parser of the training entry."""
    parser = argparse.ArgumentParser(prog=prog, usage=USAGE, description="Train a policy with RLOO or GRPO.")
    entries = "ppo_trainer (the default: verl's defaults), rloo_trainer, grpo_trainer, or a file of --config-dir"
    parser.add_argument("--config-name", default="ppo_trainer", help=entries)
    parser.add_argument("--config-dir", "--config-path", default=None, help="folder of a recipe's YAML")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved settings as YAML and exit")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="any setting, under verl's key names")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Runs the training entry and gives its exit code. Errors: UserError."""
    from verl_memopt.config.loader import load_settings
    from verl_memopt.config.objective import log_objective
    from verl_memopt.config.plain import to_yaml
    from verl_memopt.observe.log_setup import setup_logging

    setup_logging(level=logging.INFO)
    settings = load_settings(arguments.config_name, arguments.overrides, arguments.config_dir)
    log_objective(settings)
    if arguments.cfg is not None or settings.debug.mode == "dry":
        sys.stdout.write(to_yaml(settings))
        return 0
    from verl_memopt.trainer.run import train

    return train(settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses, runs, and turns a user's error into its message and exit code.

    Without ``argv`` the process is this command's own, and its signals are watched from here to its end.
    """
    watch = SignalWatch() if argv is None else None
    try:
        return run(build_parser("python -m verl_memopt.trainer.main_ppo").parse_intermixed_args(argv))
    except UserError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    finally:
        if watch is not None:
            watch.hold_while_ending()


if __name__ == "__main__":
    sys.exit(main())
