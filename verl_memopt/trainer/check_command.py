"""``verl-memopt check RUN_DIR``: verifies every checkpoint of a run and prints one line for each."""

from __future__ import annotations

import sys
from pathlib import Path

from verl_memopt.errors import UserError
from verl_memopt.trainer.checkpoints import CheckpointStore
from verl_memopt.trainer.lineage import BEYOND, Lineage
from verl_memopt.trainer.manifest import find_fault


def check_folder(run_dir: Path) -> int:
    """Verify the checkpoints of a run folder and print one line for each, oldest step first.

    Args:
        run_dir: Folder of the run.

    Returns:
        The exit code: 0 if all are whole, 1 if one is not.

    Raises:
        UserError: The folder does not exist or has no checkpoint.
    """
    store = CheckpointStore(run_dir, None)
    lineage = store.lineage()
    if not lineage.commits:
        raise UserError(f"{run_dir}: holds no checkpoint. Give a folder with global_step_N folders.")
    if lineage.doubt is not None:
        sys.stdout.write(f"{lineage.doubt}\n")
    faults = {step: find_fault(store.folder(step)) for step in sorted(lineage.commits)}
    for step, fault in faults.items():
        state = "whole" if fault is None else f"NOT WHOLE ({fault})"
        sys.stdout.write(f"global_step_{step}: {', '.join([state, *_facts(store, lineage, step)])}\n")
    return 0 if all(fault is None for fault in faults.values()) else 1


def _facts(store: CheckpointStore, lineage: Lineage, step: int) -> list[str]:
    """Return what to print of a checkpoint besides whether it is whole."""
    facts = []
    manifest = lineage.manifests.get(step)
    if manifest is not None:
        size = sum(record.size for record in manifest.files.values())
        facts.append(f"{len(manifest.files)} files, {size:,} bytes")
        if manifest.score is not None:
            facts.append(f"validation score {manifest.score:.4g}")
    facts += ["best"] if step == store.best() else []
    facts += ["proven: its weights gave finite gradients"] if store.is_proven(step) else []
    facts += [BEYOND] if step in lineage.beyond else []
    return facts
