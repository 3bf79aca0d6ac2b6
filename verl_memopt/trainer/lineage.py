"""Finds which checkpoints of a folder belong to the run: by their commit numbers, and by verl's tracker file where those fail."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_memopt.trainer.manifest import Manifest, ManifestError, read_manifest

TRACKER = "latest_checkpointed_iteration.txt"
"""verl's name for the file with the step that was committed last."""
BEYOND = "belongs to an earlier run that the newest one does not continue"
"""Why a checkpoint does not belong to the present run."""


@dataclass(frozen=True)
class Lineage:
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


def read_lineage(root: Path, folders: Mapping[int, Path]) -> Lineage:
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
    steps = [step for step in sorted(commits) if (newest is None or step <= newest) and not _left_behind(step, commits)]
    return Lineage(
        commits=commits,
        manifests=manifests,
        steps=steps,
        beyond=sorted(commits.keys() - set(steps)),
        last_commit=max(numbered.values(), default=0),
        doubt=_doubt(root, newest, tracked) if numbered else None,
    )


def _newest(commits: Mapping[int, int | None], numbered: Mapping[int, int], tracked: int | None) -> int | None:
    """Return the newest step of the run; None where nothing says it."""
    named = tracked if tracked in commits else None
    if named is not None and commits[named] is None:
        # The manifest of the newest step is damaged, so its commit number is unknown.
        return named
    return max(numbered, key=numbered.__getitem__) if numbered else named


def _left_behind(step: int, commits: Mapping[int, int | None]) -> bool:
    """Return whether an earlier step was committed later than ``step``."""
    commit = commits[step]
    if commit is None:
        return False
    return any(earlier is not None and earlier > commit for number, earlier in commits.items() if number < step)


def _doubt(root: Path, newest: int | None, tracked: int | None) -> str | None:
    """Return a warning where the tracker file names another step than the newest."""
    if newest == tracked:
        return None
    statement = "cannot be read" if tracked is None else f"says step {tracked}"
    return f"{root / TRACKER}: {statement}, and the checkpoint that was committed last is of step {newest}; that one counts"


def _tracked(root: Path) -> int | None:
    """Return the step in the tracker file; None where it cannot be read."""
    try:
        match = re.fullmatch(r"([0-9]+)\n?", (root / TRACKER).read_text())
    except (OSError, ValueError):
        return None
    return None if match is None else int(match.group(1))
