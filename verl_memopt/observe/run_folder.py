"""The folder of one run: settings, metrics, timeline, samples and summary.

When a run resumes from a step, the rows of later steps are removed from each file.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypedDict

from blake3 import blake3

from verl_memopt.distributed.file_records import digest_of
from verl_memopt.errors import DataError, UserError
from verl_memopt.observe.files import append_rows, append_text, disk_refusals, keep_rows, read_rows, read_text, replace_text
from verl_memopt.observe.own_files import MARK, MODEL_RECORD, is_marked, mark, refuse_others
from verl_memopt.observe.phase import REWARD_IN_ROLLOUT, PhaseMemory, Span, wall_time
from verl_memopt.observe.samples import Sample, sample_row
from verl_memopt.records import RecordError, json_of, parse_json, read_json, read_record

FINAL_MODEL, BEST_MODEL = "model", "model_best"
"""Folder with the policy after the last step, and folder with that of the best checkpoint (``trainer.keep_best_checkpoint``)."""
INPUTS = "inputs"
"""Folder with the rows, functions and model that a caller in Python passed to the run."""
COMMAND, PENDING = "command.txt", "command.txt.pending"
"""Files in ``inputs/``, for a run from Python: the command of the run, and the command of a start that may still be refused."""
PREVIOUS, HALF = "previous", ".partial"
"""Folder that has one subfolder with the files of each earlier run, and the suffix of a subfolder that is not complete yet."""
CHARTS = ("reward_and_validation.png", "peak_memory_by_phase.png", "memory_timeline.png")
RECORD = (
    *("config.yaml", "metrics.jsonl", "memory_timeline.csv", "generations.jsonl", "warnings.jsonl", "phase_memory.jsonl"),
    *("summary.json", "record.json", "config_history", "tensorboard", "wandb", "wandb_id.txt", "mlflow.db", "mlflow_id.txt"),
    *("swanlog", "swanlab_id.txt"),
    *CHARTS,
)
RUN_FILES = (
    *(*RECORD, FINAL_MODEL, BEST_MODEL, f"{FINAL_MODEL}.old{HALF}", f"{BEST_MODEL}.old{HALF}"),
    *("global_step_*[0-9]", "latest_checkpointed_iteration.txt"),
)
"""Names of the files and folders that a run leaves in its folder."""
BESIDE = (INPUTS, "reward_logs", "console.log")
"""Further files of a run. This start may have written them already, so on their own they are no sign of an earlier run."""
IN_PASSING = (
    *("engine_config", "rollouts", ".stop", f"global_step_*{HALF}", f"{FINAL_MODEL}{HALF}", f"{BEST_MODEL}{HALF}"),
    *("out_of_memory_rank*.json", ".*.json.partial", ".*.yaml.partial", ".*.png.partial"),
)
"""Names of temporary files and folders that runs write, replace or remove in their folder."""


def refuse_what_is_not_ours(folder: Path) -> None:
    """Refuse a run folder if it contains a file of the user under a name that runs use. Nothing is written before.

    Raises:
        ConfigError: There is such a file. The message names it.
    """
    refuse_others(folder, (*RUN_FILES, *BESIDE, *IN_PASSING), (FINAL_MODEL, BEST_MODEL), "trainer.default_local_dir=")


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: Path) -> None:
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
        self.record = path / "record.json"
        self.run_id = uuid.uuid4().hex[:12]
        """Identifies this start of the run. A resume gets a new one."""
        self.began = wall_time()
        self._elapsed_before = 0.0
        self._is_new = False

    def begin(self, config_text: str, resumed_step: int | None) -> Path | None:
        """Prepare the folder for a new or a resumed run. Return the folder to which files of an earlier run moved, if any.

        On resume, the rows of later steps are removed, so that the files equal those of an uninterrupted run. Earlier settings
        that differ from the present ones move to ``config_history/``. ``resumed_step``: None = a new run.
        """
        with disk_refusals(self.config):
            self.path.mkdir(parents=True, exist_ok=True)
            self._is_new = mark(self.path)
            aside = self.set_aside(config_text) if resumed_step is None else self._keep_later_models(resumed_step)
            self.record.unlink(missing_ok=True)  # the lines below change the files, so its checksums become wrong
            if resumed_step is not None:
                self._reopen()
                self._rewind(resumed_step)
                self._keep_config(config_text, resumed_step)
            replace_text(self.config, config_text)
        self.began = wall_time()
        return aside

    def accept(self) -> None:
        # This start can no longer be refused, so its command becomes the command of the run.
        with suppress(FileNotFoundError):  # only a run from Python has one
            (self.path / INPUTS / PENDING).replace(self.path / INPUTS / COMMAND)

    def take_back(self, aside: Path | None) -> None:
        # Undo :meth:`begin` after a new run was refused: remove its files, and move the files of the earlier run back.
        for path in self._left_by_a_run():
            if path.name not in BESIDE:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if aside is not None:
            self._put_back(aside)
        if self._is_new:
            (self.path / MARK).unlink()

    def mend(self) -> None:
        # A start may be killed while it moves the files of an earlier run aside. Move them back.
        for half in self.path.glob(f"{PREVIOUS}/[0-9]*{HALF}") if is_marked(self.path) else ():
            self._put_back(half)

    def _reopen(self) -> None:
        # The run continues, so its summary must not say that it has ended.
        with suppress(UserError):  # the summary is damaged; whoever reads it next reports this
            if (summary := self.read_summary()).get(ENDED):
                self.write_summary(summary | {ENDED: False})

    def add_timeline(self, step: int, spans: Sequence[Span], memories: Mapping[str, PhaseMemory]) -> None:
        # Append a step's phases to the timeline. Step 0 covers the time before the first step.
        rows = timeline_rows(step, spans, memories)
        # Phases that began before this folder was ready (loading a model, for example) are running time too.
        self.began = min([self.began, *(row.timestamp for row in rows)])
        placed = [replace(row, elapsed_seconds=self._elapsed_before + row.timestamp - self.began) for row in rows]
        append_timeline(self.timeline, placed)

    def add_generations(self, step: int, samples: Sequence[Sample]) -> None:
        append_rows(self.generations, [sample_row(step, sample) for sample in samples])

    def add_warnings(self, step: int, texts: Sequence[str]) -> None:
        # There is no file until the first warning.
        if texts:
            append_rows(self.warnings, [{"step": step, "warning": text} for text in texts])

    def read_warnings(self) -> list[dict[str, Any]]:
        return self._rows(self.warnings)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        replace_text(self.summary, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        return self._rows(self.metrics)

    def read_timeline(self) -> list[TimelineRow]:
        return read_timeline(self.timeline) if self.timeline.exists() else []

    def read_summary(self) -> dict[str, Any]:
        """Return the summary, or an empty one for a run that has not ended.

        Raises:
            UserError: The summary is damaged.
        """
        if not self.summary.exists():
            return {}
        summary: dict[str, Any] = json_of(self.summary, dict[str, Any], "Delete it; report builds it again.")
        return summary

    def seal(self, names: Sequence[str] | None = None) -> None:
        """Write a record with the checksum of each file of a run that has ended. ``verl-memopt check`` finds damage by it.

        ``names``: files whose checksums are renewed in an existing record; None = all files.
        """
        if names is None:
            digests = {path.relative_to(self.path).as_posix(): digest_of(path) for path in self._sealed_files()}
        else:
            digests = self._read_seal() or {}
            if not digests:  # no record, or a damaged one; a new record would declare damaged files correct
                return
            digests |= {name: digest_of(self.path / name) for name in names}
        text = json.dumps(digests, indent=1)
        replace_text(self.record, json.dumps({"digest": blake3(text.encode()).hexdigest(), "files": digests}, indent=1) + "\n")

    def faults(self) -> list[str]:
        """Return one sentence for each file that cannot be read, or that differs from the record of a run that has ended."""
        found = []
        if self.record.exists() or self.record.is_symlink():
            digests = self._read_seal()
            if digests is None:
                return [f"{self.record.name} has other contents than were written"]
            for name, digest in digests.items():
                try:
                    found += [] if digest_of(self.path / name) == digest else [f"{name} has other contents than were written"]
                except OSError as error:
                    found.append(f"{name} cannot be read ({error.strerror})")
            return found
        with suppress(UserError):
            if self.read_summary().get(ENDED):
                found.append(
                    f"{self.record.name} is missing: {self.summary.name} says that the run has ended, so it was deleted, or the "
                    "run was killed in its last moment. Start the run again: it ends at once and writes the record again"
                )
        for read in (self.read_metrics, self.read_warnings, self.read_timeline, self.read_summary):
            try:
                read()
            except UserError as error:
                found.append(str(error))
        return found

    def _sealed_files(self) -> Iterator[Path]:
        # Checkpoints have their own checksums. Files of other programs get none.
        for path in sorted(self.path.iterdir()):
            if path.is_dir() and (path.name.startswith("model") or path == self.config_history):
                yield from sorted(file for file in path.rglob("*") if file.is_file())
            elif path.is_file() and path.name not in ("run.lock", self.record.name) and not path.name.startswith(NOT_SEALED):
                yield path

    def _read_seal(self) -> dict[str, str] | None:
        # None = the record is missing, or was changed after it was written.
        try:
            text = read_record(self.record).decode()
            digests = parse_json(text, _Seal)["files"]
            digest = blake3(json.dumps(digests, indent=1).encode()).hexdigest()
            return digests if text == json.dumps({"digest": digest, "files": digests}, indent=1) + "\n" else None
        except (OSError, ValueError):
            return None

    def _rows(self, path: Path) -> list[dict[str, Any]]:
        # Each row has a step. Its other entries are numbers, or texts whose names are in TEXTS.
        rows = read_rows(path) if path.exists() else []
        for row in rows:
            _step(row, path)
            wrong = [name for name, value in row.items() if not isinstance(value, float | int) and name not in TEXTS]
            if wrong or not all(isinstance(row.get(name, ""), str) for name in TEXTS):
                raise DataError(
                    f"{path}: in the row of step {row['step']} an entry is not a number: {wrong[:1]}. Correct or delete it."
                )
        return rows

    def _rewind(self, step: int) -> None:
        for path in (self.metrics, self.generations, self.warnings, self.phase_memory):
            keep_rows(path, lambda row, path=path: _step(row, path) <= step)  # type: ignore[misc]
        keep_timeline(self.timeline, step)
        self._elapsed_before = max((row.elapsed_seconds + row.seconds for row in self.read_timeline()), default=0.0)

    def _keep_config(self, config_text: str, step: int) -> None:
        # The earlier settings are about to be replaced. Keep them under a name that is still free.
        if not self.config.exists() or read_text(self.config) == config_text:
            return
        self.config_history.mkdir(exist_ok=True)
        names = (f"until_step_{step}{'' if number == 1 else f'_{number}'}.yaml" for number in itertools.count(1))
        self.config.rename(next(path for name in names if not (path := self.config_history / name).exists()))

    # All files of an earlier run move into one folder, which gets its final name when all of them are there.

    def set_aside(self, config_text: str) -> Path | None:
        """Move all files of an earlier run to a new folder in ``previous/``. Return it, or None if there are no such files.

        Inputs that the present settings name stay here. If the earlier settings name them too, they are copied.
        """
        left = self._left_by_a_run()
        if all(path.name in BESIDE for path in left):
            return None
        inputs = [path for found in left if found.name == INPUTS for path in found.iterdir() if path.name != PENDING]
        before = self.config.read_text(encoding="utf-8", errors="replace") if self.config.is_file() else ""
        stay = [path for path in inputs if path.name in config_text]
        moved = [path for path in (*left, *inputs) if path not in stay and path.name != INPUTS]
        aside = self._to_previous(moved, copied=[path for path in stay if path.name in before])
        with suppress(OSError):  # it does not exist, or inputs that the present settings name are in it
            (self.path / INPUTS).rmdir()
        return aside

    def _keep_later_models(self, step: int) -> Path | None:
        # Move the models of later steps than the resumed one aside, with a copy of the files that describe their run.
        models = [path for name in (FINAL_MODEL, BEST_MODEL) if (path := self.path / name).is_dir() and _step_of(path) > step]
        record = [path for path in self._left_by_a_run() if any(fnmatch(path.name, name) for name in (*RECORD, *BESIDE))]
        return self._to_previous(models, record) if models else None

    def _to_previous(self, moved: Iterable[Path], copied: Iterable[Path]) -> Path:
        targets = (self.path / PREVIOUS / str(number) for number in itertools.count(1))
        halves = ((path, path.with_name(f"{path.name}{HALF}")) for path in targets)
        target, half = next(pair for pair in halves if not any(map(os.path.lexists, pair)))
        with disk_refusals(target):
            half.mkdir(parents=True)
            mark(half)
            for path in copied:
                _copy(path, half / path.relative_to(self.path))
            for path in moved:
                to = half / path.relative_to(self.path)
                to.parent.mkdir(exist_ok=True)
                path.rename(to)
            half.rename(target)
        return target

    def _put_back(self, source: Path, below: str = "") -> None:
        # Only what is missing here moves back. What is still here had only been copied.
        for path in (entry for entry in (source / below).iterdir() if entry.name != MARK):
            name = f"{below}{path.name}"
            if not os.path.lexists(self.path / name):
                path.rename(self.path / name)
            elif path.is_dir() and name == INPUTS:
                self._put_back(source, f"{INPUTS}/")
        if not below:
            shutil.rmtree(source)

    def _left_by_a_run(self) -> list[Path]:
        return [path for path in sorted(self.path.glob("*")) if path.name in BESIDE or is_run_file(path.name)]


ENDED = "ended"
"""Entry of the summary. True = the run has ended, and so it has a record of checksums."""

NOT_SEALED = (".", "mlflow.db", "console.log")
"""Prefixes of the names of files that change after the run has ended: even opening MLflow's database changes it."""

