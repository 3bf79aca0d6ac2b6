"""Prompts and the data their reward needs, read from files in verl's schema and checked before a run starts."""

from __future__ import annotations

import json
import logging
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from verl_memopt.config import schema
from verl_memopt.data.encoder import RENDER_ERRORS, Spans, decode, overlong, special_tokens_of, tokenize
from verl_memopt.data.messages import Messages, read_messages, refuse_media_and_agents, render, template_arguments
from verl_memopt.data.plugin import load_from_file, refuse_verls_arguments, users_code
from verl_memopt.errors import DataError
from verl_memopt.model.folder import fetch

logger = logging.getLogger(__name__)

Row = TypeVar("Row")

Prepare = Callable[[str, dict[str, Any]], dict[str, Any]]

OF_VERL = ("reward_model", "extra_info")
"""Columns of verl's schema whose contents reach a reward function as they are."""
VALIDATION_SET = "validation_set"
"""Entry of a held-out row's ``extra_info`` that names its set. The metrics of a validation are by set, else by data source."""
MANY_COLUMNS = 8
DEFAULT_SOURCE = "dataset"
"""``data_source`` of a row that has none, where a function of the user's own scores."""


@dataclass(frozen=True)
class PromptRow:
    """One rendered prompt with the data of its reward."""

    index: int
    """Position in the dataset."""
    text: str
    """The prompt: rendered by the chat template, the text of the file, or that of its ids. Special tokens appear as written."""
    data_source: str
    """Selects the default reward and groups validation metrics."""
    ground_truth: Any
    """The reference answer for the reward."""
    extra_info: dict[str, Any]
    """Passed to the reward function."""
    address: str
    """File and row, counted from 1."""
    plain: Spans = ()
    """Spans of ``text`` whose special tokens are encoded as plain text. Elsewhere they become tokens."""
    is_text: bool = False
    """The prompt is a text of the file and no conversation: the tokenizer adds what it adds to any text, such as BOS."""
    messages: Messages | None = None
    """The messages of the prompt, where it is a conversation, as :func:`read_messages` gives them. A reward model renders them
    with its own template."""
    ids: tuple[int, ...] | None = None
    """The prompt as the file has it, where it is a list of token ids. They are used as they are."""
    response: tuple[int, ...] = ()
    """Token ids of the response, with the end of the turn, where a supervised run learns it."""


class PromptRows(Protocol):
    """A dataset as the trainer reads it: this file's, that of a recipe, or a class of the user's own."""

    def __len__(self) -> int:
        """Return the number of prompts."""

    def __getitem__(self, index: int, /) -> PromptRow:
        """Return the prompt at ``index``."""


