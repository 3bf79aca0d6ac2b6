"""The console output of a run: a progress bar, one line per step without a terminal, and a table every few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from verl_memopt.observe.metrics import LOSS, VAL_LOSS, headline_score
from verl_memopt.observe.phase import GIB, MIB, PhaseMemory, size_words

Metrics = Mapping[str, float]

KL_NAMES = ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl")
"""Metrics with a step's KL: to the reference if there is one, else to the policy of the rollout."""


def named(*names: str) -> Callable[[Metrics], float | None]:
    """Return a function that reads the first of these metrics that a step has."""
    return lambda metrics: next((metrics[name] for name in names if name in metrics), None)


def _peak_bytes(metrics: Metrics) -> float | None:
    peak = metrics.get("perf/max_memory_allocated_gb")
    return None if peak is None else peak * GIB


def _as(form: str) -> Callable[[float | None], str]:
    return lambda value: "-" if value is None else form.format(value)


STEP_COLUMNS: tuple[tuple[str, Callable[[Metrics], float | None], Callable[[float | None], str]], ...] = (
    ("step", named("step"), _as("{:.0f}")),
    ("reward", named("critic/score/mean"), _as("{:.3f}")),
    ("loss", named(LOSS), _as("{:.3f}")),
    ("val", headline_score, _as("{:.3f}")),
    ("kl", named(*KL_NAMES), _as("{:.4f}")),
    ("grad\nnorm", named("actor/grad_norm"), _as("{:.3f}")),
    ("logprob\ndiff", named("rollout/logprob_diff_mean"), _as("{:.1e}")),
    ("tokens/s", named("perf/throughput"), _as("{:,.0f}")),
    ("s/step", named("perf/time_per_step"), _as("{:.2f}")),
    ("peak\nMiB", _peak_bytes, lambda size: _mib(size)),
)
"""Header, reader and format of each column of the step table. Throughput is per device, as in its metric."""


def step_table(rows: Sequence[Metrics]) -> Table:
    """Return a compact table of steps that fits 80 columns. A cell without a value is a dash."""
    unused = "reward" if any(LOSS in row or VAL_LOSS in row for row in rows) else "loss"
    columns = [column for column in STEP_COLUMNS if column[0] != unused]
    table = slim_table(right=[head for head, _, _ in columns])
    for row in rows:
        table.add_row(*(form(read(row)) for _, read, form in columns))
    return table


def headline_words(metrics: Metrics, sign: str) -> str:
    """Return a step's reward, or its loss in a supervised run, as words: the name, the sign and the figure."""
    name = "loss" if LOSS in metrics or VAL_LOSS in metrics else "reward"
    return f"{name}{sign}{_as('{:.3f}')(named(LOSS, VAL_LOSS, 'critic/score/mean')(metrics))}"


def step_words(metrics: Metrics) -> str:
    """Return a step's reward or loss, speed and device memory (MiB) as words of one line. ``n/a`` = not counted."""
    speed, seconds = _as("{:,.0f}")(named("perf/throughput")(metrics)), _as("{:.2f}")(named("perf/time_per_step")(metrics))
    return f"{headline_words(metrics, '=')} tokens/s={speed} s/step={seconds} {memory_words(metrics)}"


def memory_words(metrics: Metrics) -> str:
    """Return ``mem_alloc_mb`` (live at the step's end), ``mem_reserved_mb`` and ``mem_max_alloc_mb`` (peaks) as words."""
    names = ("perf/memory_allocated_gb", "perf/max_memory_reserved_gb", "perf/max_memory_allocated_gb")
    return size_words(*(metrics[name] * GIB if name in metrics else None for name in names))


def progress_bar(unit: str, clock: ProgressColumn, console: Console) -> Progress:
    """Return a bar of counted units with a description and a clock, which only a terminal shows."""
    words = TextColumn("{task.description}", markup=False)
    columns = (TextColumn(unit), MofNCompleteColumn(), BarColumn(bar_width=None), words, clock)
    return Progress(*columns, console=console, disable=not console.is_interactive, expand=True)


