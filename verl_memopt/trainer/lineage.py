"""Which checkpoints of a folder belong to the run: told by their commit numbers, and by verl's tracker file only in doubt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_memopt.trainer.manifest import Manifest, ManifestError, read_manifest

TRACKER = "latest_checkpointed_iteration.txt"
"""verl's name of the file that holds the step committed last."""
BEYOND = "belongs to a run that the newest one went back behind"
"""Why a checkpoint is none of the present run."""


@dataclass(frozen=True)
class Lineage:
    """The checkpoints of a folder, by step."""

    commits: Mapping[int, int | None]
    """Step -> commit number; None where the manifest cannot be read, 0 where it has none (format 1)."""
    manifests: Mapping[int, Manifest]
    """The readable ones."""
    steps: list[int]
    """Those of this run, oldest first, whole or not."""
    beyond: list[int]
    """Those of a run that this one went back behind."""
    last_commit: int
    """The largest commit number, 0 where there is none."""
    doubt: str | None
    """What to tell where the tracker file says another step than the commit numbers."""


def read_lineage(root: Path, folders: Mapping[int, Path]) -> Lineage:
    """Return the lineage of a run folder, whose checkpoints are given by step.

    A run that goes back to an earlier checkpoint leaves later steps behind, with smaller commit numbers than its own. So a
    step is of the present run unless an earlier step has a larger commit number, or it lies beyond the newest.
    """
    manifests: dict[int, Manifest] = {}
    for step, folder in folders.items():
        try:
            manifests[step] = read_manifest(folder)
        except ManifestError:
            continue
    commits = {step: manifests[step].commit if step in manifests else None for step in folders}
    numbered = {step: commit for step, commit in commits.items() if commit}
    tracked = _tracked(root)
    newest = _newest(commits, numbered, tracked)
    ours = [step for step in sorted(commits) if (newest is None or step <= newest) and not _left_behind(step, commits)]
    return Lineage(
        commits=commits,
        manifests=manifests,
        steps=ours,
        beyond=sorted(commits.keys() - set(ours)),
        last_commit=max(numbered.values(), default=0),
        doubt=_doubt(root, newest, tracked) if numbered else None,
    )


def _newest(commits: Mapping[int, int | None], numbered: Mapping[int, int], tracked: int | None) -> int | None:
    """Gives the newest step of the run, None where nothing says it."""
    named = tracked if tracked in commits else None
    if named is not None and commits[named] is None:
        # The newest one's own manifest is damaged, so its number is not known.
        return named
    return max(numbered, key=numbered.__getitem__) if numbered else named


def _left_behind(step: int, commits: Mapping[int, int | None]) -> bool:
    own = commits[step]
    return own is not None and any(commit is not None and commit > own for other, commit in commits.items() if other < step)


def _doubt(root: Path, newest: int | None, tracked: int | None) -> str | None:
    if newest == tracked:
        return None
    said = "cannot be read" if tracked is None else f"says step {tracked}"
    return f"{root / TRACKER}: {said}, and the checkpoint that was committed last is of step {newest}; that one counts"


def _tracked(root: Path) -> int | None:
    try:
        found = re.fullmatch(r"([0-9]+)\n?", (root / TRACKER).read_text())
    except (OSError, ValueError):
        return None
    return None if found is None else int(found.group(1))