class PromptDataset(list[PromptRow]):
    """The rows of the dataset files, rendered and checked.

    Args:
        files: As :func:`read_source` takes them.
        data: The ``data`` section of the settings.
        tokenizer: Renders the chat template and finds special tokens.
        split: ``train`` or ``val``. It selects ``{split}_max_samples`` and the keys that errors name.
        prepare: Gives the columns that a row needs, from its address and the file's columns; None = the file has them.
        by_rules: The rules score the answers, so each row needs a data source and a ground truth. Otherwise both may be missing,
            and all columns of the row reach the reward function in ``extra_info``.

    Raises:
        DataError: A file or a row is wrong. The message names the row.
    """

    def __init__(
        self, files: Any, data: schema.Data, tokenizer: Any, split: str, prepare: Prepare | None = None, by_rules: bool = True
    ) -> None:
        """Read, render and check all rows."""
        self._data = data
        self._by_rules = by_rules
        self._tokenizer = tokenizer
        self._split = split
        chosen = chosen_rows(read_source(files, split, f"data.{split}_files"), data, split)
        self._special = special_tokens_of(tokenizer)
        self._special_counts: list[tuple[str, int]] = []
        rows = [self._row(address, prepare(address, columns) if prepare else columns) for address, columns in chosen]
        self._log_special_tokens()
        # Numbered after long prompts were dropped, because the number seeds the samples and counts the rows that are left.
        super().__init__(replace(row, index=index) for index, row in enumerate(self._checked(rows)))

    def _row(self, address: str, columns: dict[str, Any]) -> PromptRow:
        refuse_media_and_agents(address, columns)
        source = self._optional(address, columns, self._data.reward_fn_key, "Set data.reward_fn_key, or add it", DEFAULT_SOURCE)
        if not isinstance(source, str):
            raise DataError(f"{address}: {self._data.reward_fn_key} must be a string, but it is {source!r}. Correct the row.")
        prompt = _column(address, columns, self._data.prompt_key, "Set data.prompt_key, or add it")
        ids = _token_ids(address, prompt)
        is_text, messages = isinstance(prompt, str), None
        plain: Spans = ()
        if ids:
            text = decode(self._tokenizer, ids)
        elif is_text:
            text = prompt
        else:
            messages = self._messages(address, prompt)
            text, plain = self._render(address, messages, columns)
        if not text and ids is None:
            raise DataError(f"{address}: the prompt is empty. Remove the row, or add a prompt.")
        extra = columns.get("extra_info")
        if not isinstance(extra, dict | None):
            raise DataError(f"{address}: extra_info must be an object, but it is {extra!r:.200}. Correct the row.")
        others = (
            {} if self._by_rules else {name: columns[name] for name in columns if name not in (self._data.prompt_key, *OF_VERL)}
        )
        return PromptRow(
            index=-1,
            text=text,
            data_source=source,
            ground_truth=self._ground_truth(address, columns),
            extra_info={**others, **(extra or {})},
            address=address,
            plain=plain,
            is_text=is_text,
            messages=messages,
            ids=ids,
        )

    def _optional(self, address: str, columns: dict[str, Any], name: str, remedy: str, default: Any) -> Any:
        """Return a column that only the rules need."""
        return default if name not in columns and not self._by_rules else _column(address, columns, name, remedy)

    def _ground_truth(self, address: str, columns: dict[str, Any]) -> Any:
        """Return verl's ``reward_model.ground_truth``, else the column ``data.answer_key``, else None."""
        answer = columns.get(self._data.answer_key)
        if "reward_model" not in columns and answer is not None:
            return answer
        remedy = "Add {ground_truth: ...} under that name, or set data.answer_key to the column of the reference answer"
        truth = self._optional(address, columns, "reward_model", remedy, {"ground_truth": None})
        if not isinstance(truth, dict) or (self._by_rules and truth.get("ground_truth") is None):
            raise DataError(f"{address}: reward_model has no ground_truth. It is {truth!r:.200}. Add {{ground_truth: ...}}.")
        return truth.get("ground_truth")

    def _messages(self, address: str, prompt: Any) -> Messages:
        messages = read_messages(prompt, address)
        if messages is None:
            raise DataError(
                f"{address}: {self._data.prompt_key} must be a string or a list of {{role, content}} with string values or of "
                f"token ids, but it is {prompt!r:.200}. Correct the row."
            )
        return messages

    def _render(self, address: str, messages: Messages, columns: dict[str, Any]) -> tuple[str, Spans]:
        """Return a conversation as text, and the spans of special tokens that must be encoded as plain text."""
        arguments = template_arguments(address, columns, self._data, self._tokenizer)
        num_special = self._special.count([messages, arguments.get("tools")])
        if num_special:
            self._special_counts.append((address, num_special))
        hides = num_special > 0 and not self._data.allow_special_tokens
        try:
            return render(self._special, self._tokenizer, messages, hides, {"add_generation_prompt": True, **arguments})
        except RENDER_ERRORS as problem:
            raise DataError(
                f"{address}: the chat template cannot render this prompt ({problem}). Set another template with "
                "actor_rollout_ref.model.custom_chat_template, or correct the row or data.apply_chat_template_kwargs."
            ) from problem

    def _log_special_tokens(self) -> None:
        """Log once how many special tokens the prompts contain and how they are encoded."""
        if not self._special_counts:
            return
        encoding = (
            "become tokens, because data.allow_special_tokens=true"
            if self._data.allow_special_tokens
            else "are encoded as plain text. Set data.allow_special_tokens=true if they should become tokens"
        )
        logger.warning("data.%s_files: %d special tokens inside the messages of %d prompts (the first in %s) %s", self._split,
                       sum(count for _, count in self._special_counts), len(self._special_counts), self._special_counts[0][0],
                       encoding)  # fmt: skip

    def _checked(self, rows: list[PromptRow]) -> list[PromptRow]:
        """Return the rows within ``max_prompt_length``, and others as ``filter_overlong_prompts`` and ``truncation`` say."""
        data = self._data
        if data.truncation != "error" and not data.filter_overlong_prompts:
            return rows
        kept = within_limit(rows, data, self._tokenizer)
        if len(kept) < len(rows):
            logger.info("%s: dropped %d of %d prompts over data.max_prompt_length=%d tokens", self._split, len(rows) - len(kept),
                        len(rows), data.max_prompt_length)  # fmt: skip
        return kept