TEXTS = ("run_id", "warning")
"""Entries of metrics and warnings that are texts."""


def _step(row: Mapping[str, Any], path: Path) -> int:
    step = row.get("step")
    if type(step) is not int:
        raise DataError(f"{path}: a row without a step: {str(dict(row))[:80]}. Correct or delete it.")
    if path.name == "warnings.jsonl" and "warning" not in row:
        raise DataError(f"{path}: a row of step {step} without its warning. Correct or delete it.")
    return step


def is_run_file(name: str) -> bool:
    """Return whether runs leave a file or folder of this name in their folder. A new run moves it aside."""
    return any(fnmatch(name, pattern) for pattern in RUN_FILES)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    shutil.copytree(source, target, symlinks=True) if source.is_dir() else shutil.copy2(source, target, follow_symlinks=False)


def _step_of(model: Path) -> float:
    # A model whose record cannot be read counts as the model of another run. Its step is infinite, so it is moved aside.
    try:
        return float(read_json(model / MODEL_RECORD, _StepOfModel)["step"])
    except (OSError, RecordError):
        return math.inf


class _StepOfModel(TypedDict):
    step: int


class _Seal(TypedDict):
    files: dict[str, str]


def program() -> str:
    # Users copy this command into a shell, so it must start this installation.
    path = Path(sys.executable).with_name("verl-memopt")
    if path.is_file() and str(path) != shutil.which("verl-memopt"):
        return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
    return "verl-memopt"