class RunConsole:
    """Shows a run's progress: a moving bar on a terminal, one plain line per step elsewhere. It is the logger ``console``.

    Use as a context manager, so that the bar is removed however the run ends. ``first_step``: steps that are already done.
    ``table_every``: 0 = no tables before the end.
    """

    def __init__(self, total_steps: int, first_step: int = 0, table_every: int = 10, console: Console | None = None) -> None:
        # In a notebook too the lines go to standard output, where console.log gets them.
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
        """Show a finished step, and every ``table_every`` steps the table of the steps since the last one."""
        self._peak = max((peak for peak in (self._peak, _peak_bytes(metrics)) if peak is not None), default=None)
        self._rows.append({**metrics, "step": float(step)})
        speed = _as("{:,.0f}")(named("perf/throughput")(metrics))
        words = f"{headline_words(metrics, ' ')}  {speed} tokens/s  peak {_mib(self._peak)} MiB"
        self._bar.update(self._task, completed=step, description=words)
        if not self.console.is_interactive:
            self.say(f"step {step}/{self._total} {step_words(metrics)}")
        if self._every > 0 and step % self._every == 0 and step > 0:
            self.flush_table()
            if self.console.is_interactive:
                self.say(memory_words(metrics))

    def flush_table(self) -> None:
        """Print the table of the steps that no table has shown yet."""
        if self._rows:
            self.console.print(step_table(self._rows))
        self._rows = []

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        print_line(self.console, text)

    def close(self, failed: bool = False) -> None:
        """Print the table of the last steps and remove the bar. A second call does nothing."""
        self.flush_table()
        self._bar.stop()


def summary_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Return the summary of a run as two tables: the run in one row; its phases with seconds, share of time, peaks in MiB."""
    run = slim_table()
    for head in ("steps", "seconds", "validation before", "validation after"):
        run.add_column(head, justify="right")
    scores = (_as("{:.3f}")(summary[f"validation_{when}"]) for when in ("before", "after"))
    run.add_row(str(summary["steps"]), f"{summary['seconds']:,.1f}", *scores)
    counter = f"\n({summary['counter']})" if summary.get("counter") else ""  # of the live bytes
    table = slim_table()
    table.add_column("phase", overflow="fold")
    for head in ("seconds", "share", f"peak live\nMiB{counter}", "reserved\nMiB", "device\nused MiB", "host RSS\nMiB"):
        table.add_column(head, justify="right", no_wrap=True)
    total = sum(phase["seconds"] for phase in summary["phases"].values()) or 1.0
    for name, phase in sorted(summary["phases"].items(), key=lambda item: -item[1]["seconds"]):
        sizes = (phase[key] for key in ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "host_rss_bytes"))
        share = f"{100 * phase['seconds'] / total:.1f} %"
        table.add_row(name, f"{phase['seconds']:,.2f}", share, *map(_mib, sizes))
    return [run, table]


def print_end(console: Console, summary: Mapping[str, Any], folder: Path, lines: Sequence[str] = ()) -> None:
    """Print the summary of a run, further lines and then, as the last line, its folder."""
    print_summary(console, summary)
    for line in (*lines, str(folder)):
        print_line(console, line)


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the tables of a run, its warnings with their steps, and the number of skipped updates, if there are any."""
    for table in summary_tables(summary):
        console.print(table)
        console.print()
    lines = [f"WARNING, step {row['step']}: {row['warning']}" for row in summary.get("warnings", [])]
    if summary.get("skipped_updates"):
        lines.append(f"WARNING: {summary['skipped_updates']} updates were skipped, because their gradient norm was not finite.")
    for line in lines:
        print_line(console, line)


def print_line(console: Console, text: str) -> None:
    """Print a line uncut and without styles, so that a script can read it."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def slim_table(*left: str, right: Iterable[str] = ()) -> Table:
    """Return a table without edges that has columns of words with these heads, then columns of figures."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in left:
        table.add_column(head, no_wrap=True)
    for head in right:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _mib(size: float | None) -> str:
    """Return a size in bytes as MiB, with one decimal below a thousand. A dash for None."""
    return "-" if size is None else f"{size / MIB:,.{0 if size >= 1000 * MIB else 1}f}"


# The memory of each phase of one step, as a table and as rows of a file: ``debug.mode=memory``.


COLUMNS = {
    "enter": "entered_bytes",
    "peak": "peak_allocated_bytes",
    "exit": "allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "host": "host_rss_bytes",
}
"""Header -> figure of a phase. ``enter``, ``peak`` and ``exit`` are live tensors, without a sleeping engine's."""


def phase_rows(step: int, memories: Sequence[PhaseMemory]) -> list[dict[str, Any]]:
    """Return one row per phase: its step, its name, and the bytes of each column; None where the device has no such figure.

    With several workers also the mean of their peaks, and the rank of the highest.
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
    """Return the phases of a step in the order in which they began, in MiB. A dash = the device has no such figure.

    With several workers the peak is that of the fullest, whose rank is shown beside the mean of all.
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
