"""``verl-memopt knobs --measure``: measures the ladder, shows progress, and writes each row as soon as it is measured."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from verl_memopt.errors import DeviceMemoryError
from verl_memopt.ladder.measure import run_ablation
from verl_memopt.ladder.plan import Work, choose_rows
from verl_memopt.ladder.report import draw_ladder, ladder_tables, outcome
from verl_memopt.ladder.row import Row, as_json, split
from verl_memopt.observe.files import replace_text
from verl_memopt.trainer.interrupts import Interrupts

logger = logging.getLogger(__name__)

WIDTH = 200
"""Columns of the tables in a file, and the least on the screen."""


class LadderRecord:
    """The rows measured so far, and the files that hold them. Each new row rewrites the files."""

    def __init__(self, name: str, work: Work, json_path: Path | None, text_path: Path | None, png_path: Path | None) -> None:
        """Start without rows.

        Args:
            name: Name of the model, for the files.
            work: The update that every row runs.
            json_path: File for the rows as JSON; None for none.
            text_path: File for the tables; None for none.
            png_path: File for the picture; None for none.
        """
        self.rows: list[Row] = []
        self._name = name
        self._work = work
        self._json_path = json_path
        self._text_path = text_path
        self._png_path = png_path

    def add(self, row: Row) -> None:
        """Add a measured row and write the files.

        Raises:
            UserError: A file cannot be written.
        """
        self.rows.append(row)
        if self._json_path is not None:
            replace_text(self._json_path, json.dumps(as_json(self.rows, self._work, self._name), indent=2) + "\n")
        if self._text_path is not None:
            replace_text(self._text_path, _as_text(ladder_tables(self.rows)))

    def draw(self) -> None:
        """Draw the rows of the ablation, where a picture is wanted and there is such a row."""
        ablation, _ = split(self.rows)
        if self._png_path is not None and ablation:
            title = f"Memory knobs on {self._name}, {self._work.rows} x ({self._work.prompt} + {self._work.response}) tokens"
            draw_ladder(ablation, self._png_path, title)


class LadderProgress(AbstractContextManager["LadderProgress"]):
    """Shows on standard error which row is measured and how each ended: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        """Show nothing yet.

        Args:
            total: Rows to measure.
            console: Where to show it. None = standard error.
        """
        self._console = console or Console(stderr=True, highlight=False)
        self._total = total
        self._number = 0
        self._started = time.monotonic()
        self._bar = Progress(
            TextColumn("row"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_interactive,
            expand=True,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> LadderProgress:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Remove the bar."""
        self._bar.stop()

    def begin(self, knob: str) -> None:
        """Show that the next row is being measured."""
        self._number += 1
        self._bar.update(self._task, description=knob)
        if not self._console.is_interactive:
            self._log(f"{knob} ...")

    def end(self, row: Row) -> None:
        """Show how a row ended."""
        self._bar.update(self._task, completed=self._number)
        self._log(f"{row.knob}: {outcome(row)}")

    def _log(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        logger.info("row %d of %d, %d:%02d: %s", self._number, self._total, minutes, seconds, text)


def measure_ladder(
    model: Path, work: Work, extra: Sequence[str], only: Sequence[str], record: LadderRecord, console: Console
) -> int:
    """Measure the ladder, print its tables, and return the exit code.

    The rows that were measured are written, printed and drawn even where an error or a signal ends the command.

    Args:
        model: Folder of the model.
        work: The update that every row runs.
        extra: Settings of every row, as ``key=value``.
        only: Knobs to measure; empty for all.
        record: Gets each row.
        console: For the tables.

    Returns:
        0 where the ladder ended, even if some rows ran out of memory; 130 or 143 where Ctrl-C or SIGTERM stopped it.

    Raises:
        DeviceMemoryError: Every row ran out of memory (exit code 1).
        UserError: The user must change something.
    """
    total = len(choose_rows(work, only))
    with Interrupts(at_once=True) as interrupts:
        try:
            with LadderProgress(total) as progress:
                _measure_rows(model, work, extra, only, record, progress, lambda: interrupts.requested)
        except KeyboardInterrupt:
            # The signal decides the exit code below, after the rows so far are shown.
            pass
        finally:
            _show(record, console)
    if interrupts.exit_code is not None:
        logger.warning("stopped after %d of %d rows; the measured rows are kept", len(record.rows), total)
        return interrupts.exit_code
    if all(row.out_of_memory for row in record.rows):
        raise DeviceMemoryError(
            f"no row fits: all {total} ran out of device memory, so nothing was measured. Measure a smaller model or fewer "
            "tokens (--layers, --rows, --prompt, --response), or raise memory.device_limit_gb."
        )
    return 0


def _measure_rows(
    model: Path,
    work: Work,
    extra: Sequence[str],
    only: Sequence[str],
    record: LadderRecord,
    progress: LadderProgress,
    stopped: Callable[[], bool],
) -> None:
    for row in run_ablation(str(model), work, extra, only, progress.begin):
        record.add(row)
        progress.end(row)
        # Python drops a KeyboardInterrupt that is raised inside a destructor, so look at the signal itself too.
        if stopped():
            return


def _show(record: LadderRecord, console: Console) -> None:
    if record.rows:
        console.print(*ladder_tables(record.rows), sep="\n")
        record.draw()


def _as_text(parts: Sequence[RenderableType]) -> str:
    console = Console(highlight=False, width=WIDTH, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    return captured.get()
