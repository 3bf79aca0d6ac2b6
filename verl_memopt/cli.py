"""The command line: ``verl-memopt train | report | check | knobs | toy``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from verl_memopt import __version__
from verl_memopt.errors import UserError
from verl_memopt.trainer.signal_watch import SignalWatch


def _train(arguments: Sequence[str]) -> int:
    from verl_memopt.trainer.run import build_parser, run

    return run(build_parser("verl-memopt train").parse_intermixed_args(arguments))


def _report(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="verl-memopt report", description="Make a run's summary and charts again, or compare runs."
    )
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="folder that a run printed as its last line")
    parser.add_argument("--out", type=Path, default=None, help="where to put the charts (default: the run's own folder)")
    parsed = parser.parse_args(arguments)
    from verl_memopt.observe.report import report

    report(parsed.run_dirs, parsed.out)
    return 0


def _check(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="verl-memopt check",
        description="Verify every checkpoint of a run, file by file. The exit code is 1 where one is not whole.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder that a run printed as its last line")
    parsed = parser.parse_args(arguments)
    from verl_memopt.trainer.check_command import check_folder

    return check_folder(parsed.run_dir)


def _toy(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="verl-memopt toy", description="Make the toy task: a tiny warmed-up model and its data."
    )
    parser.add_argument("folder", type=Path, help="where to put model/, train.parquet and val.parquet")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and warm-up (default: 0)")
    parsed = parser.parse_args(arguments)
    from verl_memopt.data.toy import make_toy
    from verl_memopt.observe.log_setup import setup_logging

    setup_logging()
    make_toy(parsed.folder, seed=parsed.seed)
    return 0


def _knobs(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="verl-memopt knobs", description="List the memory knobs, or measure them on a model.")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print the index as JSON; with --measure write the ladder to FILE, after each rung",
    )
    parser.add_argument("--measure", action="store_true", help="run one update of --model from all knobs off to all on")
    parser.add_argument("--model", help="model folder to measure")
    parser.add_argument("--shape", help="measure a model of this shape with random weights, made for it: qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="decoder blocks of --shape (default: all of them)")
    parser.add_argument("--vocabulary", type=int, help="rows of the embedding of --shape (default: its own)")
    parser.add_argument("--rows", type=int, default=8, help="rollouts in the update (default: 8)")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt (default: 1024)")
    parser.add_argument("--response", type=int, default=256, help="tokens of each response (default: 256)")
    parser.add_argument("--only", nargs="*", default=[], metavar="KNOB", help="measure these rungs only")
    parser.add_argument("--text", type=Path, metavar="FILE", help="write the tables to FILE too, after each rung")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the ladder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of every rung")
    return knobs_command(parser.parse_intermixed_args(arguments), parser)


def knobs_command(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run ``verl-memopt knobs``."""
    from rich.console import Console

    from verl_memopt.memory.knobs import as_json, index
    from verl_memopt.observe.log_setup import setup_logging
    from verl_memopt.trainer import knob_report, ladder_command
    from verl_memopt.trainer.ladder_plan import Work

    if not parsed.measure:
        if parsed.json is not None:
            sys.stdout.write(json.dumps(as_json(index()), indent=2) + "\n")
        else:
            knob_report.print_index(index(), Console(highlight=False))
        return 0
    if (parsed.model is None) == (parsed.shape is None):
        parser.error("--measure needs --model FOLDER or --shape NAME")
    if parsed.json == "-":
        parser.error("--measure writes the ladder to a file: --json FILE")
    setup_logging()
    name = parsed.model or f"{parsed.shape}" + (f", {parsed.layers} layers" if parsed.layers else "")
    work = Work(parsed.rows, parsed.prompt, parsed.response, group=parsed.rows)
    json_path = None if parsed.json is None else Path(parsed.json)
    record = ladder_command.LadderRecord(name, work, json_path, parsed.text, parsed.png)
    console = Console(highlight=False, width=max(ladder_command.WIDTH, Console().width))
    with model_folder(parsed, parser) as folder:
        return ladder_command.measure_ladder(folder, work, parsed.overrides, parsed.only, record, console)


@contextmanager
def model_folder(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> Iterator[Path]:
    """Yield the folder of ``--model``, or one made for ``--shape`` and removed afterwards."""
    if parsed.model is not None:
        yield Path(parsed.model)
        return
    from dataclasses import replace

    from verl_memopt.models.tiny import SHAPES, make_tiny_model

    if parsed.shape not in SHAPES:
        parser.error(f"--shape {parsed.shape}: unknown. Use {', '.join(SHAPES)}, or --model FOLDER.")
    given = {"num_layers": parsed.layers, "vocab_size": parsed.vocabulary}
    shape = replace(SHAPES[parsed.shape], **{key: value for key, value in given.items() if value is not None})
    with tempfile.TemporaryDirectory() as parent:
        yield make_tiny_model(Path(parent) / "model", shape)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (_train, "train a policy (Hydra overrides: key=value)"),
    "report": (_report, "make a run's summary and charts again, or compare several runs"),
    "check": (_check, "verify every checkpoint of a run"),
    "knobs": (_knobs, "list the memory knobs, or measure them on a model"),
    "toy": (_toy, "make the toy task: a tiny model and its data, locally"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    A :class:`UserError` is printed as its message on standard error, without a traceback.

    Args:
        argv: The command line without the program's name. None = that of this process, whose signals are then watched to its end.
    """
    watch = SignalWatch() if argv is None else None
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        try:
            return COMMANDS[arguments[0]][0](arguments[1:])
        except UserError as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            return error.exit_code
        finally:
            if watch is not None:
                watch.hold_while_ending()
    lines = "\n".join(f"  {name:8} {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="verl-memopt",
        description=f"Reinforcement-learning post-training when device memory is scarce.\n\ncommands:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"verl-memopt {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="command")
    parser.parse_args(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
