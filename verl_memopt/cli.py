"""The program ``verl-memopt`` with its commands (``train``, ``sft``, ``chat``, ``fit``, ...), including those of recipes."""

from __future__ import annotations

import argparse
import io
import json
import logging
import pkgutil
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path

from verl_memopt import __version__
from verl_memopt.recipes import RECIPES
from verl_memopt.run.argument_types import gigabytes_of, new_file_of, path_of, seconds_of, size_of, step_of
from verl_memopt.run.interrupts import guarded
from verl_memopt.trainer.main_ppo import ENTRIES, build_parser, run


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"verl-memopt {command}", description=description)


def report_command(arguments: Sequence[str]) -> int:
    parser = _parser("report", "Make a run's summary and charts again, or compare runs.")
    parser.add_argument("run_dirs", nargs="+", type=path_of, metavar="RUN_DIR", help="folder that a run printed as its last line")
    parser.add_argument("--out", type=path_of, default=None, help="where to put the charts (default: the run's own folder)")
    parsed = parser.parse_args(arguments)
    from verl_memopt.observe.charts import report

    report(parsed.run_dirs, parsed.out)
    return 0


def samples_command(arguments: Sequence[str]) -> int:
    parser = _parser("samples", "Show answers of a run: their turns, tool calls and scores, or the tokens of each turn.")
    parser.add_argument("source", type=path_of, metavar="RUN_DIR | FILE", help="folder of a run, or a file of samples (.jsonl)")
    parser.add_argument("--step", type=int, default=None, help="show the samples of this step (default: the last)")
    parser.add_argument("--number", type=int, default=4, help="largest number of samples to show (default: 4)")
    parser.add_argument("--tokens", action="store_true", help="show which tokens the model read, and which it sampled")
    parser.add_argument("--tokenizer", type=path_of, default=None, metavar="DIR", help="tokenizer of a file of samples")
    parsed = parser.parse_args(arguments)
    from verl_memopt.run.show_samples import show_samples

    show_samples(parsed.source, parsed.step, parsed.number, parsed.tokens, parsed.tokenizer)
    return 0


def check_command(arguments: Sequence[str]) -> int:
    parser = _parser(
        "check",
        "Verify every file of a run's checkpoints, and the record of an ended run. The exit code is 1 if a file is damaged.",
    )
    parser.add_argument("run_dir", type=path_of, metavar="RUN_DIR", help="folder that a run printed as its last line")
    parsed = parser.parse_args(arguments)
    from verl_memopt.run.checkpoints import check_folder

    return check_folder(parsed.run_dir)


def export_command(arguments: Sequence[str]) -> int:
    parser = _parser("export", "Write the model of a checkpoint as a folder that transformers and vLLM load. It needs no GPU.")
    parser.add_argument(
        "source", type=path_of, metavar="RUN | CHECKPOINT", help="run folder, or one of its global_step_N folders"
    )
    parser.add_argument("folder", type=path_of, metavar="DIR", help="where to put the model; new, or empty")
    parser.add_argument("--step", type=step_of, metavar="{N,best}", help="which checkpoint of the run (default: the newest)")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="dtype of the weights (default: that of the starting model)"
    )
    parser.add_argument("--adapter-only", action="store_true", help="write the LoRA adapter alone, in peft's format")
    parser.add_argument("--critic", action="store_true", help="write the critic instead of the policy")
    parser.add_argument("--base", metavar="FOLDER", help="base model of the adapter, if it has moved since the run")
    parsed = parser.parse_args(arguments)
    from verl_memopt.model.packed_model import dtype_of
    from verl_memopt.run.export_model import StoredModel, check_empty, export_adapter, export_model, held_checkpoint

    folder = parsed.folder.expanduser().resolve()
    check_empty(folder)
    with held_checkpoint(parsed.source, parsed.step) as checkpoint:
        model = StoredModel(checkpoint, "critic" if parsed.critic else "actor", parsed.base)
        if parsed.adapter_only:
            export_adapter(model, folder)
        else:
            export_model(model, folder, None if parsed.dtype is None else dtype_of(parsed.dtype, "--dtype"))
    sys.stdout.write(f"step {model.checkpoint.step} of {model.checkpoint.folder.parent} is in\n{parsed.folder}\n")
    return 0