def build_dataset(files: Any, data: schema.Data, tokenizer: Any, split: str, by_rules: bool = True) -> PromptDataset | CustomRows:
    """Return the dataset of a split: a :class:`PromptDataset`, or the class named by ``data.custom_cls``, called the same way.

    Arguments are as in :class:`PromptDataset`.

    Raises:
        DataError: The user's class cannot be loaded or is not a dataset, or its rows are wrong as :class:`CustomRows` says.
    """
    custom = data.custom_cls
    if custom.path is None:
        return PromptDataset(files, data, tokenizer, split, by_rules=by_rules)
    dataset_class = load_from_file(custom.path, custom.name, key="data.custom_cls.path", error=DataError)
    address = f"data.custom_cls.name={custom.name}"
    refuse_verls_arguments(dataset_class, ("data_files", "config"), "files, data, tokenizer, split", address)
    with users_code(f"{address}: __init__ of {custom.path}", DataError):
        dataset = dataset_class(files, data, tokenizer, split)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(f"{address}: the class needs __len__ and __getitem__. Add them.")
    return CustomRows(dataset, address, custom.path)


class CustomRows:
    """The rows of a class of the user's own. Every row is read once at the start, so that its faults show before a run.

    ``address`` is setting and class, and ``path`` the user's file, for errors.

    Raises:
        DataError: The dataset raised an error or has no rows, an item is no PromptRow, or two rows have the same index.
    """

    def __init__(self, dataset: Any, address: str, path: str) -> None:
        """Read every row once."""
        self._dataset, self._address, self._path = dataset, address, path
        places: dict[int, int] = {}
        for place, row in enumerate(self):
            if row.index in places:
                raise DataError(
                    f"{address}: rows {places[row.index]} and {place} have the same PromptRow.index={row.index} ({row.address}), "
                    "and would be sampled with the same seeds. Give each row an index of its own, such as its place."
                )
            places[row.index] = place
        if not places:
            raise DataError(f"{address}: the dataset has no rows, but there must be at least one row. Correct {path}.")

    def __len__(self) -> int:
        """Return the number of prompts."""
        with users_code(f"{self._address}: __len__ of {self._path}", DataError):
            return len(self._dataset)

    def __getitem__(self, index: int) -> PromptRow:
        """Return the prompt at ``index``."""
        with users_code(f"{self._address}: __getitem__({index}) of {self._path}", DataError):
            row = self._dataset[index]
        if not isinstance(row, PromptRow):
            raise DataError(
                f"{self._address}: __getitem__({index}) of {self._path} returned a {type(row).__name__}. Return a PromptRow."
            )
        if not isinstance(row.index, int):
            raise DataError(
                f"{self._address}: row {index} of {self._path} has PromptRow.index={row.index!r}. Set a whole number of its own."
            )
        return row

    def __iter__(self) -> Iterator[PromptRow]:
        """Iterate over the prompts in order."""
        return (self[index] for index in range(len(self)))