def open_run_folder(path: Path) -> RunFolder:
    """Return the folder of an earlier run.

    Raises:
        UserError: There is no such folder, or it is not a run folder.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such run folder. Use the folder that a run printed as its last line.")
    folder = RunFolder(path)
    if not folder.metrics.exists() and not folder.timeline.exists():
        raise UserError(f"{path}: it contains neither metrics.jsonl nor memory_timeline.csv. Use the folder of a run.")
    return folder


# Memory and time of every phase of a run: rows of ``memory_timeline.csv``.


@dataclass(frozen=True)
class TimelineRow:
    """One phase of one step, over all processes. Bytes that were not counted are None, and empty in the file."""

    timestamp: float
    """When the phase began, in seconds since 1970."""
    elapsed_seconds: float
    """When the phase began, in seconds of running time. A pause between a stop and a resume does not count."""
    step: int
    """0 = before the first step."""
    phase: str
    """Name of the phase, as in ``timing_s/<phase>``."""
    seconds: float
    """Duration as the driver measured it."""
    allocated_bytes: int | None = None
    """Live tensors at the end of the phase, the largest over ranks."""
    peak_allocated_bytes: int | None = None
    """Peak of live tensors, the largest over ranks."""
    peak_reserved_bytes: int | None = None
    """Peak of the caching allocator, the largest over ranks."""
    device_used_bytes: int | None = None
    """Total minus free memory of the device, the largest over ranks."""
    host_rss_bytes: int | None = None
    """Resident memory of driver and workers together."""
    counter: str = ""
    """Source of the live tensor bytes: allocator (GPU), tracker (CPU), or empty."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Bytes by kind at the peak."""