def chat_command(arguments: Sequence[str]) -> int:
    parser = _parser("chat", "Talk to a trained model in the terminal, on a CPU or a GPU.")
    parser.add_argument(
        "source", type=path_of, metavar="RUN | DIR | CHECKPOINT", help="run folder, model folder, or a global_step_N folder"
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="answer this prompt and exit (default: read prompts from standard input)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--remember", action="store_true", help="keep the conversation (default: each prompt starts a new one)")
    parser.add_argument(
        "--temperature", type=float, help="0 = always the most likely token (default: from the model's generation_config.json)"
    )
    parser.add_argument("--max-tokens", type=size_of, default=512, help="longest answer in tokens (default: 512)")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto", help="device that runs the model")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model's folder contains")
    parsed = parser.parse_args(arguments)
    from verl_memopt.config.role_settings import LEAST_TEMPERATURE
    from verl_memopt.run.chat import ChatOptions, chat

    if parsed.temperature is not None and not (parsed.temperature == 0 or LEAST_TEMPERATURE <= parsed.temperature < float("inf")):
        parser.error(f"--temperature {parsed.temperature}: it must be 0, or at least {LEAST_TEMPERATURE}")
    options = ChatOptions(parsed.temperature, parsed.max_tokens, parsed.system, parsed.remember)
    return chat(parsed.source, parsed.prompt, parsed.device, parsed.trust_remote_code, options)


def toy_command(arguments: Sequence[str]) -> int:
    parser = _parser("toy", "Make the toy task: a tiny warmed-up model and its data.")
    parser.add_argument("folder", type=path_of, help="where to put model/, train.parquet and val.parquet")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and warm-up (default: 0)")
    parsed = parser.parse_args(arguments)
    from verl_memopt.data.toy import make_toy
    from verl_memopt.observe.log_setup import setup_logging

    setup_logging()
    make_toy(parsed.folder, seed=parsed.seed)
    return 0


def knobs_command(arguments: Sequence[str]) -> int:
    parser = _parser("knobs", "List the memory knobs, or measure them on a model.")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        type=lambda text: text if text == "-" else new_file_of(text),
        metavar="FILE",
        help="print the knobs as JSON; with --measure, write the ladder to FILE after each row",
    )
    parser.add_argument(
        "--measure", action="store_true", help="measure the same update with no knob, then with one knob more in each row"
    )
    parser.add_argument("--model", help="model folder to measure")
    parser.add_argument("--shape", help="make a model of this shape with random weights, and measure it: qwen3-0.6b")
    parser.add_argument("--layers", type=size_of, help="decoder blocks of the made model (default: as in --shape)")
    parser.add_argument("--vocabulary", type=int, help="vocabulary size of the made model (default: as in --shape)")
    parser.add_argument("--rows", type=size_of, default=8, help="rollouts in the update (default: 8)")
    parser.add_argument("--prompt", type=size_of, default=1024, help="tokens of each prompt (default: 1024)")
    parser.add_argument("--response", type=size_of, default=256, help="tokens of each response (default: 256)")
    parser.add_argument("--only", nargs="*", default=[], metavar="KNOB", help="measure the rows of these knobs only")
    parser.add_argument("--text", type=new_file_of, metavar="FILE", help="also write the tables to FILE, after each row")
    parser.add_argument("--png", type=new_file_of, metavar="FILE", help="draw the ladder as a chart into FILE")
    parser.add_argument(
        "words", nargs="*", metavar="NAME | key=value", help="a knob to show in full; with --measure, a setting for every row"
    )
    parsed = parser.parse_intermixed_args(arguments)
    # argparse gives --only every word that follows it. No knob's name has a "=", so such a word is a setting.
    parsed.words += [word for word in parsed.only if "=" in word]
    parsed.only = [word for word in parsed.only if "=" not in word]
    return _measure_knobs(parsed, parser) if parsed.measure else _show_knobs(parsed, parser)


def _program() -> str:
    # The advice is pasted into a shell. If the shell does not find the short name, show the path that the user typed.
    typed = sys.argv[0]
    return typed if Path(typed).name == "verl-memopt" and shutil.which("verl-memopt") is None else "verl-memopt"


