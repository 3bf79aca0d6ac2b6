"""The commands of the study: ``run`` measures, ``combine`` makes one table, ``charts`` draws it, and ``study`` does all three.

Exit codes: 0 every cell completed, 1 a cell failed, 2 a setting was refused, 3 a cell ran out of memory, 4 arms that must compute
the same did not, 5 a cell exceeded the time limit. If several apply, the first of 1, 4, 5, 2, 3 counts. Complete cells are saved.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from recipe.rloo.memory_study.cells import (
    ARMS,
    AUTO,
    COMPLETED,
    CPU,
    CUDA,
    EXIT_CODES,
    EXPANSIONS,
    FAKE,
    GIB,
    MIB,
    REFUSED,
    Arm,
    Cell,
    CellResult,
    choose_device,
    needed_bytes,
    worst,
)
from recipe.rloo.memory_study.charts import draw_all
from recipe.rloo.memory_study.results import SUMMARY_NAME, combine, report
from recipe.rloo.memory_study.runner import CELLS, MEASURE, PRELOAD, How, NoNvmlError, open_device, run_study
from verl_memopt.distributed.device import device_count
from verl_memopt.errors import UserError

MOST_CPU_GIB, QUICK_CPU_GIB = 20.0, 1.0
"""Memory limits for real tensors on a CPU, in GiB. A quick study simulates more arms, so that it ends soon."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        outcomes = options.command(options)
    except UserError as error:
        sys.stderr.write(f"memory_study: {error}\n")
        return EXIT_CODES[REFUSED]
    return EXIT_CODES[worst(outcomes)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m recipe.rloo.memory_study", description=__doc__, formatter_class=form)
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
    add, names = parser.add_argument, sorted({arm.name for arm in ARMS})
    add("--quick", action="store_true", help="every arm once at k = 2, 4, 8, in minutes on a CPU")
    devices = "auto: a GPU if there is one, else real tensors on the CPU if they fit, else fake ones"
    add("--device", choices=(AUTO, CPU, FAKE, CUDA), default=AUTO, help=devices)
    add("--expansion", nargs="+", choices=EXPANSIONS, default=EXPANSIONS, help="only arms with these expansions")
    add("--arm", nargs="+", metavar="NAME", default=names, choices=names, help="only these arms")
    add("--k", nargs="+", type=int, help="only these group sizes of 2, 4, 8 (and no larger ones)")
    add("--repeats", type=int, help="repetitions of each measurement (default: 3, with --quick 1)")
    add("--seed", type=int, default=0, help="seed of ids, weights and order (default: %(default)s)")
    add("--device-limit-gb", type=float, help="limit of the device's memory, as memory.device_limit_gb (default: none)")
    most = f"largest arm with real tensors on a CPU (default: {MOST_CPU_GIB:g}, or half of what is free)"
    add("--cpu-limit-gb", type=float, help=most)
    add("--time-limit", type=float, default=600.0, help="longest seconds of a cell (default: %(default)s)")
    add("--jobs", type=int, default=1, help="cells at the same time; 1 on a GPU (default: %(default)s)")
    add("--documents", type=Path, help="GovReport (.jsonl) or a text file, for the prompt (default: random words, made locally)")
    add("--measure", default=MEASURE, help=argparse.SUPPRESS)


def chosen_arms(options: argparse.Namespace) -> list[Arm]:
    arms = [arm for arm in ARMS if arm.expansion in options.expansion and arm.name in options.arm]
    arms = [arm for arm in arms if not options.k or arm.k in options.k]
    if not arms:
        raise UserError("no arm has this expansion, name and group size together. Leave one of --expansion, --arm, --k out.")
    return arms


def run(options: argparse.Namespace) -> set[str]:
    arms, has_gpu = chosen_arms(options), device_count(CUDA) > 0
    cpu_bytes = _cpu_bytes(options)
    _refuse(options, arms, has_gpu, cpu_bytes)
    on_gpu = has_gpu and options.device in (AUTO, CUDA)
    _say_sampler(on_gpu)
    limit = None if options.device_limit_gb is None else int(options.device_limit_gb * GIB)
    documents = None if options.documents is None else str(options.documents.resolve())
    repeats = options.repeats or (1 if options.quick else 3)

    def cells_of(arm: Arm) -> list[Cell]:
        device = choose_device(arm, options.device, has_gpu, cpu_bytes)
        return [Cell(arm, repeat, options.seed, device, limit, documents=documents) for repeat in range(repeats)]

    preload = PRELOAD if options.measure == MEASURE and not has_gpu else ""
    how = How(options.out, options.measure, options.time_limit, 1 if on_gpu else options.jobs, preload)
    outcomes, planned = set[str](), list[Cell]()
    results = run_study(arms, cells_of, options.seed, how, not (options.quick or options.k), planned)
    for number, result in enumerate(results, start=1):
        # A simulation without the limit only shows how much memory it needs, so its outcome does not count.
        if result.cell.limit_bytes == limit:
            outcomes.add(result.outcome)
        sys.stdout.write(f"{number} of {len(planned)}  {_cell_line(result)}\n")
        sys.stdout.flush()
    return outcomes


def _cpu_bytes(options: argparse.Namespace) -> int:
    if options.cpu_limit_gb is not None:
        return int(options.cpu_limit_gb * GIB)
    return min(int((QUICK_CPU_GIB if options.quick else MOST_CPU_GIB) * GIB), psutil.virtual_memory().available // 2)


def _refuse(options: argparse.Namespace, arms: Sequence[Arm], has_gpu: bool, cpu_bytes: int) -> None:
    """Refuse what cannot work before anything runs."""
    if options.device == CUDA and not has_gpu:
        raise UserError("--device cuda: no GPU is visible to this process. Use --device auto or fake.")
    largest = max(arms, key=needed_bytes)
    if options.device == CPU and needed_bytes(largest) > cpu_bytes:
        raise UserError(
            f"--device cpu: {largest.cell} needs about {needed_bytes(largest) / GIB:.0f} GiB of real tensors, and the limit is "
            f"{cpu_bytes / GIB:.0f}. Raise --cpu-limit-gb if this machine has as much, or use --device auto."
        )
    if options.documents is not None and not options.documents.exists():
        raise UserError(f"--documents {options.documents}: no such file or folder.")


def _say_sampler(on_gpu: bool) -> None:
    if not on_gpu:
        sys.stdout.write("no GPU: bytes are counted, not sampled; the columns of the device sampler stay empty\n")
        return
    try:
        open_device()
    except NoNvmlError as error:
        sys.stdout.write(f"the device is not sampled: {error}\n")


def _cell_line(result: CellResult) -> str:
    head = f"{result.cell.name:58} {result.cell.device:5} {result.outcome:9} {result.seconds:6.1f} s"
    if result.failure is not None:
        return f"{head}  {result.failure.message[:120]}"
    peak = max((record.allocated_peak for record in result.records), default=0)
    return f"{head}  {peak / MIB:10,.1f} MiB live"


def combine_results(options: argparse.Namespace) -> set[str]:
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
