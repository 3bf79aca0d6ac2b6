"""The console output of a run. A terminal shows a progress bar and every few steps a table. Other outputs get a line per step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from verl_memopt.observe.metrics import LOSS, headline_score
from verl_memopt.observe.phase import GIB, MIB, PhaseMemory

Metrics = Mapping[str, float]

Reader = Callable[[Metrics], float | None]


def _first_of(*names: str) -> Reader:
    return lambda metrics: next((metrics[name] for name in names if name in metrics), None)


def _mib_of(name: str) -> Reader:
    return lambda metrics: metrics[name] * GIB / MIB if name in metrics else None


_reward = _first_of("critic/score/mean")
_speed = _first_of("perf/throughput")
_peak = _mib_of("perf/max_memory_allocated_gb")
_reserved = _mib_of("perf/max_memory_reserved_gb")


@dataclass(frozen=True)
class Figure:
    """A figure of a step: its name, its table heading ("" = shown in lines only), the function that reads it, and its format."""

    name: str
    head: str
    read: Reader
    form: str

    def text(self, metrics: Metrics) -> str | None:
        value = self.read(metrics)
        return None if value is None else format(value, self.form)


STEP_FIGURES = (
    Figure("reward", "reward", _reward, ".3f"),
    Figure("loss", "loss", _first_of(LOSS), ".3f"),
    Figure("val", "val", headline_score, ".3f"),
    Figure("kl", "kl", _first_of("actor/reward_kl_penalty", "actor/kl_loss"), ".4f"),
    Figure("grad_norm", "grad\nnorm", _first_of("actor/grad_norm"), ".3f"),
    Figure("logprob_diff", "logprob\ndiff", _first_of("rollout/logprob_diff_mean"), ".1e"),
    Figure("tokens/s", "tokens/s", _speed, ",.0f"),
    Figure("s/step", "s/step", _first_of("perf/time_per_step"), ".2f"),
    Figure("live_mib", "", _mib_of("perf/memory_allocated_gb"), ",.1f"),
    Figure("reserved_mib", "reserved\nMiB", _reserved, ",.0f"),
    Figure("peak_mib", "peak\nMiB", _peak, ",.1f"),
)
"""The figures of a step, in the order in which they are shown. ``tokens/s`` is per device."""

COUNTED = "bytes counted"
"""Marks a step whose live bytes were counted tensor by tensor, which slows it down."""


def _counts_bytes(metrics: Metrics) -> bool:
    # Only the byte tracker slows a step down. A GPU's allocator does not, and only there a step has reserved bytes.
    return _peak(metrics) is not None and _reserved(metrics) is None


def step_table(rows: Sequence[Metrics]) -> Table:
    """Build a table of steps that fits 80 columns. A figure that no step has gets no column. A dash = not in this step."""
    figures = [figure for figure in STEP_FIGURES if figure.head and any(figure.read(row) is not None for row in rows)]
    table = slim_table(right=["step", *(figure.head for figure in figures)])
    for row in rows:
        mark = {"s/step": "*"} if _counts_bytes(row) else {}
        cells = ("-" if (text := figure.text(row)) is None else text + mark.get(figure.name, "") for figure in figures)
        table.add_row(f"{row['step']:.0f}", *cells)
    if any(map(_counts_bytes, rows)):
        table.caption = f"* {COUNTED}, which takes time"
        table.caption_justify = "left"
    return table


def step_line(step: int, total: int, metrics: Metrics) -> str:
    # Figures that the step does not have are left out.
    shown = [f"{figure.name}={text}" for figure in STEP_FIGURES if (text := figure.text(metrics)) is not None]
    return " ".join([f"step {step}/{total}", *shown, *([f"({COUNTED})"] if _counts_bytes(metrics) else [])])


def progress_bar(unit: str, clock: ProgressColumn, console: Console) -> Progress:
    # A bar that counts units, with a description and a clock. It is shown on a terminal only.
    words = TextColumn("{task.description}", markup=False)
    columns = (TextColumn(unit), MofNCompleteColumn(), BarColumn(bar_width=None), words, clock)
    return Progress(*columns, console=console, disable=not console.is_interactive, expand=True)


class RunConsole:
    """Shows each step of a run once. It is the logger ``console``.

    On a terminal a bar moves with the steps, and every ``table_every`` steps a table shows them (0 = only at the end). In any
    other output, such as a file, each step is one line. As a context manager it removes the bar even if the run fails.

    ``first_step``: number of steps that earlier starts of this run have done.
    """

    def __init__(self, total_steps: int, first_step: int = 0, table_every: int = 10, console: Console | None = None) -> None:
        # In a notebook too the lines must go to standard output, because console.log is a copy of it.
        self.console = console or Console(highlight=False, force_jupyter=False)
        self._total = total_steps
        self._every = table_every
        self._rows: list[dict[str, float]] = []
        self._peak: float | None = None
        self._bar = progress_bar("step", TimeRemainingColumn(compact=True), self.console)
        self._task = self._bar.add_task("", total=total_steps, completed=first_step)

    def __enter__(self) -> RunConsole:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def log(self, step: int, metrics: Metrics) -> None:
        self._peak = max((peak for peak in (self._peak, _peak(metrics)) if peak is not None), default=None)
        if not self.console.is_interactive:
            self.say(step_line(step, self._total, metrics))
            return
        self._rows.append({**metrics, "step": float(step)})
        headline = next((figure for figure in STEP_FIGURES if figure.read(metrics) is not None), STEP_FIGURES[0])
        words = f"{headline.name} {headline.text(metrics)}  {_speed(metrics) or 0:,.0f} tokens/s"
        peak = "" if self._peak is None else f"  peak {self._peak:,.0f} MiB"
        self._bar.update(self._task, completed=step, description=words + peak)
        if self._every > 0 and step % self._every == 0 and step > 0:
            self.flush_table()

    def flush_table(self) -> None:
        if self._rows:
            self.console.print(step_table(self._rows))
        self._rows = []

    def say(self, text: str) -> None:
        print_line(self.console, text)

    def close(self, failed: bool = False) -> None:
        """Print the table of the last steps and remove the bar. A second call does nothing."""
        self.flush_table()
        self._bar.stop()


def summary_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Show the summary of a run as two tables: the run in one row, and its phases with seconds, share of time, and peaks in MiB.

    A size that no phase has, such as used device memory on a CPU, gets no column.
    """
    run = slim_table()
    for head in ("steps", "seconds", "validation before", "validation after"):
        run.add_column(head, justify="right")
    scores = (summary[f"validation_{when}"] for when in ("before", "after"))
    run.add_row(
        str(summary["steps"]), f"{summary['seconds']:,.1f}", *("-" if score is None else f"{score:.3f}" for score in scores)
    )
    counter = f"\n({summary['counter']})" if summary.get("counter") else ""  # of the live bytes
    phases = sorted(summary["phases"].items(), key=lambda item: -item[1]["seconds"])
    sizes = {
        head: name
        for head, name in {
            f"peak live\nMiB{counter}": "peak_allocated_bytes",
            "reserved\nMiB": "peak_reserved_bytes",
            "device\nused MiB": "device_used_bytes",
            "host RSS\nMiB": "host_rss_bytes",
        }.items()
        if any(phase[name] is not None for _, phase in phases)
    }
    table = slim_table()
    table.add_column("phase", overflow="fold")
    for head in ("seconds", "share", *sizes):
        table.add_column(head, justify="right", no_wrap=True)
    total = sum(phase["seconds"] for _, phase in phases) or 1.0
    for name, phase in phases:
        share = f"{100 * phase['seconds'] / total:.1f} %"
        table.add_row(name, f"{phase['seconds']:,.2f}", share, *(_mib(phase[figure]) for figure in sizes.values()))
    return [run, table]