def _show_knobs(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from rich.console import Console

    from verl_memopt.memory.knob import as_json, knobs
    from verl_memopt.plan.list_knobs import print_knob, print_knobs

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
    from verl_memopt.ladder.measure import UpdateSize
    from verl_memopt.observe.log_setup import setup_logging

    if (parsed.model is None) == (parsed.shape is None):
        parser.error("--measure needs --model FOLDER or --shape NAME")
    if parsed.json == "-":
        parser.error("--measure writes the ladder to a file: --json FILE")
    setup_logging()
    name = parsed.model or f"{parsed.shape}" + (f", {parsed.layers} layers" if parsed.layers else "")
    work = UpdateSize(parsed.rows, parsed.prompt, parsed.response, group=parsed.rows)
    record = command.LadderRecord(name, work, parsed.json, parsed.text, parsed.png)
    console = Console(highlight=False, width=max(command.WIDTH, Console().width))
    with model_folder(parsed, parser) as folder:
        return command.measure_ladder(folder, work, parsed.words, parsed.only, record, console)


@contextmanager
def model_folder(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> Iterator[Path]:
    if parsed.model is not None:
        yield Path(parsed.model)
        return
    from dataclasses import replace

    from verl_memopt.model.tiny import SHAPES, SMALLEST_VOCABULARY, make_tiny_model

    if parsed.shape not in SHAPES:
        parser.error(f"--shape {parsed.shape}: unknown. Use {', '.join(SHAPES)}, or --model FOLDER.")
    if parsed.vocabulary is not None and parsed.vocabulary < SMALLEST_VOCABULARY:
        parser.error(f"--vocabulary {parsed.vocabulary}: too small. The tokenizer needs at least {SMALLEST_VOCABULARY}.")
    sizes = {"num_layers": parsed.layers, "vocab_size": parsed.vocabulary}
    shape = replace(SHAPES[parsed.shape], **{name: size for name, size in sizes.items() if size is not None})
    with tempfile.TemporaryDirectory() as parent:
        yield make_tiny_model(Path(parent) / "model", shape)


def fit_command(arguments: Sequence[str]) -> int:
    parser = _parser("fit", "Estimate whether a run fits on a card, and what would make it fit. Needs no weights and no GPU.")
    parser.usage = "%(prog)s [--memory GB] [--gpus N] [--host-memory GB] [--json] [--config-name NAME] [key=value ...]"
    parser.add_argument(
        "--memory", type=gigabytes_of, metavar="GB", help="memory of the card (default: from the profile, such as memory=24g)"
    )
    parser.add_argument("--gpus", type=size_of, metavar="N", help="cards in the machine (trainer.n_gpus_per_node)")
    parser.add_argument(
        "--host-memory", type=gigabytes_of, metavar="GB", help="host memory of the machine, for what is offloaded"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, in bytes and tokens")
    parser.add_argument("--config-name", default="ppo_trainer", help=ENTRIES)
    parser.add_argument("--config-dir", "--config-path", default=None, help="folder of a recipe's YAML")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="any setting that train takes")
    parsed = parser.parse_intermixed_args(arguments)
    from verl_memopt.config.loader import load_settings
    from verl_memopt.observe.log_setup import setup_logging
    from verl_memopt.plan.report import command
    from verl_memopt.plan.until_it_fits import CommandLine
    from verl_memopt.plan.verdict import card_asked_for

    setup_logging(level=logging.ERROR)
    # The estimate reads no rows, so the command line need not name data files.
    overrides = ["data.train_files=none", "data.val_files=null", *parsed.overrides]
    if parsed.config_dir is None and not any(re.match(r"memory=|.*(micro_batch_size|dynamic_bsz)", word) for word in overrides):
        # verl's defaults set no micro-batch size, and the estimate needs one.
        overrides.append("actor_rollout_ref.actor.use_dynamic_bsz=true")
    overrides += [] if parsed.gpus is None else [f"trainer.n_gpus_per_node={parsed.gpus}"]
    settings = load_settings(parsed.config_name, overrides, parsed.config_dir)
    line = CommandLine(f"{_program()} train", parsed.config_name, parsed.config_dir, tuple(overrides[2:]))
    return command(settings, card_asked_for(settings, parsed.memory, parsed.host_memory), line, parsed.json)


def completion_command(arguments: Sequence[str]) -> int:
    parser = _parser("completion", "Print a shell script that completes commands, options and settings with Tab.")
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help='bash and zsh: eval "$(verl-memopt completion bash)"')
    parsed = parser.parse_args(arguments)
    from verl_memopt.config.keys import leaf_types
    from verl_memopt.config.loader import PACKAGED
    from verl_memopt.config.trl_names import SPELLINGS
    from verl_memopt.run.completion import Completed, script_of

    commands = {}
    for name, (function, line) in COMMANDS.items():
        # Read the options from each command's help, so that there is no second list to keep up to date.
        shown = io.StringIO()
        with redirect_stdout(shown), suppress(SystemExit):
            pkgutil.resolve_name(function)(["--help"])
        options = dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z-]*", shown.getvalue()))
        commands[name] = Completed(line, [option for option in options if option != "--help"], "key=value" in shown.getvalue())
    names = [*leaf_types(), *(name for spelling in SPELLINGS for name in spelling.names)]
    groups = sorted(f"{path.parent.name}={path.stem}" for path in PACKAGED.glob("*/*.yaml"))
    settings = [*(f"{name}=" for name in dict.fromkeys(names)), *groups]
    sys.stdout.write(script_of(parsed.shell, commands, settings))
    return 0


