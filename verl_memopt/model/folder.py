"""Find the folder of a model: a local folder, or the copy of a hub repository in the hub's cache."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NotRequired, TypedDict

from verl_memopt.config.schema import Model
from verl_memopt.errors import ConfigError
from verl_memopt.records import RecordError, json_of, odd_entry, read_json, usable_path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")

FETCHED = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja")
"""Files that are used of a model folder: configs, weights, the tokenizer's files (such as merges.txt), the chat template."""

READ_SUFFIXES = (".json", ".safetensors", ".jinja")

CODE = "*.py"
"""Fetched only if the user trusts the code."""

NOT_FETCHED = ("consolidated*", "original/*", "*/*.safetensors")
"""Copies of the weights in other formats. Some repositories have them too."""


def resolve_folder(path: str, key: str, trust_remote_code: bool = False, needs_model: bool = True) -> Path:
    """Find the folder of a model in Hugging Face format. A hub id is downloaded once, or read from the local cache.

    Args:
        path: Folder or hub id.
        key: The setting, for error messages.
        trust_remote_code: Also download the repository's Python files.
        needs_model: False = the folder may hold only a tokenizer.

    Raises:
        ConfigError: There is no such folder, it has no config.json, or the hub cannot provide it.
    """
    folder = usable_path(path, key, ConfigError).expanduser()
    if folder.is_dir():
        if not needs_model or os.path.lexists(folder / "config.json"):
            refuse_odd_files(folder, f"{key}={path}")
        if needs_model and not (folder / "config.json").is_file():
            raise ConfigError(f"{key}={path}: the folder has no config.json. Give a model folder in Hugging Face format.")
        return folder.resolve()
    if folder.exists() or not HUB_ID.match(path):
        raise ConfigError(f"{key}={path}: no such folder. Give a model folder in Hugging Face format, or a hub id (owner/name).")
    return _from_hub(path, key, trust_remote_code)


def refuse_odd_files(folder: Path, address: str) -> None:
    """Refuse a model folder with a pipe, a socket or a device. Libraries that read the folder would wait for it for ever.

    Also refuse it if a folder in it has the name of a file, because libraries would report that file as missing.
    """
    folders = (path.name for path in sorted(folder.glob("*")) if path.suffix in READ_SUFFIXES and path.is_dir())
    if odd := odd_entry(folder, follow=True) or next((f"{name} is a folder, but must be a file" for name in folders), None):
        raise ConfigError(f"{address}: {odd}. Remove it, or fetch or save the model again.")


def _from_hub(name: str, key: str, trust_remote_code: bool) -> Path:
    from huggingface_hub.errors import HfHubHTTPError

    # Download Python files only if the user trusts them.
    wanted = [*FETCHED, CODE] if trust_remote_code else list(FETCHED)
    try:
        return fetch(name, wanted, NOT_FETCHED)
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"{key}={name}: no such folder here, and the hub could not give it ({type(error).__name__}: {error}). "
            "Give the path of a downloaded model folder, or make the hub reachable."
        ) from error


ANSWER_SECONDS = 10.0
"""Longest wait for an answer of the hub. The download itself would retry for minutes, or wait for ever."""


def fetch(name: str, wanted: Sequence[str], unwanted: Sequence[str] = (), repo_type: str = "model") -> Path:
    """Download a hub repository once, or find its copy in the local cache. Return the folder.

    Raises:
        OSError, HfHubHTTPError: The hub cannot provide it, and the cache has no copy.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    reason = why_no_answer(name, repo_type, ANSWER_SECONDS)
    # If the hub does not answer, use only the local cache.
    download = partial(snapshot_download, name, repo_type=repo_type, local_files_only=reason is not None)
    try:
        return Path(download(allow_patterns=list(wanted), ignore_patterns=list(unwanted)))
    except LocalEntryNotFoundError as error:
        if reason is None:
            raise
        raise ConnectionError(f"{reason}; the local cache has no copy") from error


def why_no_answer(repo_id: str, repo_type: str, seconds: float = ANSWER_SECONDS, endpoint: str | None = None) -> str | None:
    """Return why the hub cannot provide a repository. None = the hub answers that it has the repository.

    A thread asks the hub, and this function waits for it for at most ``seconds``, because name lookups and silent proxies have
    no time limit. ``endpoint`` is the address of the hub. None = HF_ENDPOINT, or the public hub.
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

    # A daemon thread, so that a request without an answer does not keep the process alive.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return reasons[0] if reasons else None