def print_end(console: Console, summary: Mapping[str, Any], folder: Path, lines: Sequence[str] = ()) -> None:
    # The last line is the run folder alone, because scripts read it.
    print_summary(console, summary)
    for line in (*lines, str(folder)):
        print_line(console, line)


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    for table in summary_tables(summary):
        console.print(table)
        console.print()
    lines = [f"WARNING, step {row['step']}: {row['warning']}" for row in summary.get("warnings", [])]
    if summary.get("skipped_updates"):
        lines.append(f"WARNING: {summary['skipped_updates']} updates were skipped, because their gradient norm was not finite.")
    for line in lines:
        print_line(console, line)


def print_line(console: Console, text: str) -> None:
    # The line is not wrapped and has no styles, so that a script can read it.
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def slim_table(*left: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in left:
        table.add_column(head, no_wrap=True)
    for head in right:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _mib(size: float | None) -> str:
    return "-" if size is None else f"{size / MIB:,.{0 if size >= 1000 * MIB else 1}f}"


# The memory of each phase of one step, as a table and as rows of a file: ``debug.mode=memory``.


COLUMNS = {
    "enter": "entered_bytes",
    "peak": "peak_allocated_bytes",
    "exit": "allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "host": "host_rss_bytes",
}
"""Column heading -> field of ``PhaseMemory``. ``enter``, ``peak`` and ``exit`` count live tensors, without those of a sleeping
engine."""


def phase_rows(step: int, memories: Sequence[PhaseMemory]) -> list[dict[str, Any]]:
    """Return one row per phase: its step, its name, and the bytes of each column. None = the device has no such figure.

    With several workers a row also has the mean of their peaks, and the rank of the worker with the highest peak.
    """
    return [
        {
            "step": step,
            "phase": memory.name,
            **{f"{head}_bytes": getattr(memory, name) for head, name in COLUMNS.items()},
            **({} if memory.worst_rank is None else {"mean_peak_bytes": memory.mean_peak_bytes, "worst_rank": memory.worst_rank}),
        }
        for memory in memories
    ]


def memory_table(step: int, memories: Sequence[PhaseMemory]) -> Table:
    """Show the phases of a step, in the order in which they began, in MiB. A dash = the device has no such figure.

    With several workers the peak is that of the worker with the highest one. Its rank and the mean of all peaks are shown too.
    """
    several = any(memory.worst_rank is not None for memory in memories)
    table = Table(title=f"memory of step {step}, MiB", box=box.SIMPLE_HEAD, title_justify="left", show_edge=False)
    table.add_column("phase", overflow="fold")
    for head in COLUMNS:
        table.add_column(head, justify="right", no_wrap=True)
    for head in ("mean peak", "fullest rank") if several else ():
        table.add_column(head, justify="right", no_wrap=True)
    for memory in memories:
        sizes = [getattr(memory, name) for name in COLUMNS.values()] + ([memory.mean_peak_bytes] if several else [])
        rank = ["-" if memory.worst_rank is None else str(memory.worst_rank)] if several else []
        table.add_row(memory.name, *("-" if size is None else f"{size / MIB:,.1f}" for size in sizes), *rank)
    return table