def chosen_rows(rows: list[Row], data: schema.Data, split: str) -> list[Row]:
    """Return the rows that ``data.{split}_max_samples`` leaves (-1 = all), in file order: the first, or a random choice."""
    limit, shuffle = data.train_max_samples, data.shuffle
    if split == "val":
        limit, shuffle = data.val_max_samples, data.validation_shuffle
    if limit < 0 or limit >= len(rows):
        return rows
    if not shuffle or data.seed is None:
        return rows[:limit]
    return [rows[i] for i in sorted(np.random.default_rng(data.seed).permutation(len(rows))[:limit].tolist())]


def _column(address: str, columns: dict[str, Any], name: str, remedy: str) -> Any:
    if name in columns and columns[name] is None:
        raise DataError(f"{address}: the column {name!r} is null in this row. Fill it in, or remove the row.")
    if name not in columns:
        raise DataError(f"{address}: there is no column {name!r}. {_had(name, columns)}. {remedy}.")
    return columns[name]


def _had(name: str, columns: Iterable[str]) -> str:
    """Return the columns of a row, in words. Of many, the three whose names are nearest to ``name``."""
    names = sorted(columns)
    if len(names) <= MANY_COLUMNS:
        return f"The row has {', '.join(names)}"
    nearest = sorted(names, key=lambda other: -SequenceMatcher(None, name, other).ratio())[:3]
    return f"Of the {len(names)} columns of the row {', '.join(nearest)} are the nearest"


def _token_ids(address: str, prompt: Any) -> tuple[int, ...] | None:
    """Return a prompt that is a list of token ids, or None for any other prompt."""
    if not isinstance(prompt, list) or not prompt or not all(isinstance(token, int) for token in prompt):
        return None
    if any(isinstance(token, bool) or token < 0 for token in prompt):
        raise DataError(
            f"{address}: a token id must be a whole number of at least 0, but the prompt is {prompt!r:.200}. Correct it."
        )
    return tuple(prompt)


def within_limit(rows: list[PromptRow], data: schema.Data, tokenizer: Any) -> list[PromptRow]:
    """Return the rows within ``max_prompt_length``.

    Raises:
        DataError: A prompt is over it, and ``filter_overlong_prompts`` is false or no row would be left.
    """
    texts = [row for row in rows if row.ids is None]
    plain, whole = [row.plain for row in texts], [row.is_text for row in texts]
    of_texts = iter(tokenize(tokenizer, [row.text for row in texts], plain, whole))
    lengths = [len(next(of_texts) if row.ids is None else row.ids) for row in rows]
    too_long = [i for i, length in enumerate(lengths) if length > data.max_prompt_length]
    if data.filter_overlong_prompts and len(too_long) == len(rows) > 0:
        shortest = min(too_long, key=lengths.__getitem__)
        raise DataError(
            f"{rows[shortest].address}: data.filter_overlong_prompts=true leaves no row: this prompt is the shortest of "
            f"{len(rows)} and has {lengths[shortest]} tokens, but data.max_prompt_length is {data.max_prompt_length}. Raise "
            f"data.max_prompt_length to at least {lengths[shortest]}."
        )
    if too_long and not data.filter_overlong_prompts:
        first = too_long[0]
        raise overlong(rows[first].address, lengths[first], data.max_prompt_length, others=len(too_long) - 1)
    return [row for row, length in zip(rows, lengths, strict=True) if length <= data.max_prompt_length]


# Rows of parquet, JSON and JSON Lines files, each with the address that errors name.


RawRow = tuple[str, dict[str, Any]]
"""Address (``file:row``, counted from 1) and the row's columns."""


