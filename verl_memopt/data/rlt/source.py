"""Where the rows of an RLT dataset come from: local files, or a dataset on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_memopt.data.files import READERS, RawRow, read_rows
from verl_memopt.errors import DataError

HUB = "hub:"
"""Start of a source on the hub: ``hub:bespokelabs/Bespoke-Stratos-17k``."""
NAMES_OF_SPLITS = {"train": ("train",), "val": ("validation", "val", "test")}
"""How the files of a split may begin, the best first."""


def read_source(files: Any, split: str, key: str) -> list[RawRow]:
    """Return the rows of local files or of a hub dataset.

    Args:
        files: One path, a list of paths, or ``hub:`` and the id of a dataset.
        split: ``train`` or ``val``. It selects the files of a hub dataset.
        key: The setting that names the files, for errors.

    Raises:
        DataError: A file is missing or malformed, or the hub cannot deliver the dataset.
    """
    if isinstance(files, str) and files.startswith(HUB):
        return hub_rows(files.removeprefix(HUB), split, key)
    return read_rows(files, key)


def hub_rows(hub_id: str, split: str, key: str) -> list[RawRow]:
    """Return the rows of one split of a hub dataset, downloaded once or read from the local cache.

    Args:
        hub_id: Id of the dataset.
        split: ``train`` or ``val``.
        key: The setting that names the dataset, for errors.

    Raises:
        DataError: The hub cannot deliver the dataset, or it has no file of the split.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [f"{folder}{name}*{suffix}" for folder in ("", "*/") for name in NAMES_OF_SPLITS[split] for suffix in READERS]
    try:
        folder = snapshot_download(hub_id, repo_type="dataset", allow_patterns=patterns)
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as problem:
        raise DataError(
            f"{key}={HUB}{hub_id}: the hub could not deliver it ({type(problem).__name__}: {problem}). Make the hub reachable, "
            "or download the files and name them."
        ) from problem
    return read_rows(files_of_split(Path(folder), split, f"{key}={HUB}{hub_id}"), key)


def files_of_split(folder: Path, split: str, source: str) -> list[Path]:
    """Return the files of a split in a folder and in the folders inside it, sorted.

    Args:
        folder: Where the dataset lies.
        split: ``train`` or ``val``.
        source: Names the dataset in errors.

    Raises:
        DataError: There is no such file.
    """
    for name in NAMES_OF_SPLITS[split]:
        files = sorted(path for start in ("", "*/") for path in folder.glob(f"{start}{name}*") if path.suffix in READERS)
        if files:
            return files
    raise DataError(
        f"{source}: there is no file {'*, '.join(NAMES_OF_SPLITS[split])}* that ends in {', '.join(READERS)}. Download the "
        "dataset and name its files."
    )
