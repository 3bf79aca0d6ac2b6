"""Ask whether the hub can provide something before a run counts on it: first the local cache, then the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from verl_memopt.models.folder import files_of_index

MODEL_FILES = ("config.json", "*.safetensors")
"""Files that every model folder has."""

ANSWER_SECONDS = 5.0
"""How long the hub may take to answer."""


def cached(repo_id: str, repo_type: str, wanted: Sequence[str]) -> bool:
    """Return whether the local cache holds a file for each pattern, and each file that a weight index lists.

    Args:
        repo_id: ``owner/name``.
        repo_type: ``model`` or ``dataset``.
        wanted: Glob patterns below the repository's root.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo_id, repo_type=repo_type, local_files_only=True))
    except LocalEntryNotFoundError:
        return False
    listed = [name for index in folder.glob("*.safetensors.index.json") for name in files_of_index(index)]
    return all(any(folder.glob(pattern)) for pattern in (*wanted, *listed))


def why_no_answer(repo_id: str, repo_type: str, seconds: float = ANSWER_SECONDS, endpoint: str | None = None) -> str | None:
    """Return why the hub cannot give a repository, or None when it answers that it has it.

    A thread asks, and is abandoned after ``seconds``, because a name lookup or a silent proxy has no time limit of its own.

    Args:
        repo_id: ``owner/name``.
        repo_type: ``model`` or ``dataset``.
        seconds: How long to wait.
        endpoint: The hub's address; None = HF_ENDPOINT, or the public hub.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    reasons = [f"no answer in {seconds:g} s"]

    def ask() -> None:
        try:
            HfApi(endpoint=endpoint).repo_info(repo_id, repo_type=repo_type, timeout=seconds)
            reasons.clear()
        except Exception as error:  # noqa: BLE001 - whatever fails, the hub did not say that it has the repository
            reasons[:] = [f"{type(error).__name__}: {error}".partition("\n")[0]]

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return reasons[0] if reasons else None