def read_rows(files: Any, key: str) -> list[RawRow]:
    """Return all rows of a file or of a list of files, in order."""
    paths = [files] if isinstance(files, str | Path) else list(files)
    if not paths:
        raise DataError(f"{key}: the list of files is empty. Name a .parquet, .json or .jsonl file.")
    return [row for path in paths for row in _read_file(Path(path).expanduser(), key)]


def _read_file(path: Path, key: str) -> list[RawRow]:
    if path.suffix not in READERS:
        raise DataError(f"{key}: {path}: the suffix {path.suffix!r} is unknown. Use one of {', '.join(READERS)}.")
    if path.is_dir():
        raise DataError(f"{key}: {path}: this is a folder. Name the files in it.")
    if not path.is_file():
        raise DataError(f"{key}: {path}: there is no such file. Check the path, or prepare the data first.")
    try:
        rows = list(READERS[path.suffix](path))
    except OSError as problem:
        raise DataError(f"{key}: {path}: the file cannot be read ({problem}). Check its permissions and its disk.") from problem
    if not rows:
        raise DataError(f"{key}: {path}: the file has no rows. Prepare the data again.")
    return rows


def _parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    from pyarrow import parquet

    try:
        names = parquet.read_schema(path).names
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise DataError(f"{path}: the column {repeated[0]!r} appears several times. Prepare the data again with one of them.")
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as problem:
        raise DataError(f"{path}: this is not a readable parquet file ({problem}). Prepare the data again.") from problem
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", row


def math_row(data_source: str, prompt: str, ground_truth: str, **extra_info: Any) -> dict[str, Any]:
    """Return a row in verl's schema: a mathematical question whose answer a rule checks."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows to a temporary name and rename it, so that an existing file is always complete. Return the path.

    Raises:
        DataError: A file of that name is there which this function did not write.
    """
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path) and not _is_own_parquet(path):
        raise DataError(f"{path} is there, and it was not made here. Give another folder, or move it away.")
    aside = path.with_name(f".{path.name}.partial")
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table.replace_schema_metadata({**(table.schema.metadata or {}), _MADE_HERE: b"1"}), aside)
    aside.rename(path)
    return path


_MADE_HERE = b"verl_memopt"
"""Entry of the metadata of a Parquet file that was written here, and may be written anew."""


def _is_own_parquet(path: Path) -> bool:
    from pyarrow import ArrowException, parquet

    try:
        if path.stat().st_size == 0:
            return True
        return _MADE_HERE in (parquet.read_schema(path).metadata or {})
    except (OSError, ArrowException):
        return False


