"""The command line: ``verl-memopt train | sft | report | check | knobs | toy``, and the commands of recipes."""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from verl_memopt import __version__
from verl_memopt.errors import UserError
from verl_memopt.recipes.registry import RECIPES
from verl_memopt.trainer.signal_watch import SignalWatch


def report_command(arguments: Sequence[str]) -> int:
    """Run ``verl-memopt report``."""
    parser = argparse.ArgumentParser(
        prog="verl-memopt report", description="Make a run's summary and charts again, or compare runs."
    )
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="folder that a run printed as its last line")
    parser.add_argument("--out", type=Path, default=None, help="where to put the charts (default: the run's own folder)")
    parsed = parser.parse_args(arguments)
    from verl_memopt.observe.report import report

    report(parsed.run_dirs, parsed.out)
    return 0


def check_command(arguments: Sequence[str]) -> int:
    """Run ``verl-memopt check``."""
    parser = argparse.ArgumentParser(
        prog="verl-memopt check",
        description="Verify every checkpoint of a run, file by file. The exit code is 1 where one is not whole.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder that a run printed as its last line")
    parsed = parser.parse_args(arguments)
    from verl_memopt.trainer.check_command import check_folder

    return check_folder(parsed.run_dir)


def toy_command(arguments: Sequence[str]) -> int:
    """Run ``verl-memopt toy``."""
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


def knobs_command(arguments: Sequence[str]) -> int:
    """Run ``verl-memopt knobs``."""
    parser = argparse.ArgumentParser(prog="verl-memopt knobs", description="List the memory knobs, or measure them on a model.")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print the index as JSON; with --measure write the ladder to FILE, after each row",
    )
    parser.add_argument("--measure", action="store_true", help="run one update of --model from all knobs off to all on")
    parser.add_argument("--model", help="model folder to measure")
    parser.add_argument("--shape", help="measure a model of this shape with random weights, made for it: qwen3-0.6b")
    parser.add_argument("--layers", type=_size, help="decoder blocks of --shape (default: all of them)")
    parser.add_argument("--vocabulary", type=int, help="rows of the embedding of --shape (default: its own)")
    parser.add_argument("--rows", type=_size, default=8, help="rollouts in the update (default: 8)")
    parser.add_argument("--prompt", type=_size, default=1024, help="tokens of each prompt (default: 1024)")
    parser.add_argument("--response", type=_size, default=256, help="tokens of each response (default: 256)")
    parser.add_argument("--only", nargs="*", default=[], metavar="KNOB", help="measure the rows of these knobs only")
    parser.add_argument("--text", type=Path, metavar="FILE", help="write the tables to FILE too, after each row")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the ladder")
    parser.add_argument(
        "words", nargs="*", metavar="NAME | key=value", help="a knob to show in full; with --measure, settings of every row"
    )
    parsed = parser.parse_intermixed_args(arguments)
    # argparse gives --only every word that follows it. No knob's name has a "=", so such a word is a setting.
    parsed.words += [word for word in parsed.only if "=" in word]
    parsed.only = [word for word in parsed.only if "=" not in word]
    return _measure_knobs(parsed, parser) if parsed.measure else _show_knobs(parsed, parser)


def _size(text: str) -> int:
    """Return a number of the command line that must be at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _show_knobs(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from rich.console import Console

    from verl_memopt.knobs.console import print_knob, print_knobs
    from verl_memopt.knobs.knob import as_json, knobs

    named = {knob.name: knob for knob in knobs()}
    unknown = [word for word in parsed.words if word not in named]
    if unknown:
        parser.error(f"{unknown[0]}: no such knob. Choose among {', '.join(named)}.")
    console = Console(highlight=False)
    if parsed.json is not None:
        sys.stdout.write(json.dumps(as_json(), indent=2) + "\n")
    elif parsed.words:
        for word in parsed.words:
            print_knob(named[word], console)
    else:
        print_knobs(console)
    return 0


def _measure_knobs(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from rich.console import Console

    from verl_memopt.ladder import command
    from verl_memopt.ladder.plan import Work
    from verl_memopt.observe.log_setup import setup_logging

    if (parsed.model is None) == (parsed.shape is None):
        parser.error("--measure needs --model FOLDER or --shape NAME")
    if parsed.json == "-":
        parser.error("--measure writes the ladder to a file: --json FILE")
    setup_logging()
    name = parsed.model or f"{parsed.shape}" + (f", {parsed.layers} layers" if parsed.layers else "")
    work = Work(parsed.rows, parsed.prompt, parsed.response, group=parsed.rows)
    json_path = None if parsed.json is None else Path(parsed.json)
    record = command.LadderRecord(name, work, json_path, parsed.text, parsed.png)
    console = Console(highlight=False, width=max(command.WIDTH, Console().width))
    with model_folder(parsed, parser) as folder:
        return command.measure_ladder(folder, work, parsed.words, parsed.only, record, console)


@contextmanager
def model_folder(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> Iterator[Path]:
    """Yield the folder of ``--model``, or one made for ``--shape`` and removed afterwards."""
    if parsed.model is not None:
        yield Path(parsed.model)
        return
    from dataclasses import replace

    from verl_memopt.models.tiny import SHAPES, make_tiny_model
    from verl_memopt.models.tokenizer import SMALLEST_VOCABULARY

    if parsed.shape not in SHAPES:
        parser.error(f"--shape {parsed.shape}: unknown. Use {', '.join(SHAPES)}, or --model FOLDER.")
    if parsed.vocabulary is not None and parsed.vocabulary < SMALLEST_VOCABULARY:
        parser.error(f"--vocabulary {parsed.vocabulary}: too small. The tokenizer needs at least {SMALLEST_VOCABULARY}.")
    sizes = {"num_layers": parsed.layers, "vocab_size": parsed.vocabulary}
    shape = replace(SHAPES[parsed.shape], **{name: size for name, size in sizes.items() if size is not None})
    with tempfile.TemporaryDirectory() as parent:
        yield make_tiny_model(Path(parent) / "model", shape)


COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("verl_memopt.trainer.run:run", "train a policy (Hydra overrides: key=value)"),
    "sft": ("verl_memopt.trainer.run:sft", "teach a model the responses of a dataset, before RL"),
    "report": ("verl_memopt.cli:report_command", "make a run's summary and charts again, or compare several runs"),
    "check": ("verl_memopt.cli:check_command", "verify every checkpoint of a run"),
    **{name: command for recipe in RECIPES.values() for name, command in recipe.commands.items()},
    "knobs": ("verl_memopt.cli:knobs_command", "list the memory knobs, or measure them on a model"),
    "toy": ("verl_memopt.cli:toy_command", "make the toy task: a tiny model and its data, locally"),
}
"""Command -> the function that runs it, which takes the arguments and is imported on use, and the line of the help."""


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
            exit_code: int = pkgutil.resolve_name(COMMANDS[arguments[0]][0])(arguments[1:])
            return exit_code
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
