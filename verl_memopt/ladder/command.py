"""``verl-memopt knobs --measure``: measure the ladder, show progress, and write each row as soon as it is measured."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from textwrap import fill

from rich.console import Console, RenderableType
from rich.progress import TimeElapsedColumn
from rich.table import Table

from verl_memopt.errors import DeviceMemoryError, OutOfMemory
from verl_memopt.ladder.measure import (
    ALL_OFF,
    OUT_OF_MEMORY,
    Row,
    UpdateSize,
    as_json,
    choose_rows,
    run_ablation,
    split,
)
from verl_memopt.observe.chart_style import figure, save, stack_kinds, style
from verl_memopt.observe.console import progress_bar, slim_table
from verl_memopt.observe.files import replace_text
from verl_memopt.observe.phase import MIB
from verl_memopt.run.interrupts import Interrupts

logger = logging.getLogger(__name__)

WIDTH = 200
"""Columns of the tables in the text file."""
NAMES_WIDTH = 100
"""Most characters per line below the chart."""


@dataclass
class LadderRecord:
    """The rows measured so far, and the files to which they are written (None = no file). Each row rewrites the files."""

    name: str
    work: UpdateSize
    json_path: Path | None
    text_path: Path | None
    png_path: Path | None
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Add a measured row and write the files. Raises a UserError if a file cannot be written."""
        self.rows.append(row)
        if self.json_path is not None:
            replace_text(self.json_path, json.dumps(as_json(self.rows, self.work, self.name), indent=2) + "\n")
        if self.text_path is not None:
            console = Console(highlight=False, width=WIDTH, no_color=True, force_terminal=False)
            with console.capture() as captured:
                console.print(*ladder_tables(self.rows), sep="\n")
            replace_text(self.text_path, captured.get())

    def draw(self) -> None:
        ablation, _ = split(self.rows)
        if self.png_path is not None and ablation:
            title = f"Memory knobs on {self.name}, {self.work.rows} x ({self.work.prompt} + {self.work.response}) tokens"
            draw_ladder(ablation, self.png_path, title)


