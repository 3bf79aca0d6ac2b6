"""The study's commands: ``run`` measures, ``combine`` makes one table of it, ``charts`` draws it, ``study`` does all three."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from recipe.rloo.memory_study.arms import ARMS, EXPANSIONS, Arm, quick_arms, select
from recipe.rloo.memory_study.charts import draw_all
from recipe.rloo.memory_study.combine import SUMMARY_NAME, combine
from recipe.rloo.memory_study.monitor import PERIOD_SECONDS, NoNvmlError, open_device
from recipe.rloo.memory_study.plan import CPU, CUDA, DEVICES, MOST_CPU_BYTES, QUICK_CPU_BYTES, device_chooser, needed_bytes
from recipe.rloo.memory_study.records import COMPLETED, EXIT_CODES, REFUSED, Cell, CellResult, worst
from recipe.rloo.memory_study.report import cell_line, report
from recipe.rloo.memory_study.runner import CELLS, MEASURE, How, run_study
from verl_memopt.distributed.device import device_count
from verl_memopt.errors import UserError

GIB = 2**30
PRELOAD = "recipe.rloo.memory_study.preload"
SHAPE = (3015, 100, 151_669)
"""Tokens of a prompt, tokens of a response, vocabulary: what the choice of the device goes by."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: every cell completed. 1: one failed. 2: a setting was refused. 3: one ran out of memory. 4: arms that must compute the same
    did not. 5: one ran into the time limit. Where several apply, it is the first of 1, 4, 5, 2, 3. What completed is on file in
    every case.
    """
    options = parse(argv)
    try:
        outcomes = options.command(options)
    except UserError as error:
        sys.stderr.write(f"memory_study: {error}\n")
        return EXIT_CODES[REFUSED]
    return EXIT_CODES[worst(outcomes)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(prog="python -m recipe.rloo.memory_study", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, text in (
        ("study", study, "measure, combine and draw"),
        ("run", run, "measure the arms"),
        ("combine", combine_results, "make combined.csv and summary.json, and check the controls"),
        ("charts", charts, "draw the four charts"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        sub.add_argument("--out", type=Path, default=Path("results"), help="folder of the results (default: %(default)s)")
        if name in ("study", "run"):
            _add_run_options(sub)
    return parser.parse_args(argv)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="every arm once at k = 2, 4, 8, in minutes on a CPU")
    add(
        "--device",
        choices=DEVICES,
        default="auto",
        help="auto: a GPU if there is one, else real tensors where they fit, else fake",
    )
    add("--expansion", nargs="+", choices=EXPANSIONS, default=[], help="only arms with these expansions")
    add("--arm", nargs="+", metavar="NAME", default=[], choices=sorted({arm.name for arm in ARMS}), help="only these arms")
    add("--k", nargs="+", type=int, default=[], help="only these group sizes of 2, 4, 8 (and no larger ones)")
    add("--repeats", type=int, help="processes for each cell (default: 3, with --quick 1)")
    add("--seed", type=int, default=0, help="seed of ids, weights and order (default: %(default)s)")
    add("--device-limit-gb", type=float, help="limit of the device's memory, as memory.device_limit_gb (default: none)")
    add(
        "--cpu-limit-gb",
        type=float,
        help="largest arm that runs with real tensors on a CPU (default: 20, or half of what is free)",
    )
    add("--time-limit", type=float, default=600.0, help="seconds of a cell (default: %(default)s)")
    add("--jobs", type=int, default=1, help="cells at the same time; 1 on a GPU (default: %(default)s)")
    add("--period", type=float, default=PERIOD_SECONDS, help="seconds between readings of a GPU (default: %(default)s)")
    add("--documents", type=Path, help="GovReport (.jsonl) or a text file, for the prompt (default: random words, made locally)")
    add("--measure", default=MEASURE, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> set[str]:
    """Measure the arms, print a line for each cell, and return the outcomes."""
    arms = chosen_arms(options)
    has_gpu = device_count(CUDA) > 0
    if options.device == CUDA and not has_gpu:
        raise UserError("--device cuda: no GPU is visible to this process. Use --device auto or fake.")
    refuse_too_large(options, arms)
    on_gpu = has_gpu and options.device in ("auto", CUDA)
    preload = (PRELOAD,) if options.measure == MEASURE and not has_gpu else ()
    how = How(options.out, options.measure, options.time_limit, 1 if on_gpu else options.jobs, options.period)
    how = dataclasses.replace(how, preload=preload, documents=documents_of(options))
    _say_sampler(on_gpu)
    limit = None if options.device_limit_gb is None else int(options.device_limit_gb * GIB)
    devices = device_chooser(options.device, has_gpu, cpu_bytes(options), SHAPE)
    repeats = options.repeats or (1 if options.quick else 3)
    outcomes, planned = set[str](), list[Cell]()
    results = run_study(arms, repeats, options.seed, devices, limit, how, not (options.quick or options.k), planned)
    for number, result in enumerate(results, start=1):
        if counts(result, limit):
            outcomes.add(result.outcome)
        sys.stdout.write(f"{number} of {len(planned)}  {cell_line(result)}\n")
        sys.stdout.flush()
    return outcomes


def counts(result: CellResult, limit_bytes: int | None) -> bool:
    """Return whether a result decides the study's exit code: what a simulation needs beyond the limit does not."""
    return result.cell.limit_bytes == limit_bytes