COLUMNS = tuple(column.name for column in fields(TimelineRow))
_TIMES = ("timestamp", "elapsed_seconds", "seconds")
_INTEGERS = ("allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "host_rss_bytes")
_NO_PHASES = ("step", "epoch", "run", REWARD_IN_ROLLOUT)
"""Spans that contain phases, or that are a part of a phase. They are timed, but have no row in the timeline."""


def timeline_rows(step: int, spans: Sequence[Span], memories: Mapping[str, PhaseMemory]) -> list[TimelineRow]:
    """Return a step's rows in the order in which the phases began. :meth:`RunFolder.add_timeline` sets ``elapsed_seconds``.

    ``memories``: name of a phase -> its figures over all processes. A phase that is not in it has empty cells.
    """
    rows = []
    for span in sorted((span for span in spans if span.name not in _NO_PHASES), key=lambda span: span.started):
        memory, figures = memories.get(span.name), dict[str, Any]()
        if memory is not None:
            counter = "tracker" if memory.peak_reserved_bytes is None else "allocator"
            figures |= {name: getattr(memory, name) for name in (*_INTEGERS, "kinds")}
            figures["counter"] = "" if memory.peak_allocated_bytes is None else counter
        rows.append(TimelineRow(span.started, 0.0, step, span.name, span.seconds, **figures))
    return rows


def append_timeline(path: Path, rows: Sequence[TimelineRow]) -> None:
    # A new file begins with the header.
    text = _csv_text(rows, header=not path.exists() or path.stat().st_size == 0)
    append_text(path, text)


def keep_timeline(path: Path, last_step: int) -> None:
    # Drop the rows after a step in one atomic write.
    if path.exists():
        replace_text(path, _csv_text([row for row in read_timeline(path) if row.step <= last_step], header=True))


def read_timeline(path: Path) -> list[TimelineRow]:
    """Return the rows of a timeline file. An incomplete last line, left by a kill, is ignored.

    Raises:
        DataError: Any other line is not a row. The message names file and line.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    # Text after the last newline is a row that a kill has cut off.
    whole = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(io.StringIO(whole, newline=""))
    try:
        return [_parsed(path, reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num + 1}: not a timeline row ({error}). Correct or delete this line.") from error


def _parsed(path: Path, line: int, cells: dict[str, Any]) -> TimelineRow:
    try:
        figures: dict[str, Any] = {name: int(cells[name]) if cells[name] else None for name in _INTEGERS}
        figures |= {name: float(cells[name]) for name in _TIMES}
        kinds = parse_json(cells["kinds"] or "{}", dict[str, int])
        if not all(math.isfinite(figures[name]) for name in _TIMES):
            raise ValueError("a time is not finite")
        return TimelineRow(step=int(cells["step"]), phase=cells["phase"], counter=cells["counter"], kinds=kinds, **figures)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}:{line}: not a timeline row ({error}). Correct or delete this line.") from error


def _csv_text(rows: Sequence[TimelineRow], header: bool) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if header:
        writer.writeheader()
    for row in rows:
        cells = asdict(row) | {"kinds": json.dumps(row.kinds, sort_keys=True) if row.kinds else ""}
        cells |= {name: round(cells[name], 6) for name in _TIMES}
        writer.writerow(cells)
    return text.getvalue()
