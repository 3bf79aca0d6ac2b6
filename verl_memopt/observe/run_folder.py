"""The folder of one run: settings, metrics, timeline, samples and summary, each cut back to the step a run resumes from."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_memopt.errors import UserError
from verl_memopt.observe.files import append_rows, disk_refusals, keep_rows, read_rows, replace_text
from verl_memopt.observe.phase import PhaseMemory, Span
from verl_memopt.observe.samples import Sample, sample_row
from verl_memopt.observe.timeline import TimelineRow, append_timeline, keep_timeline, read_timeline, timeline_rows


class RunFolder:
    """Paths and files of one run. It does not depend on what the run computes.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        """Set the paths; nothing is created yet."""
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.timeline = path / "memory_timeline.csv"
        self.generations = path / "generations.jsonl"
        self.warnings = path / "warnings.jsonl"
        self.phase_memory = path / "phase_memory.jsonl"
        self.summary = path / "summary.json"
        self.tensorboard = path / "tensorboard"
        self.config_history = path / "config_history"
        self.run_id = uuid.uuid4().hex[:12]
        """Identifies this start of the run. A resumed run has another."""
        self.began = time.time()
        self._elapsed_before = 0.0

    def begin(self, config_text: str, resumed_step: int | None) -> None:
        """Prepare the folder for a new run, or for one that continues.

        On resume the rows after the step are dropped, so that the files equal those of an uninterrupted run, and settings that
        differ from the present ones move to ``config_history/``. A new run moves the files of an earlier one to ``previous/`` and
        replaces what is there.

        Args:
            config_text: The settings as YAML.
            resumed_step: The step after which the run continues. None = a new run.

        Raises:
            UserError: The disk refused.
        """
        with disk_refusals(self.config):
            self.path.mkdir(parents=True, exist_ok=True)
            if resumed_step is None:
                self._set_aside()
            else:
                self._rewind(resumed_step)
                self._keep_config(config_text, resumed_step)
            replace_text(self.config, config_text)
        self.began = time.time()

    def add_timeline(self, step: int, spans: Sequence[Span], memories: Mapping[str, PhaseMemory]) -> None:
        """Append a step's phases to the timeline. Step 0 covers the time before the first step."""
        rows = timeline_rows(step, spans, memories)
        # Phases that began before this folder was ready (loading a model, for example) are running time too.
        self.began = min([self.began, *(row.timestamp for row in rows)])
        placed = [replace(row, elapsed_seconds=self._elapsed_before + row.timestamp - self.began) for row in rows]
        append_timeline(self.timeline, placed)

    def add_generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Append sample generations of a step."""
        append_rows(self.generations, [sample_row(step, sample) for sample in samples])

    def add_warnings(self, step: int, texts: Sequence[str]) -> None:
        """Append the warnings of a step. There is no file until the first warning."""
        if texts:
            append_rows(self.warnings, [{"step": step, "warning": text} for text in texts])

    def read_warnings(self) -> list[dict[str, Any]]:
        """Return the warnings so far, each with its step."""
        return read_rows(self.warnings) if self.warnings.exists() else []

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, completely or not at all."""
        replace_text(self.summary, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each step so far, in the order they were logged."""
        return read_rows(self.metrics) if self.metrics.exists() else []

    def read_timeline(self) -> list[TimelineRow]:
        """Return the timeline so far."""
        return read_timeline(self.timeline) if self.timeline.exists() else []

    def read_summary(self) -> dict[str, Any]:
        """Return the summary, or an empty one for a run that has not ended.

        Raises:
            UserError: The file is not a JSON object.
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
        for path in (self.metrics, self.generations, self.warnings, self.phase_memory):
            keep_rows(path, lambda row: row["step"] <= step)
        keep_timeline(self.timeline, step)
        self._elapsed_before = max((row.elapsed_seconds + row.seconds for row in self.read_timeline()), default=0.0)

    def _keep_config(self, config_text: str, step: int) -> None:
        """Move settings that are about to be replaced to ``config_history/until_step_N.yaml``, under an unused name."""
        if not self.config.exists() or self.config.read_text(encoding="utf-8", errors="replace") == config_text:
            return
        self.config_history.mkdir(exist_ok=True)
        names = (f"until_step_{step}{'' if number == 1 else f'_{number}'}.yaml" for number in itertools.count(1))
        self.config.rename(next(path for name in names if not (path := self.config_history / name).exists()))

    def _set_aside(self) -> None:
        record = (
            *(self.metrics, self.timeline, self.generations, self.warnings, self.summary, self.tensorboard),
            *(self.phase_memory, self.config, self.config_history),
        )
        for path in (path for path in record if path.exists()):
            target = self.path / "previous" / path.name
            target.parent.mkdir(exist_ok=True)
            # A rename replaces a file but no folder that has files, so one that an earlier run left there goes first.
            if target.is_dir():
                shutil.rmtree(target)
            path.rename(target)


def program() -> str:
    """Return how the command line of this Python is called, for a line to copy."""
    path = Path(sys.executable).with_name("verl-memopt")
    if path.is_file() and str(path) != shutil.which("verl-memopt"):
        return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
    return "verl-memopt"


def open_run_folder(path: Path) -> RunFolder:
    """Return the folder of an earlier run.

    Raises:
        UserError: It does not exist or contains no run.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such run folder. Use the folder that a run printed as its last line.")
    folder = RunFolder(path)
    if not folder.metrics.exists() and not folder.timeline.exists():
        raise UserError(f"{path}: it contains neither metrics.jsonl nor memory_timeline.csv. Use the folder of a run.")
    return folder
