"""The manifest of a checkpoint: a file that lists the other files with their checksums, and has a checksum of itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from verl_memopt.distributed.file_records import ALGORITHM, FileRecord, Records, file_fault

MANIFEST = "meta.json"

FORMAT = 1

HASHING_THREADS = 4
"""Files that are hashed at the same time when a checkpoint is verified."""


class ManifestError(ValueError):
    """A manifest is missing, unreadable or not as it was written. The message says which, without the folder."""


@dataclass(frozen=True)
class Manifest:
    """The contents of one checkpoint.

    Attributes:
        step: Step of the run.
        commit: One more than the largest of the run folder when this one was committed.
        world_size: Ranks that wrote it.
        torch: Version that wrote it.
        score: Validation score of the step; None without a validation.
        files: name -> size and checksum of each file.
        metric: ``trainer.keep_best_checkpoint`` that gave the score; None = the usual score, of which more is better.
    """

    step: int
    commit: int
    world_size: int
    torch: str
    score: float | None = None
    files: Records = field(default_factory=dict)
    metric: str | None = None


def write_manifest(folder: Path, manifest: Manifest) -> str:
    """Write a manifest into ``folder`` and return its text. The caller forces it to disk."""
    text = _render({"format": FORMAT, "algorithm": ALGORITHM, **asdict(manifest)})
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    return text


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        ManifestError: It is missing, or a character differs from what was written.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode("utf-8")
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise TypeError("expected a JSON object")
        # The text is written again from its fields and compared whole. So a change that JSON would read as the same is found too.
        if text != _render({name: value for name, value in fields.items() if name != "digest"}):
            raise ManifestError(f"{MANIFEST} has other contents than were written")
        made_by = fields.pop("format"), fields.pop("algorithm")
        if made_by != (FORMAT, ALGORITHM):
            raise ManifestError(f"{MANIFEST} is of format {made_by[0]} with {made_by[1]}: written by a newer version")
        files = {name: FileRecord(**record) for name, record in fields["files"].items()}
        score, metric = fields["score"], fields.get("metric")
        return Manifest(fields["step"], fields["commit"], fields["world_size"], fields["torch"], score, files, metric)
    except FileNotFoundError as error:
        raise ManifestError(f"{MANIFEST} is missing") from error
    except OSError as error:
        raise ManifestError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    except ManifestError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{MANIFEST} cannot be read: {error}") from error


def find_fault(folder: Path, contents: bool = True) -> str | None:
    """Return what is wrong with a checkpoint folder; None where every file is as its manifest says.

    Args:
        folder: Folder of one checkpoint.
        contents: Compare checksums too, and not only sizes.
    """
    try:
        manifest = read_manifest(folder)
    except ManifestError as error:
        return str(error)
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        faults = threads.map(lambda item: file_fault(folder / item[0], item[1], contents), manifest.files.items())
        return next((f"{name} {fault}" for name, fault in zip(manifest.files, faults, strict=True) if fault is not None), None)


def _render(fields: Mapping[str, Any]) -> str:
    """Return the text of a manifest with these fields. Its last field is the checksum of the text without that field."""
    bare = json.dumps(fields, indent=1)
    return json.dumps({**fields, "digest": blake3(bare.encode()).hexdigest()}, indent=1) + "\n"


# Finds which checkpoints of a folder belong to the run: by their commit numbers, and by verl's tracker file where those fail.


TRACKER = "latest_checkpointed_iteration.txt"
"""verl's name for the file with the step that was committed last."""
BEYOND = "belongs to an earlier run that the newest one does not continue"
"""Why a checkpoint does not belong to the present run."""


@dataclass(frozen=True)
class CheckpointHistory:
    """The checkpoints of a folder, by step.

    Attributes:
        commits: Step -> commit number; None where the manifest cannot be read.
        manifests: Step -> manifest, where it can be read.
        steps: Steps of this run, oldest first, whole or not.
        beyond: Steps of an earlier run that this one does not continue.
        last_commit: The largest commit number; 0 without any.
        doubt: A warning where the tracker file and the commit numbers disagree; None where they agree.
    """

    commits: Mapping[int, int | None]
    manifests: Mapping[int, Manifest]
    steps: list[int]
    beyond: list[int]
    last_commit: int
    doubt: str | None


def read_history(root: Path, folders: Mapping[int, Path]) -> CheckpointHistory:
    """Return which checkpoints of a run folder belong to the run.

    A run that starts again from an earlier checkpoint leaves later steps behind, with smaller commit numbers than its own. So a
    step belongs to the present run unless an earlier step has a larger commit number, or it is beyond the newest step.

    Args:
        root: The run folder.
        folders: Step -> folder of each checkpoint.
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
    steps, largest = [], 0  # the commit number of all steps before
    for step in sorted(commits):
        # Where an earlier step was committed later, this one was left behind.
        if (newest is None or step <= newest) and numbered.get(step, largest) >= largest:
            steps.append(step)
        largest = max(largest, numbered.get(step, 0))
    doubt = None
    if numbered and newest != tracked:
        statement = "cannot be read" if tracked is None else f"says step {tracked}"
        doubt = f"{root / TRACKER}: {statement}, and the checkpoint that was committed last is of step {newest}; that one counts"
    return CheckpointHistory(commits, manifests, steps, sorted(commits.keys() - set(steps)), largest, doubt)


def _newest(commits: Mapping[int, int | None], numbered: Mapping[int, int], tracked: int | None) -> int | None:
    """Return the newest step of the run; None where nothing says it."""
    named = tracked if tracked in commits else None
    if named is not None and commits[named] is None:
        # The manifest of the newest step is damaged, so its commit number is unknown.
        return named
    return max(numbered, key=numbered.__getitem__) if numbered else named


def _tracked(root: Path) -> int | None:
    """Return the step in the tracker file; None where it cannot be read."""
    try:
        match = re.fullmatch(r"([0-9]+)\n?", (root / TRACKER).read_text())
    except (OSError, ValueError):
        return None
    return None if match is None else int(match.group(1))
