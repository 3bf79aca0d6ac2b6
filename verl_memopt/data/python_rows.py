"""Rows from a Python program: a list, a dataset, a DataFrame, files, or an object that yields rows, perhaps without an end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from verl_memopt.config.schema import Data
from verl_memopt.data.dataset import VALIDATION_SET
from verl_memopt.data.plugin import EndsProcessError, contained, raised, users_code
from verl_memopt.data.sources import HUB, read_source, still_reading
from verl_memopt.errors import DataError, UserError
from verl_memopt.observe.own_files import is_there

IN_PYTHON = "python:dataset"
"""``data.train_files`` of a run whose rows come from an object of the Python program that started it."""
MOST_WITHOUT_LENGTH = 1_000_000
"""Most rows that are read whole from an object without a length, which may have no end."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?(@[\w.-]+)?")

Item = tuple[str, Any]
"""Address of a row, and its columns or the row itself."""


def stream_of(dataset: Any, streams: Any) -> tuple[Any, PythonRows | None]:
    """Decide how training rows are read.

    Args:
        dataset: The argument of the user.
        streams: ``data.streaming`` as the user gave it. None = rows without a length are a stream if a shuffle buffer cannot hold
            them all.

    Returns:
        (rows, None) if the rows are read whole; (None, rows) if they are read as steps need them.
    """
    if not _yields_rows(dataset) or streams is False or (streams is None and length_of(dataset, "dataset") is not None):
        return dataset, None
    rows = PythonRows(dataset, "dataset")
    if streams is None:
        way_out = f"streaming=True reads rows as steps need them, instead of up to {Data.shuffle_buffer_size:,} at the start"
        with still_reading("dataset", lambda: rows.num_held, way_out):
            held = rows.hold(Data.shuffle_buffer_size)
        if len(held) < Data.shuffle_buffer_size:
            return [columns for _, columns in held], None
    return None, rows


def _yields_rows(dataset: Any) -> bool:
    is_files = isinstance(dataset, list | tuple) and bool(dataset) and all(isinstance(item, str | Path) for item in dataset)
    is_other = isinstance(dataset, str | Path | Mapping) or is_files or _is_frame(dataset)
    return not is_other and (hasattr(dataset, "__iter__") or callable(dataset))


def _is_frame(dataset: Any) -> bool:
    return hasattr(dataset, "to_dict") and hasattr(dataset, "columns")


def length_of(dataset: Any, name: str) -> int | None:
    with users_code(f"{name}: __len__", DataError):
        try:
            return len(dataset)
        except TypeError:  # it has no __len__, or a __len__ that raises, as in a DataLoader of an iterable
            return None


def with_length(dataset: Any, name: str, limit: int | None = None) -> Any:
    """Return a dataset that has a length. A dataset without a length is read into a list.

    Args:
        dataset: The argument of the user.
        name: Name of the argument, for errors.
        limit: Most rows to read; None or negative = all.

    Raises:
        DataError: The dataset has no length and more than :data:`MOST_WITHOUT_LENGTH` rows.
    """
    if not _yields_rows(dataset) or length_of(dataset, name) is not None:
        return dataset
    rows = PythonRows(dataset, name)
    num_wanted = MOST_WITHOUT_LENGTH + 1 if limit is None or limit < 0 else limit
    with still_reading(name, lambda: rows.num_held, "It is read whole"):
        held = rows.hold(num_wanted)
    if len(held) > MOST_WITHOUT_LENGTH:
        raise DataError(
            f"{name}: it has no length and more than {MOST_WITHOUT_LENGTH:,} rows, too many to read whole. If it has an end, "
            "give list(...) of it. If it has no end, set streaming=True for training rows, or val_max_samples=... for held-out "
            "rows."
        )
    return [columns for _, columns in held]


