"""The manifest of a checkpoint: a file that lists the other files with their checksums, and has a checksum of itself."""

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
    """

    step: int
    commit: int
    world_size: int
    torch: str
    score: float | None = None
    files: Records = field(default_factory=dict)


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
        return _read(fields, text)
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


def _read(fields: dict[str, Any], text: str) -> Manifest:
    # The text is written again from its fields and compared whole. So a change that JSON would read as the same is found too.
    if text != _render({name: value for name, value in fields.items() if name != "digest"}):
        raise ManifestError(f"{MANIFEST} has other contents than were written")
    if fields["format"] != FORMAT or fields["algorithm"] != ALGORITHM:
        raise ManifestError(f"{MANIFEST} is of format {fields['format']} with {fields['algorithm']}: written by a newer version")
    files = {name: FileRecord(**record) for name, record in fields["files"].items()}
    return Manifest(fields["step"], fields["commit"], fields["world_size"], fields["torch"], fields["score"], files)
