"""``verl-memopt knobs --measure``: climbs the ladder, shows progress, and writes each rung as soon as it is measured."""

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
from verl_memopt.ladder.measure import chosen_steps, climb
from verl_memopt.ladder.plan import Work
from verl_memopt.ladder.report import draw_ladder, ladder_tables, outcome
from verl_memopt.ladder.row import Rung, as_json, split
from verl_memopt.observe.files import replace_text
from verl_memopt.trainer.interrupts import Interrupts

logger = logging.getLogger(__name__)

WIDTH = 200
"""Columns of the tables in a file, and the least on the screen."""


class LadderRecord:
    """The rungs so far, and the files that hold them. Each file is rewritten whole when a rung is added."""

    def __init__(self, name: str, work: Work, json_path: Path | None, text_path: Path | None, png_path: Path | None) -> None:
        self.rungs: list[Rung] = []
        self._name = name
        self._work = work
        self._json_path = json_path
        self._text_path = text_path
        self._png_path = png_path

    def add(self, rung: Rung) -> None:
        """Take a measured rung and write the files. Errors: UserError when the disk refuses."""
        self.rungs.append(rung)
        if self._json_path is not None:
            replace_text(self._json_path, json.dumps(as_json(self.rungs, self._work, self._name), indent=2) + "\n")
        if self._text_path is not None:
            replace_text(self._text_path, _as_text(ladder_tables(self.rungs)))

    def draw(self) -> None:
        """Draw the rungs of the climb, where a picture is asked for and there is one."""
        climbed, _ = split(self.rungs)
        if self._png_path is not None and climbed:
            title = f"Memory knobs on {self._name}, {self._work.rows} x ({self._work.prompt} + {self._work.response}) tokens"
            draw_ladder(climbed, self._png_path, title)


class LadderProgress(AbstractContextManager["LadderProgress"]):
    """Says on standard error which rung is measured and how each ended: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._total = total
        self._number = 0
        self._started = time.monotonic()
        self._bar = Progress(
            TextColumn("rung"),
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
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def begin(self, knob: str) -> None:
        """Say that a rung is being measured."""
        self._number += 1
        self._bar.update(self._task, description=knob)
        if not self._console.is_interactive:
            self._say(f"{knob} ...")

    def end(self, rung: Rung) -> None:
        """Say how a rung ended."""
        self._bar.update(self._task, completed=self._number)
        self._say(f"{rung.knob}: {outcome(rung)}")

    def _say(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        logger.info("rung %d of %d, %d:%02d: %s", self._number, self._total, minutes, seconds, text)


def measure_ladder(
    model: Path, work: Work, extra: Sequence[str], only: Sequence[str], record: LadderRecord, console: Console
) -> int:
    """Measure the ladder into ``record``, print its tables on ``console``, and return the exit code.

    0: the ladder ended; a rung that ran out of memory is a result. 130 or 143: Ctrl-C or SIGTERM stopped it. Whatever ends
    it, the rungs that were measured are written, printed and drawn.

    Raises:
        DeviceMemoryError: every rung ran out of memory, so nothing was measured (exit code 1).
        UserError: what the user must mend.
    """
    total = len(chosen_steps(work, only))
    with Interrupts(at_once=True) as interrupts:
        try:
            with LadderProgress(total) as progress:
                _climb(model, work, extra, only, record, progress, lambda: interrupts.asked)
        except KeyboardInterrupt:
            pass
        finally:
            _show(record, console)
    if interrupts.exit_code is not None:
        logger.warning("stopped after %d of %d rungs; what was measured is kept", len(record.rungs), total)
        return interrupts.exit_code
    if all(rung.out_of_memory for rung in record.rungs):
        raise DeviceMemoryError(
            f"no rung fits: all {total} ran out of device memory, so nothing was measured. Measure a smaller model or fewer "
            "tokens (--layers, --rows, --prompt, --response), or raise memory.device_limit_gb."
        )
    return 0


def _climb(
    model: Path,
    work: Work,
    extra: Sequence[str],
    only: Sequence[str],
    record: LadderRecord,
    progress: LadderProgress,
    stopped: Callable[[], bool],
) -> None:
    for rung in climb(str(model), work, extra, only, progress.begin):
        record.add(rung)
        progress.end(rung)
        # Python drops a KeyboardInterrupt that comes inside a destructor, so the signal itself is asked too.
        if stopped():
            return


def _show(record: LadderRecord, console: Console) -> None:
    if record.rungs:
        console.print(*ladder_tables(record.rungs), sep="\n")
        record.draw()


def _as_text(parts: Sequence[RenderableType]) -> str:
    console = Console(highlight=False, width=WIDTH, no_color=True, force_terminal=False)
    with console.capture() as written:
        console.print(*parts, sep="\n")
    return written.get()
