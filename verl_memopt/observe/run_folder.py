"""The folder of one run: settings, metrics, timeline, samples and summary, each cut back to the step a run resumes from."""

from __future__ import annotations

import itertools
import json
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_memopt.errors import UserError
from verl_memopt.observe.files import append_rows, keep_rows, read_rows, replace_text
from verl_memopt.observe.phase import PhaseMemory
from verl_memopt.observe.samples import Sample, sample_row
from verl_memopt.observe.timeline import TimelineRow, append_timeline, keep_timeline, read_timeline, timeline_rows
from verl_memopt.observe.timing import Span


class RunFolder:
    """Paths and files of one run. Nothing here knows what the run computes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.timeline = path / "memory_timeline.csv"
        self.generations = path / "generations.jsonl"
        self.summary = path / "summary.json"
        self.tensorboard = path / "tensorboard"
        self.config_history = path / "config_history"
        self.run_id = uuid.uuid4().hex[:12]
        """Of this start of the run; a resumed run has another."""
        self.began = time.time()
        self._elapsed_before = 0.0

    def begin(self, config_text: str, resumed_step: int | None) -> None:
        """Makes the folder ready for a run that starts fresh (None) or goes on after a step.

        On resume the rows beyond that step are dropped, so that the files equal an uninterrupted run's, and settings that
        differ from the present ones go to ``config_history/``. A fresh start moves the files of an earlier run to
        ``previous/``, over those of the one before.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if resumed_step is None:
            self._set_aside()
        else:
            self._rewind(resumed_step)
            self._keep_config(config_text, resumed_step)
        replace_text(self.config, config_text)
        self.began = time.time()

    def add_timeline(self, step: int, spans: Sequence[Span], memories: Mapping[str, PhaseMemory]) -> None:
        """Appends a step's phases to the timeline. Step 0 is what precedes the first step."""
        rows = timeline_rows(step, spans, memories)
        # What began before this folder was made ready (loading a model, say) is running time too.
        self.began = min([self.began, *(row.timestamp for row in rows)])
        placed = [replace(row, elapsed_seconds=self._elapsed_before + row.timestamp - self.began) for row in rows]
        append_timeline(self.timeline, placed)

    def add_generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Appends sample generations of a step."""
        append_rows(self.generations, [sample_row(step, sample) for sample in samples])

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes ``summary.json``, whole or not at all."""
        replace_text(self.summary, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Gives the metrics of each step so far, in the order they were logged."""
        return read_rows(self.metrics) if self.metrics.exists() else []

    def read_timeline(self) -> list[TimelineRow]:
        """Gives the timeline so far."""
        return read_timeline(self.timeline) if self.timeline.exists() else []

    def read_summary(self) -> dict[str, Any]:
        """Gives the summary as written, or an empty one for a run that has not ended.

        Errors: UserError for a file that is no JSON object.
        """
        if not self.summary.exists():
            return {}
        try:
            summary = json.loads(self.summary.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{self.summary}: not JSON ({error}). Delete it; report builds it again.") from error
        if not isinstance(summary, dict):
            raise UserError(f"{self.summary}: expected a JSON object. Delete it; report builds it again.")
        return summary

    def _rewind(self, step: int) -> None:
        keep_rows(self.metrics, lambda row: row["step"] <= step)
        keep_rows(self.generations, lambda row: row["step"] <= step)
        keep_timeline(self.timeline, step)
        self._elapsed_before = max((row.elapsed_seconds + row.seconds for row in self.read_timeline()), default=0.0)

    def _keep_config(self, config_text: str, step: int) -> None:
        """Moves settings that are about to be replaced to ``config_history/until_step_N.yaml``; one name is used once."""
        if not self.config.exists() or self.config.read_text(encoding="utf-8", errors="replace") == config_text:
            return
        self.config_history.mkdir(exist_ok=True)
        names = (f"until_step_{step}{'' if number == 1 else f'_{number}'}.yaml" for number in itertools.count(1))
        self.config.rename(next(path for name in names if not (path := self.config_history / name).exists()))

    def _set_aside(self) -> None:
        record = (self.metrics, self.timeline, self.generations, self.summary, self.tensorboard, self.config, self.config_history)
        for path in (path for path in record if path.exists()):
            target = self.path / "previous" / path.name
            target.parent.mkdir(exist_ok=True)
            _remove(target)
            path.rename(target)


def open_run_folder(path: Path) -> RunFolder:
    """Gives the folder of a run that was made before.

    Errors: UserError when it does not exist or holds no run.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such run folder. Give the folder that a run printed as its last line.")
    folder = RunFolder(path)
    if not folder.metrics.exists() and not folder.timeline.exists():
        raise UserError(f"{path}: holds neither metrics.jsonl nor memory_timeline.csv. Give the folder of a run.")
    return folder


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
