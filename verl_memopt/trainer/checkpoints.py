"""Checkpoint folders on disk: written aside, renamed when whole, found again after any kind of stop."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl_memopt.errors import CheckpointError

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "meta.json"
PROVEN = "proven"
STEP_FOLDER = re.compile(r"^global_step_(\d+)$")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: its folder, its step, and the driver's own state (data position, seed, controllers)."""

    folder: Path
    step: int
    driver: dict[str, Any]


class CheckpointStore:
    """The ``global_step_N`` folders of a run.

    keep: newest checkpoints kept, None for all. Nothing is remembered between calls; the disk is the record: what lies beyond
    the step in the tracker file belongs to a run that this one went back behind, and is neither resumed nor removed.
    """

    def __init__(self, root: Path, keep: int | None) -> None:
        self.root = root
        self.keep = keep

    def begin(self, step: int) -> Path:
        """Gives the folder to write step ``step`` into; it counts as nothing until :meth:`commit`.

        Errors: CheckpointError when the disk refuses.
        """
        aside = self._aside(step)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
        except OSError as error:
            raise self.failed(step, str(error)) from error
        return aside

    def commit(self, step: int, driver: dict[str, Any], world_size: int) -> Path:
        """Makes what was written since :meth:`begin` the newest checkpoint, and removes older ones beyond ``keep``.

        Errors: CheckpointError when the disk refuses; earlier checkpoints are untouched then.
        """
        aside, final = self._aside(step), self.root / f"global_step_{step}"
        try:
            torch.save(driver, aside / "data.pt")
            files = {str(path.relative_to(aside)): path.stat().st_size for path in sorted(aside.rglob("*")) if path.is_file()}
            manifest = {"format": 1, "step": step, "world_size": world_size, "torch": torch.__version__, "files": files}
            _write_whole(aside / MANIFEST, json.dumps(manifest, indent=1))
            shutil.rmtree(final, ignore_errors=True)
            os.replace(aside, final)
            _write_whole(self.root / TRACKER, f"{step}\n")
        except (OSError, RuntimeError) as error:
            raise self.failed(step, str(error)) from error
        self._prune()
        return final

    def failed(self, step: int, reason: str) -> CheckpointError:
        """Removes what was written of step ``step`` and gives the error to raise."""
        shutil.rmtree(self._aside(step), ignore_errors=True)
        kept = self.steps()
        last = f"the checkpoint of step {kept[-1]} is untouched" if kept else "there is no earlier checkpoint"
        return CheckpointError(
            f"trainer.default_local_dir={self.root}: step {step} could not be saved: {reason} ({_free(self.root)}; {last}). "
            "Free space, lower trainer.max_actor_ckpt_to_keep, or set another trainer.default_local_dir; "
            "then start again to resume."
        )

    def steps(self) -> list[int]:
        """Gives the steps of this run's committed folders, whole or not, oldest first."""
        if not self.root.is_dir():
            return []
        last = self._last()
        found = (STEP_FOLDER.match(path.name) for path in self.root.iterdir() if path.is_dir())
        steps = sorted(int(match.group(1)) for match in found if match)
        return [step for step in steps if last is None or step <= last]

    def newest(self) -> Checkpoint | None:
        """Gives the newest whole checkpoint; each damaged one that is passed over is logged with its fault."""
        for step in reversed(self.steps()):
            folder = self.root / f"global_step_{step}"
            fault = find_fault(folder)
            if fault is None:
                return read_checkpoint(folder)
            logger.warning("%s: not whole (%s); falling back to the one before it", folder, fault)
        return None

    def folder(self, step: int) -> Path:
        """Gives the folder of a step's checkpoint."""
        return self.root / f"global_step_{step}"

    def prove(self, step: int) -> None:
        """Takes note that the weights of the checkpoint of ``step``, if there is one, have since given finite gradients."""
        if step in self.steps():
            (self.folder(step) / PROVEN).touch()

    def proven(self) -> int | None:
        """Gives the newest step that :meth:`prove` was told of and whose checkpoint is still there."""
        return max((step for step in self.steps() if (self.folder(step) / PROVEN).exists()), default=None)

    def _aside(self, step: int) -> Path:
        return self.root / f"global_step_{step}.partial"

    def _last(self) -> int | None:
        """Gives the step committed last; None where no file says it, as in a folder put together by hand."""
        try:
            return int((self.root / TRACKER).read_text())
        except (OSError, ValueError):
            return None

    def _prune(self) -> None:
        for path in self.root.glob("global_step_*.partial"):
            shutil.rmtree(path, ignore_errors=True)
        if self.keep is not None:
            proven = self.proven()
            for step in self.steps()[: -self.keep]:
                if step != proven:
                    shutil.rmtree(self.root / f"global_step_{step}", ignore_errors=True)


def find_fault(folder: Path) -> str | None:
    """Gives what is wrong with a checkpoint folder, or None when every file of its manifest is there at its size."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"{MANIFEST} is missing"
    try:
        files = dict(json.loads(manifest.read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes of {size}"
    return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Gives a checkpoint by its folder. Errors: CheckpointError when it is missing or not whole."""
    folder = folder.expanduser().resolve()
    match = STEP_FOLDER.match(folder.name)
    if match is None or not folder.is_dir():
        raise CheckpointError(f"trainer.resume_from_path={folder}: not a checkpoint. Give a global_step_N folder.")
    fault = find_fault(folder)
    if fault is not None:
        raise CheckpointError(
            f"trainer.resume_from_path={folder}: not whole ({fault}). Give another step, or use resume_mode=auto."
        )
    return Checkpoint(folder, int(match.group(1)), torch.load(folder / "data.pt", weights_only=True))


def _free(folder: Path) -> str:
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free"


def _write_whole(path: Path, text: str) -> None:
    """Writes a file aside and renames it, so that a reader sees the old one or the new one."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(text)
    os.replace(aside, path)
