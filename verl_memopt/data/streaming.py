"""Rows that are read as steps need them (``data.streaming``), from files, from a Python object, or from a user's class.

A stream has no known number of rows. Rows are shuffled in a buffer, as in :meth:`datasets.IterableDataset.shuffle`. A resumed
run reads the stream from its start again, and skips the rows that were drawn before the checkpoint. So it continues with the
rows that an uninterrupted run would see. A checksum shows whether the skipped rows are the same as before.

Rows are drawn in the thread that runs the steps. Only the shuffle buffer is filled ahead of the steps. The reason is that a
user's object may belong to this thread, may be slow, and may block for ever after its last row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from verl_memopt.config import schema
from verl_memopt.data.dataset import PromptRow, custom_dataset
from verl_memopt.data.python_rows import IN_PYTHON, Item, PythonRows
from verl_memopt.data.sources import rows_of, source_files, still_reading
from verl_memopt.errors import ConfigError, DataError, StreamEndedError

logger = logging.getLogger(__name__)

MOST_DROPPED = 10_000
"""Most consecutive rows that may be dropped, for example because they are over ``data.max_prompt_length``."""


@dataclass(frozen=True)
class FileRows:
    """The rows of files, in the order of the files. ``name``: the key, for errors."""

    paths: Sequence[Path]
    name: str
    once = False

    def rows(self, epoch: int) -> Iterator[Item]:
        return rows_of(self.paths, self.name)

    def first(self) -> Item:
        return next(self.rows(0))


Source = FileRows | PythonRows
"""Reads the rows of a stream, pass by pass, or only its first row."""


def own_row(address: str, row: Any) -> PromptRow:
    if not isinstance(row, PromptRow):
        raise DataError(f"{address}: __iter__ yielded a {type(row).__name__}. Yield a PromptRow.")
    return row


def open_stream(data: schema.Data, tokenizer: Any, rows: PythonRows | None, trains: bool) -> Source:
    """Return the source of the training rows: ``rows`` if this process streams them, else the source in the settings.

    Raises:
        ConfigError: The rows came from another process and are not available, but are needed, because the run ``trains``.
        DataError: A file or a class is wrong.
    """
    key = "data.train_files"
    if rows is not None:
        return rows
    if data.train_files == IN_PYTHON:
        if trains:
            raise ConfigError(
                f"{key}={IN_PYTHON}: the rows of this run come from an object of the Python program that started it. Start the "
                "run there again, with resume=True to continue it."
            )
        return FileRows([], key)
    if data.custom_cls.path is None:
        return FileRows(source_files(data.train_files, "train", key), key)
    dataset, address = custom_dataset(data.train_files, data, tokenizer, "train")
    if not hasattr(dataset, "__iter__"):
        raise DataError(f"{address}: with data.streaming=true the class needs __iter__, which yields PromptRows. Add it.")
    return PythonRows(dataset, address, own_row)


@dataclass(eq=False)
class StreamLoader:
    """Returns ``batch_size`` rows of a stream per step, like :class:`verl_memopt.data.prompts.StepLoader` for a dataset.

    Attributes:
        source: Reads the items of the rows.
        read: Turns items into rows. It may drop some rows.
        seed: Seed of the shuffle.
        buffer_size: Size of the shuffle buffer in rows; 0 or 1 = rows keep their order.
        most: Most rows to read per pass; -1 = all.
        key: The setting of ``batch_size``, for errors.
        dataset: Index -> row, for the rows of the current step. The index counts the rows drawn in this pass.
    """

    source: Source
    read: Callable[[Sequence[Item]], list[PromptRow]]
    batch_size: int
    seed: int
    buffer_size: int
    most: int = -1
    key: str = "data.train_batch_size"
    dataset: dict[int, PromptRow] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.epoch = self._position = self._num_read = 0
        self._digest, self._expected = blake3(), ""
        self._rows: Iterator[Item] | None = None

    def check_first(self) -> None:
        """Read the first row, so that a mistake in all rows raises a DataError before the run."""
        self.read([self.source.first()])

    def next_indices(self) -> list[int]:
        """Return the indices of the next ``batch_size`` rows of ``dataset``. Rows left over at the end of a pass are dropped.

        Raises:
            DataError: A row is wrong, a pass has fewer rows than a batch, or too many consecutive rows are dropped.
            StreamEndedError: The rows can be read only once, and there is no further batch.
        """
        began, dropped = self._position, 0
        self.dataset.clear()
        way_out = "Rows are drawn as steps need them; data.shuffle=false reads none ahead"
        with still_reading(self.source.name, lambda: self._num_read, way_out):
            while missing := self.batch_size - len(self.dataset):
                items = list(islice(self._pass(), missing))
                if not items:
                    self._end_pass(has_batch=began > 0)
                    began = 0
                    continue
                rows = self.read(items)
                for index, row in enumerate(rows, start=self._position):
                    self.dataset[index] = replace(row, index=index)
                self._note(items)
                self._position += len(items)
                dropped = 0 if rows else dropped + len(items)
                if dropped > MOST_DROPPED:
                    raise DataError(
                        f"{self.source.name}: {dropped:,} consecutive rows were dropped, because they are too long. Raise "
                        "data.max_prompt_length (supervised: data.max_response_length)."
                    )
        return list(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        digest = self._expected if self._rows is None else self._digest.hexdigest()
        return {"seed": self.seed, "epoch": self.epoch, "position": self._position, "digest": digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "digest" not in state:
            raise DataError(
                "data.streaming=true: the checkpoint is of a run whose rows were read whole. Set data.streaming=false to "
                "continue that run, or start again with trainer.resume_mode=disable."
            )
        if state != self.state_dict():
            # The rows that were drawn before are skipped at the next request.
            self._rows = None
        self.seed, self.epoch, self._position = state["seed"], state["epoch"], state["position"]
        self._expected = state["digest"]

    def _pass(self) -> Iterator[Item]:
        if self._rows is not None:
            return self._rows
        rows, self._num_read = self._counted(self.source.rows(self.epoch)), 0
        if self.most >= 0:
            rows = islice(rows, self.most)
        if self.buffer_size > 1:
            rows = shuffled(rows, self.buffer_size, np.random.default_rng([self.seed, self.epoch]))
        self._digest.reset()
        if self._position:
            logger.info("%s: reading it from the start again, to skip the %d rows drawn before", self.source.name,
                        self._position)  # fmt: skip
            for item in islice(rows, self._position):
                self._note([item])
            if self._digest.hexdigest() != self._expected:
                logger.warning(
                    "%s: the first %d rows differ from those of the run that is resumed. The run continues with the rows after "
                    "them, but an uninterrupted run would have seen other rows. Yield rows in a fixed order, with a fixed seed",
                    self.source.name, self._position,
                )  # fmt: skip
        self._rows = rows
        return rows

    def _counted(self, rows: Iterator[Item]) -> Iterator[Item]:
        for row in rows:
            self._num_read += 1
            yield row

    def _note(self, items: Iterable[Item]) -> None:
        for _, item in items:
            self._digest.update(f"{item!r}\n".encode())

    def _end_pass(self, has_batch: bool) -> None:
        if not has_batch:
            raise DataError(
                f"{self.key}={self.batch_size}: {self.source.name} has only {len(self.dataset)} rows. Lower it to at most "
                f"{len(self.dataset)}, or add more data."
            )
        if self.source.once:
            raise StreamEndedError(
                f"{self.source.name}: its {self._position} rows are used up, and it can be read only once. Give a function that "
                "returns a new iterator for further passes."
            )
        self.dataset.clear()
        self.epoch, self._position, self._rows, self._expected = self.epoch + 1, 0, None, ""


def shuffled(rows: Iterator[Item], buffer_size: int, random: np.random.Generator) -> Iterator[Item]:
    """Yield rows in random order: each row is drawn from a buffer, and the next row of the stream takes its place there."""
    buffer = list(islice(rows, buffer_size))
    while True:
        if not buffer:
            return
        place = int(random.integers(len(buffer)))
        yield buffer[place]
        # Read the next row only now, so that a caller who needs no further row does not wait for one.
        follower = next(rows, None)
        if follower is None:
            buffer.pop(place)
        else:
            buffer[place] = follower