def chosen_arms(options: argparse.Namespace) -> list[Arm]:
    """Return the arms that the options ask for.

    Raises:
        UserError: There is none.
    """
    arms = select(quick_arms() if options.quick else ARMS, options.expansion, options.arm, options.k)
    if not arms:
        raise UserError("no arm has this expansion, name and group size together. Leave one of --expansion, --arm, --k out.")
    return arms


def refuse_too_large(options: argparse.Namespace, arms: Sequence[Arm]) -> None:
    """Refuse real tensors on a CPU for arms that need more than the limit for them.

    Raises:
        UserError: There is such an arm.
    """
    needs = {arm.cell: needed_bytes(arm, *SHAPE) for arm in arms} if options.device == CPU else {}
    largest = max(needs, key=lambda cell: needs[cell], default="")
    if largest and needs[largest] > cpu_bytes(options):
        raise UserError(
            f"--device cpu: {largest} needs about {needs[largest] / GIB:.0f} GiB of real tensors, and the limit is "
            f"{cpu_bytes(options) / GIB:.0f}. Raise --cpu-limit-gb if this machine has as much, or use --device auto."
        )


def documents_of(options: argparse.Namespace) -> str | None:
    """Return where the documents are, as an absolute path, or None.

    Raises:
        UserError: There is nothing.
    """
    if options.documents is None:
        return None
    if not options.documents.exists():
        raise UserError(f"--documents {options.documents}: no such file or folder.")
    return str(options.documents.resolve())


def cpu_bytes(options: argparse.Namespace) -> int:
    """Return the largest need of an arm that runs with real tensors on a CPU."""
    if options.cpu_limit_gb is not None:
        return int(options.cpu_limit_gb * GIB)
    return min(QUICK_CPU_BYTES if options.quick else MOST_CPU_BYTES, psutil.virtual_memory().available // 2)


def _say_sampler(on_gpu: bool) -> None:
    """Say once whether the device is sampled through NVML."""
    if not on_gpu:
        sys.stdout.write("no GPU: bytes are counted, not sampled; the columns of the device sampler stay empty\n")
        return
    try:
        open_device(0)
    except NoNvmlError as error:
        sys.stdout.write(f"the device is not sampled: {error}\n")


def combine_results(options: argparse.Namespace) -> set[str]:
    """Write combined.csv and summary.json, print the report, and return the outcomes."""
    summary = combine(options.out)
    sys.stdout.write(report(summary) + "\n")
    return set(summary["outcomes"])


def charts(options: argparse.Namespace) -> set[str]:
    """Draw the charts and print their paths. Cells that are not in the summary yet are combined first."""
    summary, cells = options.out / SUMMARY_NAME, (options.out / CELLS).glob("*.json")
    if not summary.exists() or any(cell.stat().st_mtime > summary.stat().st_mtime for cell in cells):
        combine(options.out)
    for path in draw_all(options.out):
        sys.stdout.write(f"{path}\n")
    return {COMPLETED}


def study(options: argparse.Namespace) -> set[str]:
    """Measure, combine and draw, whatever became of single cells, and return all outcomes."""
    return run(options) | combine_results(options) | charts(options)


if __name__ == "__main__":
    raise SystemExit(main())
