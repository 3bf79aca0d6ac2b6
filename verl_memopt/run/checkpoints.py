"""Checkpoint folders on disk. Each is renamed to its final name when it is whole, so a stop leaves no partial checkpoint.

The reasons are in docs/decisions/checkpoints.md.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NotRequired, TypedDict, cast

import torch
from blake3 import blake3

from verl_memopt.distributed.file_records import (
    ALGORITHM,
    Records,
    file_fault,
    hashed_file,
    record_file,
    sync_folder,
    sync_folders,
)
from verl_memopt.distributed.sharded_state import READ_ERRORS
from verl_memopt.errors import CheckpointError, UserError
from verl_memopt.observe.files import disk_refusals, free_space, write_whole
from verl_memopt.observe.run_folder import RunFolder
from verl_memopt.records import RecordError, checked, is_inside, odd_entry, parse_json, read_record
from verl_memopt.run.run_lock import reading, removing

logger = logging.getLogger(__name__)

STEP_FOLDER = re.compile(r"^global_step_(\d+)$")
PROVEN = "proven"
"""Empty file in a checkpoint. It shows that a later step got finite gradients from its weights. The manifest does not list it."""
AWAY = ".partial"
"""Suffix of a folder that is being written, replaced or removed."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    ``driver``: the driver's state: data position, seed, controllers and settings. ``passed_over``: one text, ``folder: not whole
    (fault)``, for each newer checkpoint that was skipped.
    """

    folder: Path
    step: int
    driver: dict[str, Any]
    passed_over: tuple[str, ...] = ()


class LoaderState(TypedDict):
    """The position of the data loader, in rows that were read whole (``num_rows``) or in a stream (``digest``)."""

    seed: int
    epoch: int
    position: int
    num_rows: NotRequired[int]
    digest: NotRequired[str | None]


class DriverState(TypedDict):
    """The driver's state in a checkpoint, as a resumed run and an export read it. Parts of the driver add their own entries."""

    seed: int
    loader: dict[str, Any]
    token_budgets: dict[str, Any]
    settings: dict[str, Any]
    weights: dict[str, list[int]]
    critic_weights: NotRequired[dict[str, list[int]] | None]
    contents: NotRequired[dict[str, Any]]
    dtypes: NotRequired[dict[str, str]]


def check_driver(checkpoint: Checkpoint) -> None:
    """Check that the driver's state has the form that a run writes.

    Raises:
        CheckpointError: It has another form.
    """
    try:
        state = checked(checkpoint.driver, DriverState, "its state")
        # The loader's state is empty if the run reads no rows.
        loader = checked(state["loader"], LoaderState, "its state.loader") if state["loader"] else {}
        for name, value in loader.items():
            if isinstance(value, int) and value < 0:
                raise RecordError(f"its state.loader.{name}: the number is below 0")
    except RecordError as error:
        raise CheckpointError(f"{checkpoint.folder}: no run wrote this checkpoint ({error}). Give another step.") from error


