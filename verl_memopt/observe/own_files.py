"""Protects the user's files in a folder that the user gave: a run overwrites and removes only files that a run wrote.

A run folder has a mark, a file that is written before anything else. A model's folder has a record with the names of its files.
If a file has a name that runs use, but there is neither mark nor record, it is the user's. Then the start is refused before it
writes anything.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TypedDict

from blake3 import blake3

from verl_memopt.errors import ConfigError
from verl_memopt.observe.files import disk_refusals
from verl_memopt.records import RecordError, read_json

MARK = ".verl_memopt"
"""File in a folder that a run has written into."""
MODEL_RECORD = "training.json"
"""File in a model's folder that says which run made the model, and which files belong to the model."""
CHECKPOINT_RECORD = "meta.json"
_TEXT = "Runs of verl-memopt write into this folder. Without this file they do not change the other files here.\n"


@contextmanager
def private_files(private: bool) -> Iterator[None]:
    """Let only the user read what this process and its children write in the body. False = the umask decides."""
    # The umask belongs to the whole process, so it is restored afterwards.
    before = os.umask(OWNER_ALONE) if private else None
    try:
        yield
    finally:
        if before is not None:
            os.umask(before)


OWNER_ALONE = 0o077


def with_umask(path: Path) -> None:
    """Give a file, or a folder with everything in it, the mode that the umask gives to new files."""
    umask = os.umask(OWNER_ALONE)  # the umask can only be read by setting another one
    os.umask(umask)
    for file in (path, *path.rglob("*")):
        if not file.is_symlink():
            file.chmod((0o777 if file.is_dir() else 0o666) & ~umask)


def mark(folder: Path) -> bool:
    # Mark a folder as one that runs write into, and return whether the mark is new.
    if is_marked(folder):
        return False
    with disk_refusals(folder / MARK):
        (folder / MARK).write_text(_TEXT, encoding="utf-8")
    return True


def is_marked(folder: Path) -> bool:
    return (folder / MARK).is_file()


def model_files(folder: Path) -> frozenset[str]:
    """Return the files that the record in a model's folder lists, as paths relative to the folder. Empty = there is no record."""
    try:
        return frozenset(read_json(folder / MODEL_RECORD, _FilesOfModel)["files"])
    except (OSError, RecordError):
        return frozenset()


class _FilesOfModel(TypedDict):
    files: list[str]


def others_in_model(folder: Path) -> list[str]:
    """Return the files in a model's folder that no run has written there."""
    if not folder.is_dir() or folder.is_symlink():
        return [folder.name] if folder.exists() or folder.is_symlink() else []
    ours = model_files(folder)
    files = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if not path.is_dir())
    return [name for name in files if name not in ours]


def refuse_others(folder: Path, names: Iterable[str], models: Iterable[str], key: str) -> None:
    """Refuse a run folder if it contains a file of the user with a name that runs write or remove.

    Args:
        folder: The folder, which need not exist.
        names: Patterns of the names of files and folders that runs write or remove.
        models: Names of the models' folders. The record in such a folder says which files a run wrote.
        key: Text that the error has before the folder, such as a setting.

    Raises:
        ConfigError: There is such a file. Nothing was changed.
    """
    # If checkpoints were copied into a new folder, the folder has no mark, but each checkpoint has a record.
    marked = is_marked(folder) or any(folder.glob(f"global_step_*/{CHECKPOINT_RECORD}"))
    patterns, models = tuple(names), tuple(models)
    for path in sorted(folder.glob("*")):
        if path.name in models:
            others = others_in_model(path)
        elif marked or not any(fnmatch(path.name, pattern) for pattern in patterns) or _is_empty(path):
            continue
        else:
            others = [path.name]
        if others:
            what = path if others == [path.name] else path / others[0]
            raise ConfigError(
                f"{key}{folder}: {what} is there, and no run wrote it. A run keeps its own {path.name} under that name. Move it "
                "away, or give another folder."
            )


def is_there(path: str | Path) -> bool:
    """Return whether a path exists. A text that cannot be a path does not."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # it is too long, has a NUL, or names the home of an unknown user
        return False


def differs_from_name(path: Path) -> bool:
    """Return whether an input of a run has changed. Its file name has a checksum of its original contents."""
    named = re.fullmatch(r".+-([0-9a-f]{12})(\.\w+)?", path.name)
    if named is None or not is_marked(path.parent.parent) or not path.is_file():
        return False
    return not blake3().update_mmap(path).hexdigest().startswith(named[1])


def remove_left(path: Path) -> None:
    """Remove what a killed run has left half written or half removed.

    Raises:
        ConfigError: No run wrote it.
    """
    if not path.exists() and not path.is_symlink():
        return
    if path.is_symlink() or not (is_marked(path) or model_files(path) or _is_empty(path)):
        raise ConfigError(f"{path}: it is in the way, and it was not made here. Move it away, or give another folder.")
    shutil.rmtree(path, ignore_errors=True)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())
