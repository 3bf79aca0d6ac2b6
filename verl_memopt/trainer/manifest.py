"""The manifest of a checkpoint folder: what it must hold, told by a file that also proves itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from verl_memopt.distributed.file_records import ALGORITHM, FileRecord, Records, file_fault

MANIFEST = "meta.json"

FORMAT = 2
"""Format 1 had the sizes of the files alone: no checksums, no commit number."""

HASHING_THREADS = 4
"""Files hashed at once when a checkpoint is verified."""


class ManifestError(ValueError):
    """A manifest is missing, unreadable or not as it was written. The text says which, without the folder."""


@dataclass(frozen=True)
class Manifest:
    """What one checkpoint is."""

    step: int
    commit: int
    """One more than the largest of the folder when it was committed; 0 in format 1, which had none."""
    world_size: int
    torch: str
    score: float | None = None
    """Validation score of the step, None where the step was not validated."""
    files: Records = field(default_factory=dict)
    checksums: bool = True
    """False in format 1: only the sizes of the files are known."""


def write_manifest(folder: Path, manifest: Manifest) -> str:
    """Return the text of a manifest after writing it into ``folder``; forcing it to disk is left to the caller."""
    text = _render({"format": FORMAT, "algorithm": ALGORITHM, **_plain(manifest)})
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    return text


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        ManifestError: it is missing, or one character of it is not what was written.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode("utf-8")
        found = json.loads(text)
        if not isinstance(found, dict):
            raise TypeError("expected a JSON object")
        return _read_format_1(found) if found.get("format") == 1 else _read(found, text)
    except FileNotFoundError as error:
        raise ManifestError(f"{MANIFEST} is missing") from error
    except OSError as error:
        raise ManifestError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    except ManifestError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{MANIFEST} cannot be read: {error}") from error


def find_fault(folder: Path, contents: bool = True) -> str | None:
    """Return what is wrong with a checkpoint folder, or None when every file is there as its manifest says.

    Args:
        folder: of one checkpoint.
        contents: compare checksums, and not sizes alone.
    """
    try:
        manifest = read_manifest(folder)
    except ManifestError as error:
        return str(error)
    compare = contents and manifest.checksums
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        faults = threads.map(lambda item: file_fault(folder / item[0], item[1], compare), manifest.files.items())
        return next((f"{name} {fault}" for name, fault in zip(manifest.files, faults, strict=True) if fault is not None), None)


def _plain(manifest: Manifest) -> dict[str, Any]:
    plain = asdict(manifest)
    del plain["checksums"]
    return plain


def _render(fields: Mapping[str, Any]) -> str:
    """Return the one text that these fields have; its last field is the checksum of the text without it."""
    bare = json.dumps(fields, indent=1)
    return json.dumps({**fields, "digest": blake3(bare.encode()).hexdigest()}, indent=1) + "\n"


def _read(found: dict[str, Any], text: str) -> Manifest:
    if text != _render({name: value for name, value in found.items() if name != "digest"}):
        raise ManifestError(f"{MANIFEST} has other contents than were written")
    if found["format"] != FORMAT or found["algorithm"] != ALGORITHM:
        raise ManifestError(f"{MANIFEST} is of format {found['format']} with {found['algorithm']}: written by a newer version")
    files = {name: FileRecord(**record) for name, record in found["files"].items()}
    return Manifest(found["step"], found["commit"], found["world_size"], found["torch"], found["score"], files)


def _read_format_1(found: dict[str, Any]) -> Manifest:
    if "digest" in found:
        raise ManifestError(f"{MANIFEST} has other contents than were written")
    files = {name: FileRecord(size, "") for name, size in found["files"].items()}
    if not all(isinstance(record.size, int) for record in files.values()):
        raise ManifestError(f"{MANIFEST} cannot be read: a size is no number")
    return Manifest(int(found["step"]), 0, int(found["world_size"]), str(found["torch"]), None, files, checksums=False)