class LadderProgress:
    """Shows on standard error which row is being measured and how each row ended: a bar on a terminal, otherwise lines."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._total = total
        self._number = 0
        self._started = time.monotonic()
        self._bar = progress_bar("row", TimeElapsedColumn(), self._console)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> LadderProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, knob: str) -> None:
        self._number += 1
        self._bar.update(self._task, description=knob)
        if not self._console.is_interactive:
            self._log(f"{knob} ...")

    def end(self, row: Row) -> None:
        self._bar.update(self._task, completed=self._number)
        self._log(f"{row.knob}: {outcome(row)}")

    def _log(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        logger.info("row %d of %d, %d:%02d: %s", self._number, self._total, minutes, seconds, text)


def measure_ladder(
    model: Path, work: UpdateSize, extra: Sequence[str], only: Sequence[str], record: LadderRecord, console: Console
) -> int:
    """Measure the ladder, print its tables, and return the exit code.

    Measured rows are written, printed and drawn even if an error or a signal ends the command.

    Returns:
        0 if the ladder ended, even if some rows ran out of memory; 130 or 143 if Ctrl-C or SIGTERM stopped it.

    Raises:
        DeviceMemoryError: Every row ran out of memory (exit code 1).
        UserError: The user must change something.
    """
    total = len(choose_rows(work, only))
    with Interrupts(at_once=True) as interrupts:
        try:
            with LadderProgress(total) as progress:
                for row in run_ablation(str(model), work, extra, only, progress.begin):
                    record.add(row)
                    progress.end(row)
                    # Python drops a KeyboardInterrupt that is raised inside a destructor, so the signal itself is checked too.
                    if interrupts.requested:
                        break
        except KeyboardInterrupt:
            # The signal determines the exit code below, after the measured rows are shown.
            pass
        finally:
            if record.rows:
                console.print(*ladder_tables(record.rows), sep="\n")
                record.draw()
    if interrupts.exit_code is not None:
        logger.warning("stopped after %d of %d rows; the measured rows are kept", len(record.rows), total)
        return interrupts.exit_code
    if all(row.out_of_memory for row in record.rows):
        raise DeviceMemoryError(
            f"no row fits: all {total} ran out of device memory, so nothing was measured. Measure a smaller model or fewer "
            "tokens (--layers, --rows, --prompt, --response), or raise memory.device_limit_gb."
        )
    return 0


# A measured ladder as tables and as a chart.


KINDS = ("params", "grads", "optimizer", "activations", "logits")
"""Kinds of bytes with a column of their own. All other kinds are summed as ``other``."""

FAILED = "#b02a30"
"""Colour of the text that replaces the bar of a row that ran out of memory."""


def ladder_tables(rows: Sequence[Row]) -> list[RenderableType]:
    ablation, alternatives = split(rows)
    all_off = ablation[0] if ablation and ablation[0].knob == ALL_OFF else None
    parts: list[RenderableType] = [ladder_table(ablation, all_off)] if ablation else []
    if alternatives:
        parts += ["\nAlternatives, each added to an earlier row:", ladder_table(alternatives, all_off)]
    if any(row.out_of_memory for row in rows):
        parts += ["\nRows that ran out of memory:", failures_table(rows)]
    if any(row.savings for row in rows):
        parts += ["\nWhat each knob saves, compared with the row before:", savings_table(rows)]
    return parts


def ladder_table(rows: Sequence[Row], all_off: Row | None = None) -> Table:
    """Table of rows, in MiB: peak, peak / peak with all knobs off, phases, kinds at the peak, host memory, and seconds.

    A row that ran out of memory has no overall peak, only the peaks of phases that ended before.
    """
    phases = list(dict.fromkeys(name for row in rows for name in row.phases))
    heads = ("peak\nMiB", "of\nall off", *(f"{name}\nMiB" for name in phases), *KINDS, "other", "host\nMiB", "s")
    table = slim_table("+ knob", right=heads)
    table.add_column("status", no_wrap=True)
    whole = None if all_off is None else all_off.peak_device_bytes
    for row in rows:
        table.add_row(
            row.knob,
            _mib(row.peak_device_bytes),
            _share(row.peak_device_bytes, whole, 2),
            *(_mib(row.phases.get(name)) for name in phases),
            *map(_mib, _kind_sizes(row)),
            _mib(row.host_bytes),
            "-" if row.seconds is None else f"{row.seconds:.1f}",
            row.status,
        )
    return table


def _kind_sizes(row: Row) -> list[int | None]:
    if row.out_of_memory:
        return [None] * (len(KINDS) + 1)
    sizes = [row.kinds.get(kind, 0) for kind in KINDS]
    return [*sizes, sum(row.kinds.values()) - sum(sizes)]


def failures_table(rows: Sequence[Row]) -> Table:
    table = slim_table("+ knob", "phase", right=("held\nMiB", "asked for\nMiB", "limit\nMiB"))
    for row in rows:
        if row.out_of_memory:
            table.add_row(row.knob, row.out_of_memory.phase, *map(_mib, _figures(row.out_of_memory).values()))
    return table


def _figures(ran_out: OutOfMemory) -> dict[str, int | None]:
    return {"held": ran_out.held_bytes, "asked for": ran_out.asked_bytes, "limit": ran_out.limit_bytes}


def ran_out_words(ran_out: OutOfMemory) -> str:
    figures = ", ".join(f"{word} {_mib(size)}" for word, size in _figures(ran_out).items() if size is not None)
    return f"{OUT_OF_MEMORY} in {ran_out.phase}" + (f": {figures} MiB" if figures else "")


def outcome(row: Row) -> str:
    if row.out_of_memory:
        return ran_out_words(row.out_of_memory)
    return f"peak {_mib(row.peak_device_bytes)} MiB, {row.seconds:.1f} s"


def savings_table(rows: Sequence[Row]) -> Table:
    table = slim_table("+ knob", "on", "phase", "kind", right=("formula\nMiB", "measured\nMiB", "of\nformula"))
    table.add_column("", no_wrap=True)
    failed = {row.knob for row in rows if row.out_of_memory}
    for row in rows:
        culprits = " and ".join(knob for knob in (row.base, row.knob) if knob in failed)
        reason = f"not measurable: {culprits} ran out of memory" if culprits else ""
        for saving in row.savings:
            formula, measured = saving.formula_bytes, saving.measured_bytes
            figures = (_mib(formula), _mib(measured), _share(measured, formula, 3))
            table.add_row(row.knob, row.base, saving.phase, saving.kind, *figures, reason)
    return table


def _share(part: int | None, whole: int | None, digits: int) -> str:
    return "-" if part is None or not whole else f"{part / whole:.{digits}f}"


def draw_ladder(rows: Sequence[Row], path: Path, title: str) -> Path:
    """Draw each row's peak as a bar, stacked by kind. A row that ran out of memory gets a label instead of a bar.

    Rows whose peak in MiB equals that of the row before have no bar. A line below the chart names them.
    """
    unchanged = [row.knob for before, row in pairwise(rows) if _same_peak(before, row)]
    rows = [row for row in rows if row.knob not in unchanged]
    drawing = figure(9.0, 1.8 + 0.42 * len(rows))
    axes = drawing.add_subplot()
    below = "peak live tensor bytes of a step, MiB"
    if unchanged:
        below += "\n\n" + fill(f"No change of the peak in this case: {', '.join(unchanged)}", NAMES_WIDTH)
    style(axes, title, below, "", grid="x")
    measured = [place for place, row in enumerate(rows) if not row.out_of_memory]
    ends = iter(stack_kinds(axes, measured, [rows[place].kinds for place in measured], MIB, 0.7))
    for place, row in enumerate(rows):
        if row.out_of_memory:
            words = f"  {ran_out_words(row.out_of_memory)}"
            axes.text(0, place, words, va="center", fontsize=9, color=FAILED, fontstyle="italic")
        else:
            axes.text(next(ends), place, f"  {_mib(row.peak_device_bytes)}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [row.knob if place == 0 else f"+ {row.knob}" for place, row in enumerate(rows)])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    if measured:
        axes.legend(loc="lower right", frameon=False, fontsize=9)
    return save(drawing, path)


def _same_peak(before: Row, row: Row) -> bool:
    return row.peak_device_bytes is not None and _mib(row.peak_device_bytes) == _mib(before.peak_device_bytes)


def _mib(size: float | None) -> str:
    return "-" if size is None else f"{size / MIB:,.{0 if size >= 100 * MIB else 1}f}"