@dataclass
class CheckpointStore:
    """The ``global_step_N`` folders of a run. All facts are read from disk, except the step that the run itself saved last.

    Attributes:
        root: The run folder.
        keep: How many of the newest checkpoints to keep; None = all.
        keep_best: Also keep the checkpoint with the best validation score.
        metric: The validation metric used as the score, as ``trainer.keep_best_checkpoint`` names it; None = the usual score.
        present: Step of the checkpoint that this run saved last or started from; None = there is none yet.
    """

    root: Path
    keep: int | None
    keep_best: bool = False
    metric: str | None = None
    present: int | None = None

    def folder(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def begin(self, step: int) -> Path:
        """Return an empty folder for the checkpoint of ``step``. It does not count as a checkpoint until :meth:`commit`."""
        aside = self._aside(step)
        # A folder with this name was left unfinished by a killed run.
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
        except OSError as error:
            raise self.failed(step, str(error)) from error
        return aside

    def commit(
        self,
        step: int,
        driver: dict[str, Any],
        world_size: int,
        records: Mapping[str, Any] | None = None,
        score: float | None = None,
    ) -> Path:
        """Make the folder of :meth:`begin` the newest checkpoint, and remove older ones that are no longer kept.

        ``records``: file name -> record, for files that were hashed when they were written. All other files are hashed here.
        ``score``: None = no validation.

        Raises:
            CheckpointError: A file cannot be written, or its size differs from its record. Earlier checkpoints stay as they are.
        """
        aside, final = self._aside(step), self.folder(step)
        try:
            files = self._complete(aside, driver, dict(records or {}))
            finite_score = score if score is not None and math.isfinite(score) else None
            commit = self.history().last_commit + 1
            manifest = Manifest(step, commit, world_size, torch.__version__, finite_score, files, self.metric)
            write_manifest(aside, manifest)
            # This call forces the manifest to disk. Its record is not kept, because the manifest contains its own checksum.
            record_file(aside / MANIFEST)
            # Names must be on disk before the rename; otherwise a power failure could leave the final name with missing
            # files.
            sync_folders(aside)
            if final.exists():
                # The old checkpoint of this step is removed only after the new one is in its place.
                os.replace(final, self._emptied(final))
            # The rename makes the whole checkpoint visible at once. A stop before it only loses the unfinished folder.
            os.replace(aside, final)
            # verl's tracker file comes after the checkpoint that it names, so that it never names a missing one.
            write_whole(self.root / TRACKER, f"{step}\n")
            # A rename changes the folder. It survives a power failure only after the folder is on disk.
            sync_folder(self.root)
        except (OSError, RuntimeError) as error:
            raise self.failed(step, str(error)) from error
        self.present = step
        self._prune()
        return final

    def failed(self, step: int, reason: str) -> CheckpointError:
        # Remove the unfinished checkpoint of ``step`` and return the error to raise.
        shutil.rmtree(self._aside(step), ignore_errors=True)
        kept = self.steps()
        last = f"the checkpoint of step {kept[-1]} is untouched" if kept else "there is no earlier checkpoint"
        return CheckpointError(
            f"trainer.default_local_dir={self.root}: step {step} could not be saved: {reason} ({free_space(self.root)}; {last}). "
            "Free space, lower trainer.max_actor_ckpt_to_keep, or set another trainer.default_local_dir; "
            "then start again to resume."
        )

    def history(self) -> CheckpointHistory:
        return read_history(self.root, self._folders())

    def steps(self) -> list[int]:
        """Return the steps of this run's checkpoints, whole or not, oldest first.

        Steps of an earlier run that this one does not continue are left out.
        """
        return self.history().steps

    def newest(self, unreadable: Mapping[int, str] | None = None) -> Checkpoint | None:
        """Return the newest whole checkpoint, from which the run continues; None if there is no checkpoint at all.

        Damaged checkpoints are skipped, and each is logged with its fault. ``unreadable``: step -> fault of checkpoints that
        looked whole but could not be loaded.

        Raises:
            CheckpointError: There are checkpoints, but none is whole.
        """
        lineage, faults = self.history(), unreadable or {}
        if lineage.doubt is not None:
            logger.warning("%s", lineage.doubt)
        passed_over: list[str] = []
        for step in reversed(lineage.steps):
            read = faults[step] if step in faults else _read(self.folder(step))
            if read == GONE:  # a running run has removed it meanwhile
                return self.newest(unreadable)
            if isinstance(read, Checkpoint):
                self.present = read.step
                return replace(read, passed_over=tuple(passed_over))
            passed_over.append(f"{self.folder(step)}: not whole ({read})")
            logger.warning("%s; falling back to the one before it", passed_over[-1])
        if not lineage.commits and not (self.root / TRACKER).exists():
            return None
        if not lineage.commits:
            named = "?"
            with suppress(OSError, RecordError):
                named = read_record(self.root / TRACKER).decode(errors="replace").strip()[:20]
            raise CheckpointError(
                f"trainer.default_local_dir={self.root}: {TRACKER} names step {named}, and there is no checkpoint. Put the "
                "checkpoints back, name one elsewhere with trainer.resume_mode=resume_path, or start over with "
                "trainer.resume_mode=disable."
            )
        passed_over += [f"{self.folder(step)}: {BEYOND}" for step in lineage.beyond]
        raise CheckpointError(
            f"trainer.default_local_dir={self.root}: there are checkpoints, and none can be resumed. {'; '.join(passed_over)}. "
            "Nothing was changed. Put a whole copy in place, name a checkpoint elsewhere with trainer.resume_mode=resume_path, "
            "or start over with trainer.resume_mode=disable, which moves these to previous/."
        )

    def resumed(self, checkpoint: Checkpoint) -> None:
        # The checkpoint may be in the folder of another run, and then it does not belong to this store.
        self.present = checkpoint.step if checkpoint.folder == self.folder(checkpoint.step).resolve() else None

    def prove(self, step: int) -> None:
        """Mark the checkpoint of ``step`` as proven: its weights have since given finite gradients.

        This applies only to the checkpoint that this run saved last or started from. Older checkpoints that were kept until a
        newer one is proven are removed.
        """
        marker = self.folder(step) / PROVEN
        if step != self.present or not marker.parent.is_dir() or marker.exists():
            return
        try:
            marker.touch()
            sync_folder(marker.parent)
        except OSError as error:
            raise CheckpointError(
                f"{marker}: cannot be written ({error.strerror}; {free_space(self.root)}). Free space."
            ) from error
        self._prune()

    def proven(self) -> int | None:
        return max((step for step in self.steps() if self.is_proven(step)), default=None)

    def is_proven(self, step: int) -> bool:
        return (self.folder(step) / PROVEN).is_file()

    def best(self) -> int | None:
        """Return the step with the best validation score, the newer one of equal scores; None if no step has a score.

        Scores of different metrics cannot be compared, so only those of the metric of the newest scored step count.
        """
        ranked = self._ranked()
        return max(ranked)[1] if ranked else None

    def is_better(self, score: float | None) -> bool:
        if score is None or not math.isfinite(score):
            return False
        steps = self._ranked()
        newest = self.history().manifests[max(step for _, step in steps)].metric if steps else self.metric
        return not steps or newest != self.metric or rank_of(self.metric, score) > max(steps)[0]

    def _ranked(self) -> list[tuple[float, int]]:
        # (rank, step) by the metric of the newest step that has a score. The best has the highest rank.
        lineage = self.history()
        scored = [lineage.manifests[step] for step in lineage.steps if step in lineage.manifests]
        scored = [manifest for manifest in scored if manifest.score is not None]
        alike = [manifest for manifest in scored if manifest.metric == scored[-1].metric]
        return [(rank_of(manifest.metric, cast(float, manifest.score)), manifest.step) for manifest in alike]

    def _folders(self) -> dict[int, Path]:
        if not self.root.is_dir():
            return {}
        # A broken link counts as a checkpoint that is damaged. If it were ignored, the run could start anew without a warning.
        matched = ((STEP_FOLDER.match(path.name), path) for path in self.root.iterdir() if path.is_dir() or path.is_symlink())
        return {int(match.group(1)): path for match, path in matched if match}

    def _aside(self, step: int) -> Path:
        return self.root / f"global_step_{step}{AWAY}"

    def _complete(self, aside: Path, driver: dict[str, Any], records: Records) -> Records:
        with hashed_file(aside / "data.pt", records, "data.pt") as file:
            torch.save(driver, cast("IO[bytes]", file))
        present = {path.relative_to(aside).as_posix(): path for path in aside.rglob("*") if path.is_file()}
        records |= {name: record_file(path) for name, path in present.items() if name not in records}
        for name, record in records.items():
            # A disk may cut a file short without an error. The checksum alone would show this only on resume.
            size = present[name].stat().st_size if name in present else 0
            if size != record.size:
                raise OSError(f"{name} has {size} bytes on disk, and {record.size} were written")
        return dict(sorted(records.items()))

    def _prune(self) -> None:
        # Remove folders that a killed run has left half written or half removed.
        for path in self.root.glob(f"global_step_*{AWAY}"):
            shutil.rmtree(path, ignore_errors=True)
        if self.keep is None:
            return
        steps = self.steps()
        # A proven checkpoint is kept, because the newest checkpoints may already have bad weights.
        kept = {*steps[-self.keep :], self.proven(), self.best() if self.keep_best else None}
        for folder in [self.folder(step) for step in steps if step not in kept]:
            with removing(folder) as is_free:
                if not is_free:  # a later save removes it
                    logger.info("%s is kept for now, because another process reads it", folder)
                    continue
                away = self._emptied(folder)
                with disk_refusals(folder):
                    # Rename it first: removing takes time, and a kill in between would leave a broken checkpoint under its name.
                    os.replace(folder, away)
            shutil.rmtree(away, ignore_errors=True)

    def _emptied(self, folder: Path) -> Path:
        # The name that a checkpoint gets before it is removed, so that a kill leaves no partial one under its own name.
        away = folder.with_name(f"{folder.name}.old{AWAY}")
        shutil.rmtree(away, ignore_errors=True)
        return away


def rank_of(metric: str | None, score: float) -> float:
    # The score with a sign such that higher is better. ``metric``: as ``trainer.keep_best_checkpoint`` names it.
    return -score if (metric or "").startswith("min:") else score


def is_checkpoint(folder: Path) -> bool:
    # The checkpoint may be damaged: this checks only the folder's name.
    return STEP_FOLDER.match(folder.name) is not None and folder.is_dir()


def read_checkpoint(folder: Path, key: str = "trainer.resume_from_path=") -> Checkpoint:
    """Return the checkpoint in a ``global_step_N`` folder. The path may be relative or start with ``~``.

    ``key``: text that errors have before the folder.

    Raises:
        CheckpointError: The folder is not a checkpoint, or the checkpoint is not whole.
    """
    folder = folder.expanduser().resolve()
    if not is_checkpoint(folder):
        raise CheckpointError(
            f"{key}{folder}: not a checkpoint. Give a global_step_N folder that exists, or the folder of a run that has one."
        )
    read = _read(folder)
    if isinstance(read, Checkpoint):
        return read
    way_out = "Give another step, or use resume_mode=auto." if key else "Give another step: verl-memopt check lists them."
    raise CheckpointError(f"{key}{folder}: not whole ({read}). {way_out}")


GONE = "it is gone"
"""Fault of a checkpoint that the run has removed since it was listed."""


def _read(folder: Path) -> Checkpoint | str:
    with reading(folder) as is_there:
        return _read_held(folder) if is_there else GONE


def _read_held(folder: Path) -> Checkpoint | str:
    if (fault := find_fault(folder)) is not None:
        return fault
    manifest = read_manifest(folder)
    if folder.name != f"global_step_{manifest.step}":
        return f"it was written as step {manifest.step}"
    try:
        driver = torch.load(folder / "data.pt", weights_only=True)
        return Checkpoint(folder, manifest.step, checked(driver, dict[str, Any], "its state"))
    except READ_ERRORS as error:
        return f"data.pt cannot be read: {error}"


# ``verl-memopt check RUN_DIR``: verifies every checkpoint of a run and prints one line for each.


def check_folder(run_dir: Path) -> int:
    """Verify the checkpoints of a run folder. Print one line for each, oldest first, and one line for each other damaged file.

    Return the exit code, which is 1 if a checkpoint or a file is damaged.
    """
    store = CheckpointStore(run_dir, None)
    lineage = store.history()
    if not lineage.commits:
        raise UserError(f"{run_dir}: holds no checkpoint. Give a folder with global_step_N folders.")
    if lineage.doubt is not None:
        sys.stdout.write(f"{lineage.doubt}\n")
    faults: dict[int, str | None] = {}
    for step in sorted(lineage.commits):
        with reading(store.folder(step)) as is_there:
            if is_there:
                faults[step] = find_fault(store.folder(step))
    if faults.keys() != store.history().commits.keys() & lineage.commits.keys():
        return check_folder(run_dir)  # a running run has removed a checkpoint meanwhile
    for step, fault in faults.items():
        facts = ["whole" if fault is None else f"NOT WHOLE ({fault})"]
        manifest = lineage.manifests.get(step)
        if manifest is not None:
            size = sum(record.size for record in manifest.files.values())
            facts.append(f"{len(manifest.files)} files, {size:,} bytes")
            facts += [] if manifest.score is None else [f"{manifest.metric or 'validation score'} {manifest.score:.4g}"]
        facts += ["best"] if step == store.best() else []
        facts += ["proven: its weights gave finite gradients"] if store.is_proven(step) else []
        facts += [BEYOND] if step in lineage.beyond else []
        sys.stdout.write(f"global_step_{step}: {', '.join(facts)}\n")
    other_faults = RunFolder(run_dir).faults()
    for fault in other_faults:
        sys.stdout.write(f"NOT WHOLE: {fault}\n")
    return 0 if all(fault is None for fault in faults.values()) and not other_faults else 1


# The manifest of a checkpoint: a file that lists the other files with their checksums, and contains its own checksum.

MANIFEST = "meta.json"

FORMAT = 1

HASHING_THREADS = 4
"""Number of files that are hashed at the same time when a checkpoint is verified."""


class ManifestError(ValueError):
    """A manifest is missing, cannot be read, or was changed after it was written. The message does not name the folder."""


@dataclass(frozen=True)
class Manifest:
    """The contents of one checkpoint.

    Attributes:
        step: Step of the run.
        commit: Commit number: one more than the largest commit number in the run folder at that time.
        world_size: Number of ranks that wrote the checkpoint.
        torch: Version of torch that wrote the checkpoint.
        score: Validation score of the step; None without a validation.
        files: name -> size and checksum of each file.
        metric: Value of ``trainer.keep_best_checkpoint`` that selected the score; None = the usual score, for which higher is
            better.
    """

    step: int
    commit: int
    world_size: int
    torch: str
    score: float | None = None
    files: Records = field(default_factory=dict)
    metric: str | None = None


def write_manifest(folder: Path, manifest: Manifest) -> str:
    # Write a manifest into ``folder`` and return its text. The caller must force it to disk.
    text = _render({"format": FORMAT, "algorithm": ALGORITHM, **asdict(manifest)})
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    return text


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        ManifestError: The manifest is missing or cannot be read, or was changed after it was written, even by one character.
    """
    path = folder / MANIFEST
    try:
        text = read_record(path).decode("utf-8")
        fields = parse_json(text, dict[str, Any])
        # Write the text again from its fields and compare it. This also finds a change after which JSON gives the same fields.
        if text != _render({name: value for name, value in fields.items() if name != "digest"}):
            raise ManifestError(f"{MANIFEST} has other contents than were written")
        made_by = fields.pop("format"), fields.pop("algorithm")
        if made_by != (FORMAT, ALGORITHM):
            raise ManifestError(f"{MANIFEST} is of format {made_by[0]} with {made_by[1]}: written by a newer version")
        del fields["digest"]
        manifest: Manifest = checked(fields, Manifest)
        outside = next((name for name in manifest.files if not is_inside(name)), None)
        if outside is not None:
            raise RecordError(f"it names a file outside of the checkpoint, {outside!r:.100}")
        return manifest
    except FileNotFoundError as error:
        raise ManifestError(f"{MANIFEST} is missing") from error
    except OSError as error:
        raise ManifestError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    except ManifestError:
        raise
    except (ValueError, KeyError) as error:
        raise ManifestError(f"{MANIFEST} cannot be read: {error}") from error


def find_fault(folder: Path, contents: bool = True) -> str | None:
    """Return the fault of a checkpoint folder; None if every file is as its manifest says.

    ``contents``: compare checksums, not only sizes.
    """
    try:
        manifest = read_manifest(folder)
    except ManifestError as error:
        return str(error)
    try:
        # An export could copy an entry that is not a plain file or folder, such as a link, or read it instead of a listed file.
        odd = odd_entry(folder)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if odd is not None:
        return f"{odd}, and a checkpoint has files alone"
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        faults = threads.map(lambda item: file_fault(folder / item[0], item[1], contents), manifest.files.items())
        return next((f"{name} {fault}" for name, fault in zip(manifest.files, faults, strict=True) if fault is not None), None)


def _render(fields: Mapping[str, Any]) -> str:
    # The last field is the checksum of the text without that field.
    bare = json.dumps(fields, indent=1)
    return json.dumps({**fields, "digest": blake3(bare.encode()).hexdigest()}, indent=1) + "\n"


# Finds the checkpoints of a folder that belong to the run: by commit numbers, or if these are lost by verl's tracker file.


TRACKER = "latest_checkpointed_iteration.txt"
"""File with the step that was committed last, under verl's name."""
BEYOND = "belongs to an earlier run that the newest one does not continue"
"""The reason in messages why a checkpoint does not belong to the present run."""


@dataclass(frozen=True)
class CheckpointHistory:
    """The checkpoints of a folder, by step.

    Attributes:
        commits: Step -> commit number; None if the manifest cannot be read.
        manifests: Step -> manifest, if it can be read.
        steps: Steps of this run, oldest first, whole or not.
        beyond: Steps of an earlier run that this one does not continue.
        last_commit: The largest commit number; 0 if there is none.
        doubt: A warning if the tracker file and the commit numbers disagree; None if they agree.
    """

    commits: Mapping[int, int | None]
    manifests: Mapping[int, Manifest]
    steps: list[int]
    beyond: list[int]
    last_commit: int
    doubt: str | None


def read_history(root: Path, folders: Mapping[int, Path]) -> CheckpointHistory:
    """Find out which checkpoints of a run folder belong to the run.

    If a run starts again from an earlier checkpoint, checkpoints of later steps remain from before. Their commit numbers are
    smaller than those of its new checkpoints. So a step does not belong to the present run if an earlier step has a larger commit
    number, or if it is after the newest step.

    ``folders``: step -> folder of each checkpoint.
    """
    manifests: dict[int, Manifest] = {}
    for step, folder in folders.items():
        try:
            manifests[step] = read_manifest(folder)
        except ManifestError:
            continue
    commits = {step: manifests[step].commit if step in manifests else None for step in folders}
    numbered = {step: commit for step, commit in commits.items() if commit is not None}
    tracked = _tracked(root)
    newest = _newest(commits, numbered, tracked)
    steps, largest = [], 0  # largest commit number of the earlier steps
    for step in sorted(commits):
        # If an earlier step was committed later, this step remains from an earlier run.
        if (newest is None or step <= newest) and numbered.get(step, largest) >= largest:
            steps.append(step)
        largest = max(largest, numbered.get(step, 0))
    doubt = None
    if numbered and newest != tracked:
        statement = "cannot be read" if tracked is None else f"says step {tracked}"
        doubt = f"{root / TRACKER}: {statement}, and the checkpoint that was committed last is of step {newest}; that one counts"
    return CheckpointHistory(commits, manifests, steps, sorted(commits.keys() - set(steps)), largest, doubt)


def _newest(commits: Mapping[int, int | None], numbered: Mapping[int, int], tracked: int | None) -> int | None:
    named = tracked if tracked in commits else None
    if named is not None and commits[named] is None:
        # The manifest of the newest step is damaged, so its commit number is unknown.
        return named
    return max(numbered, key=numbered.__getitem__) if numbered else named


def _tracked(root: Path) -> int | None:
    try:
        match = re.fullmatch(rb"([0-9]{1,18})\n?", read_record(root / TRACKER, 64))
    except (OSError, ValueError):
        return None
    return None if match is None else int(match.group(1))