def load_tokenizer(folder: Path, model: Model, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a folder, with ``model.custom_chat_template`` if it is set.

    With ``trust_remote_code`` or ``model.trust_remote_code`` this may run code from the folder.

    Raises:
        ConfigError: The tokenizer cannot be read, or has no token that ends a response.
    """
    key = f"actor_rollout_ref.model.{'path' if model.tokenizer_path is None else 'tokenizer_path'}={folder}"
    trusted = trust_remote_code or model.trust_remote_code
    tokenizer = existing_tokenizer(folder, key, trusted, "Add its files or set model.tokenizer_path.")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{key}: the tokenizer has no eos token, so no response could end. Set one in tokenizer_config.json.")
    if model.custom_chat_template is not None:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def existing_tokenizer(folder: Path, key: str, trusted: bool, way_out: str) -> Any:
    # Transformers returns an empty tokenizer for a folder without one, so look for the files first.
    if not any((folder / name).is_file() for name in TOKENIZER_FILES) and not (trusted and _has_tokenizer_code(folder)):
        raise ConfigError(f"{key}: it has no tokenizer ({', '.join(TOKENIZER_FILES)}). {way_out}")
    return read_tokenizer(folder, key, trusted, way_out)


def read_tokenizer(
    folder: Path, key: str, trust_remote_code: bool, way_out: str = "Add tokenizer files or set model.tokenizer_path."
) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a tokenizer's own code may raise anything
        raise ConfigError(f"{key}: its tokenizer cannot be read: {error}. {way_out}") from error


def check_vocabulary(tokenizer: Any, rows: int, source: str) -> None:
    """Refuse a tokenizer with token ids that have no row in a model's embedding, which has ``rows`` rows.

    ``source`` is the setting that names the model, as ``key=value``.

    Raises:
        ConfigError: The message names both numbers and the first token without a row.
    """
    tokens = tokenizer.get_vocab()
    beyond = sorted((number, token) for token, number in tokens.items() if number >= rows)
    if beyond:
        number, token = beyond[0]
        raise ConfigError(
            f"{source}: its embedding has {rows} rows, and the tokenizer has {len(tokens)} tokens. The first without a row is "
            f"{token!r} with id {number}. Use the tokenizer that belongs to the model, or enlarge the model's embedding."
        )


class _Index(TypedDict):
    weight_map: dict[str, str]


def files_of_index(index: Path) -> set[str]:
    """Return the file names in an index of weights (``model.safetensors.index.json``).

    A file may be a link, as in the hub's cache, but its name must not point out of the folder.

    Raises:
        ConfigError: The index cannot be read, has another form, or names a file outside of its folder.
    """
    try:
        names = set(read_json(index, _Index, follow=True)["weight_map"].values())
    except (OSError, RecordError) as error:
        raise ConfigError(
            f"{index}: not an index of weights ({error}). It must be a JSON object whose weight_map gives the file of each "
            "tensor. Fetch or save the model again."
        ) from error
    for name in names:
        if name in ("", ".", "..") or set(name) & set("/\\\0"):
            raise ConfigError(
                f"{index}: it names the file {name!r}, and weights are read only from the folder of the index. "
                "Fetch or save the model again."
            )
    return names


def _has_tokenizer_code(folder: Path) -> bool:
    # Whether code in the folder builds the tokenizer. It may read files of any name.
    path = folder / "tokenizer_config.json"
    return path.is_file() and '"auto_map"' in path.read_text(errors="replace")


class _Generation(TypedDict):
    eos_token_id: NotRequired[list[int] | int | None]


def end_tokens(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    way_out = "Repair the file, or remove it."
    listed = json_of(path, _Generation, way_out, ConfigError).get("eos_token_id") if path.exists() else None
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    for number in ids:
        if number < 0:
            raise ConfigError(f"{path}: eos_token_id={listed}: {number} is no token id. {way_out}")
    # Use both, because many chat models end a turn with another token than a text.
    return tuple(sorted({*ids, tokenizer.eos_token_id}))
