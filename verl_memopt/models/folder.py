"""Where a model lies: a local folder, or a hub id that is fetched into the hub's cache."""

from __future__ import annotations

import re
from pathlib import Path

from verl_memopt.errors import ConfigError

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")


def resolve_folder(path: str, key: str) -> Path:
    """Gives the folder of a model in Hugging Face format; a hub id is downloaded once, or read from the local cache.

    key: the setting to name in errors. Errors: ConfigError when there is no such folder, no config.json in it, or the hub
    cannot give it.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{key}={path}: the folder has no config.json. Give a model folder in Hugging Face format.")
        return folder.resolve()
    if folder.exists() or not HUB_ID.match(path):
        raise ConfigError(f"{key}={path}: no such folder. Give a model folder in Hugging Face format, or a hub id (owner/name).")
    return _from_hub(path, key)


def _from_hub(name: str, key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"{key}={name}: no such folder here, and the hub could not give it ({type(error).__name__}: {error}). "
            "Give the path of a downloaded model folder, or make the hub reachable."
        ) from error