def calibrate_command(arguments: Sequence[str]) -> int:
    parser = _parser("calibrate", "Measure the speed of this machine, from which fit estimates the seconds of a step.")
    parser.add_argument(
        "--seconds", type=seconds_of, default=30, metavar="N", help="approximate duration in seconds (default: 30)"
    )
    parser.add_argument(
        "--device", choices=["auto", "cuda", "cpu"], default="auto", help="device to measure (default: a GPU if there is one)"
    )
    parsed = parser.parse_args(arguments)
    import torch

    from verl_memopt.distributed.device import resolve_device
    from verl_memopt.plan.calibrate import command

    sys.stdout.write(command(torch.device(resolve_device(parsed.device)), parsed.seconds))
    return 0


def sft(
    arguments: Sequence[str] | None,
    prog: str = "verl-memopt sft",
    config_name: str = "sft_trainer",
    config_dir: str | None = None,
) -> int:
    """Run supervised fine-tuning, and return the exit code.

    Args:
        arguments: None = the command line of this process.
        prog: Name of the command in its help.
        config_name: Used if the command line gives no ``--config-name``.
        config_dir: Used if the command line gives no ``--config-dir``.
    """
    description = "Teach a model the responses of a dataset (supervised fine-tuning)."
    parser = build_parser(prog, description, config_name, f"{config_name} (the default), or a file of --config-dir")
    parser.set_defaults(config_dir=config_dir)
    from verl_memopt.algorithms.records import SFT

    return run(arguments, parser, estimator=SFT)


COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("verl_memopt.trainer.main_ppo:run", "train a policy (Hydra overrides: key=value)"),
    "sft": ("verl_memopt.cli:sft", "teach a model the responses of a dataset, before RL"),
    "chat": ("verl_memopt.cli:chat_command", "talk to a trained model in the terminal"),
    "export": ("verl_memopt.cli:export_command", "write the model of a checkpoint for other programs to load"),
    "report": ("verl_memopt.cli:report_command", "make a run's summary and charts again, or compare several runs"),
    "samples": ("verl_memopt.cli:samples_command", "show answers of a run, turn by turn or token by token"),
    "check": ("verl_memopt.cli:check_command", "verify every checkpoint of a run"),
    **{name: command for recipe in RECIPES.values() for name, command in recipe.commands.items()},
    "fit": ("verl_memopt.cli:fit_command", "estimate whether a run fits on a card, without weights or a GPU"),
    "calibrate": ("verl_memopt.cli:calibrate_command", "measure the speed of this machine, for the estimates of fit"),
    "knobs": ("verl_memopt.cli:knobs_command", "list the memory knobs, or measure them on a model"),
    "completion": ("verl_memopt.cli:completion_command", "let a shell complete commands and settings with Tab"),
    "toy": ("verl_memopt.cli:toy_command", "make the toy task: a tiny model and its data, locally"),
}
"""Command -> the function that runs it (called with the arguments, imported on use), and its line in the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    A :class:`UserError` is printed without a traceback. ``argv`` is the command line without the program's name. None = the
    command line of this process. Only then its signals are handled too.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        return guarded(lambda: pkgutil.resolve_name(COMMANDS[arguments[0]][0])(arguments[1:]), watched=argv is None)
    lines = "\n".join(f"  {name:10} {text}" for name, (_, text) in COMMANDS.items())
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