def _lines(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            address, text = f"{path}:{number}", line.removeprefix(BOM_UTF8).strip() if number == 1 else line.strip()
            if text:
                yield address, _checked_object(address, _parse(address, text), text)


def _json(path: Path) -> Iterator[RawRow]:
    """Read a .json file: one array of objects, or one object per line."""
    with path.open("rb") as file:
        is_array = file.read(256).removeprefix(BOM_UTF8).lstrip().startswith(b"[")
    if not is_array:
        yield from _lines(path)
        return
    text = path.read_bytes().removeprefix(BOM_UTF8)
    for number, row in enumerate(_parse(str(path), text), start=1):
        yield f"{path}:{number}", _checked_object(f"{path}:{number}", row, text)


def _parse(address: str, text: bytes) -> Any:
    try:
        # From bytes, the parser would guess an encoding and accept halves of surrogate pairs.
        return json.loads(text.decode("utf-8"), object_pairs_hook=_once)
    except json.JSONDecodeError as problem:
        line = f"line {problem.lineno}, " if problem.lineno > 1 else ""
        where = f"{problem.msg} at {line}column {problem.colno}"
        raise DataError(f"{address}: not valid JSON ({where}). Correct it or remove it.") from problem
    except UnicodeDecodeError as problem:
        raise DataError(f"{address}: not valid UTF-8 ({problem.reason}). Save the file as UTF-8.") from problem
    except (ValueError, RecursionError) as problem:  # a repeated name, a number with thousands of digits, or too deep nesting
        raise DataError(f"{address}: the JSON cannot be read ({problem}). Correct it or remove it.") from problem


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object as a dict. A name that appears twice is refused."""
    row = dict(pairs)
    # The parser would keep the last value and drop the others.
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice in one object")
    return row


def _checked_object(address: str, row: Any, text: bytes) -> dict[str, Any]:
    """Return a row that is an object without half of a surrogate pair."""
    if not isinstance(row, dict):
        raise DataError(f"{address}: a row must be a JSON object, but this is a {type(row).__name__}. Correct it or remove it.")
    try:
        # JSON can spell half of a pair, but no file and no tokenizer accepts it.
        if rb"\u" in text:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as problem:
        escape = f"\\u{ord(problem.object[problem.start]):04x}"
        raise DataError(
            f"{address}: a string contains {escape}, half of a surrogate pair, which is not a character. Correct it."
        ) from problem
    return row


READERS: dict[str, Callable[[Path], Iterable[RawRow]]] = {".parquet": _parquet, ".json": _json, ".jsonl": _lines}
"""Readers by file suffix."""


# Sources of rows: local files, and datasets of the Hugging Face hub.


HUB = "hub:"
"""Start of a source on the hub: ``hub:bespokelabs/Bespoke-Stratos-17k``, ``hub:openai/gsm8k:main``, ``hub:owner/name@test``."""
NAMES_OF_SPLITS = {"train": ("train",), "val": ("validation", "val", "test")}
"""How the files of a split may begin, the best first."""


def read_source(files: Any, split: str, key: str) -> list[RawRow]:
    """Return the rows of local files or of a hub dataset.

    ``files``: One path, a list of paths, or ``hub:`` and the id of a dataset, with ``:config`` and ``@split`` if it has several.
    ``split``: ``train`` or ``val``. It selects the files of a hub dataset whose source names no split.

    Raises:
        DataError: A file is missing or malformed, or the hub cannot deliver the dataset.
    """
    if isinstance(files, str) and files.startswith(HUB):
        return hub_rows(files.removeprefix(HUB), split, key)
    return read_rows(files, key)


def hub_rows(source: str, split: str, key: str) -> list[RawRow]:
    """Return the rows of one split of a hub dataset, downloaded once or read from the local cache.

    ``source``: ``owner/name[:config][@split]``.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    place, _, named = source.partition("@")
    hub_id, _, config = place.partition(":")
    names = (named,) if named else NAMES_OF_SPLITS[split]
    starts = (f"{config}/",) if config else STARTS
    patterns = [f"{start}{name}*{suffix}" for start in starts for name in names for suffix in READERS]
    try:
        folder = fetch(hub_id, patterns, repo_type="dataset")
    except (HfHubHTTPError, HFValidationError, OSError) as problem:
        raise DataError(
            f"{key}={HUB}{source}: the hub could not deliver it ({type(problem).__name__}: {problem}). Make the hub reachable, "
            "or download the files and name them."
        ) from problem
    return read_rows(files_of_split(folder, names, f"{key}={HUB}{source}", starts), key)


STARTS = ("", "*/")
"""Where the files of a dataset may lie: in its folder, or in one folder inside it."""


def files_of_split(folder: Path, names: Sequence[str], source: str, starts: Sequence[str] = STARTS) -> list[Path]:
    """Return the files of a split in a folder and in the folders inside it, sorted.

    ``names``: how they may begin, the best first. ``source``: for errors. ``starts``: where they may lie.
    """
    for name in names:
        files = sorted(path for start in starts for path in folder.glob(f"{start}{name}*") if path.suffix in READERS)
        configs = sorted({path.parent.relative_to(folder).as_posix() for path in files} - {".", "data"})
        if len(configs) > 1:
            raise DataError(f"{source}: the dataset has several configurations. Add one of :{', :'.join(configs)}.")
        if files:
            return files
    raise DataError(
        f"{source}: there is no file {'*, '.join(names)}* that ends in {', '.join(READERS)}. Download the "
        "dataset and name its files."
    )