def write_rows(dataset: Any, path: Path, name: str) -> tuple[int | None, Any]:
    """Return the number of rows of a dataset (None = the user gave files) and its files. Other rows are written to ``path``.

    ``name``: name of the user's argument, for errors.

    Raises:
        DataError: The object is not a dataset, has no rows or more rows than its length, or a row cannot be written.
    """
    if isinstance(dataset, str | Path):
        text = str(dataset)
        is_hub = not is_there(text) and _HUB_ID.fullmatch(text) and not Path(text).suffix
        return None, f"{HUB}{text}" if is_hub else text
    if isinstance(dataset, list | tuple) and dataset and all(isinstance(item, str | Path) for item in dataset):
        return None, [str(item) for item in dataset]
    if _is_frame(dataset):
        dataset = dataset.to_dict("records")
    elif isinstance(dataset, Mapping):
        raise DataError(
            f"{name}: this is a dict with {', '.join(map(str, list(dataset)[:5]))}. Give one of its parts, or a list of rows."
        )
    dataset = with_length(dataset, name)
    if not hasattr(dataset, "__iter__"):
        raise DataError(
            f"{name}: {type(dataset).__name__} is no dataset. Give a list of dicts, a Dataset, a DataFrame or a file."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    length, number = length_of(dataset, name), 0
    assert length is not None, "with_length gives it a length"
    with path.open("w", encoding="utf-8") as file, still_reading(name, lambda: number, "They are written to a file"):
        try:
            with contained(name):  # one context for all rows: one per row would take ten times as long as the writing
                for number, row in enumerate(_named_faults(dataset, name), start=1):
                    if number > length:
                        raise DataError(
                            f"{name}: __len__ of this {type(dataset).__name__} is {length}, but it yields more rows. Correct "
                            "it, or set streaming=True for training rows without an end."
                        )
                    file.write(json_row(f"{name}: row {number}", row) + "\n")
        except EndsProcessError as problem:
            raise DataError(f"{name}: row {number + 1} raised {raised(problem)}. Correct it.") from problem
    if number == 0:
        raise DataError(f"{name}: there are no rows. Give at least one.")
    return number, str(path)


def _named_faults(dataset: Any, name: str) -> Iterator[Any]:
    """Yield the rows of an object. Its exceptions become one-line errors. Errors of the caller, who writes the rows, pass."""
    number = 0
    try:
        for number, row in enumerate(dataset, start=1):  # noqa: B007 - the error says it
            yield row
    except UserError:
        raise
    except Exception as problem:  # a user's object may raise anything
        raise DataError(f"{name}: row {number + 1} raised {raised(problem)}. Correct it.") from problem


def held_out_files(dataset: Any, inputs: Path, limit: int | None = None) -> Any:
    """Return the files of held-out rows. Several named datasets become one file, whose rows say which set they belong to.

    ``limit``: see :func:`with_length`.
    """
    if not isinstance(dataset, Mapping) or hasattr(dataset, "columns"):
        return write_rows(with_length(dataset, "eval_dataset", limit), inputs / "eval.jsonl", "eval_dataset")[1]
    rows = []
    for set_name, part in dataset.items():
        name = f"eval_dataset[{set_name!r}]"
        files = write_rows(with_length(part, name, limit), inputs / f"eval_{set_name}.jsonl", name)[1]
        for _, row in read_source(files, "val", name):
            rows.append({**row, "extra_info": {**(row.get("extra_info") or {}), VALIDATION_SET: str(set_name)}})
    return write_rows(rows, inputs / "eval.jsonl", "eval_dataset")[1]


class PythonRows:
    """The rows of a Python object: an iterable, an iterator, or a callable without arguments that returns one.

    Args:
        given: The object. If it has a method ``set_epoch``, as some iterables of transformers and datasets have, this method is
            called before each pass.
        name: The argument or key that gave the object, for errors.
        take: Called with an address and a value that the object yielded, returns the item of the row.
    """

    def __init__(self, given: Any, name: str, take: Callable[[str, Any], Any] | None = None) -> None:
        self.name, self.once = name, isinstance(given, Iterator)
        self._given, self._take = given, take or plain_columns
        self._held: list[Item] = []
        self._ahead: Iterator[Item] | None = None
        """The first pass, if :meth:`hold` began it. It continues after the held rows."""
        self._is_spent = False

    def hold(self, count: int) -> list[Item]:
        if self._ahead is None:
            self._ahead, self._is_spent = self._pass(0), True
        for item in islice(self._ahead, max(count - len(self._held), 0)):
            self._held.append(item)
        return self._held[:count]

    @property
    def num_held(self) -> int:
        return len(self._held)

    def first(self) -> Item:
        with still_reading(self.name, lambda: 0, "This is its first row"):
            held = self.hold(1)
        if not held:
            raise DataError(f"{self.name}: there are no rows. Give at least one.")
        return held[0]

    def rows(self, epoch: int) -> Iterator[Item]:
        """Return the rows of a pass. An object that can be read only once has no second pass.

        Raises:
            DataError: The first pass of such an object is requested again.
        """
        ahead, held = self._ahead, self._held
        self._ahead, self._held = None, []
        if ahead is not None and (epoch == 0 or self.once):
            return chain(held, ahead)
        if self.once and epoch > 0:
            return iter(())
        if self.once and self._is_spent:
            raise DataError(
                f"{self.name}: an iterator can be read only once, and this iterator was read before. Give a new iterator, or a "
                "function that returns one."
            )
        self._is_spent = True
        return self._pass(epoch)

    def _pass(self, epoch: int) -> Iterator[Item]:
        given, end = self._given, object()
        with users_code(self.name, DataError):
            if hasattr(given, "set_epoch"):
                given.set_epoch(epoch)
            rows = iter(given if hasattr(given, "__iter__") else given())
        number = 0
        while True:
            number += 1
            with users_code(f"{self.name}: row {number}", DataError):
                row = next(rows, end)
            if row is end:
                return
            address = f"{self.name}: row {number}"
            yield address, self._take(address, row)


def plain_columns(address: str, row: Any) -> Any:
    # A row from Python must look like a row from a file, so it goes through JSON.
    return json.loads(json_row(address, row))


def json_row(address: str, row: Any) -> str:
    """Return a row from Python as a line of a JSON Lines file.

    Raises:
        DataError: The row is not a dict, or a value cannot be written.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{address} is {row!r:.100}, which is not a dict. Give a dict with a prompt for each row.")
    columns = {str(key): value for key, value in row.items()}
    try:
        return json.dumps(columns, default=_plain)
    except (TypeError, ValueError):
        for column, value in columns.items():
            try:
                json.dumps(value, default=_plain)
            except (TypeError, ValueError) as problem:
                raise DataError(f"{address}: the column {column!r} cannot be kept ({problem}). Remove it.") from problem
        raise


def _plain(value: Any) -> Any:
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"a {type(value).__name__} is neither a string nor a number")
