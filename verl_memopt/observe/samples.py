"""Writes generated samples to a dump, which a later run can read.

A dump is a folder with one ``{step}.jsonl`` per step, one row per response. The rows of one prompt are neighbours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from verl_memopt.errors import ConfigError, DataError
from verl_memopt.observe.files import json_line, read_rows, replace_text

SCHEMA = 3
"""Version of a dump row. A reader refuses an unknown version."""


@dataclass(frozen=True)
class Sample:
    """One response and its score."""

    uid: str
    data_source: str
    input: str
    """The prompt as text."""
    output: str
    """The response as text."""
    gts: Any
    """The ground truth that the reward function received."""
    score: float | None
    """None = the response was not scored."""
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further entries that the reward function returned. Each becomes a key of the dump row."""
    finish_reason: str = "stop"
    """``stop``, or ``length`` if the response reached its limit."""
    rollout_log_probs: Sequence[float] | None = None
    """The engine's log-prob of each response token. None = it returned none."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """What the reward function receives besides the ground truth."""
    failed: bool = False
    """The reward function failed, and ``score`` is the fallback score."""
    messages: list[dict[str, str]] | None = None
    """The prompt as messages, which a reward model renders with its own chat template. None = the prompt is plain text."""
    turns: Sequence[Mapping[str, Any]] | None = None
    """The turns of a conversation: the model reads the first ``kept`` tokens of what the turn before had, then ``new_ids``, and
    samples ``sampled`` tokens, which ``response_ids`` has one turn after another. None = the response is a single turn."""
    conversation: list[dict[str, Any]] | None = None
    """All messages of a conversation. None = a single turn."""
    ended: str | None = None
    """Why a conversation ended, with the reason if its environment failed. None = a single turn."""
    address: str = field(default="", compare=False)
    """File and row, counted from 1, from which the sample was read."""


def sample_row(step: int, sample: Sample) -> dict[str, Any]:
    """Return a sample as a dump row: verl's keys, then this project's, then the reward function's.

    A key of the reward function that is already used becomes ``reward_extra/<key>``.
    """
    own = {name: getattr(sample, name) for name in FIELDS}
    row = {**{name: own[name] for name in ("input", "output", "gts", "score")}, "step": step, **own, "schema": SCHEMA}
    return row | {f"reward_extra/{key}" if key in row or key in FILE_KEYS else key: value for key, value in sample.extra.items()}


FIELDS = tuple(field.name for field in fields(Sample) if field.name not in ("extra", "address"))
"""Fields of a sample that a dump row has under the same names."""

FILE_KEYS = ("tokenizer", "row", "rows")
"""Keys of a dump row that belong to its file: a hash of the tokenizer, the row's number from 1, and the number of rows."""


def dump_samples(folder: Path, step: int, samples: Sequence[Sample], tokenizer: str = "") -> Path:
    """Write ``{folder}/{step}.jsonl``, one row per sample, completely or not at all, and return its path.

    Samples of one prompt must be neighbours. ``tokenizer``: hash of the tokenizer that made the token ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step}.jsonl"
    _refuse_other(path, "")
    rows = (
        sample_row(step, sample) | {"tokenizer": tokenizer, "row": number, "rows": len(samples)}
        for number, sample in enumerate(samples, start=1)
    )
    replace_text(path, "".join(json_line(row) for row in rows))
    return path


def refuse_other_files(folder: Path, key: str) -> None:
    """Refuse a folder for a dump if it contains a file that is named ``{step}.jsonl`` but that no run wrote.

    Raises:
        ConfigError: There is such a file. The message names it.
    """
    for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else ():
        if path.stem.isdecimal():
            _refuse_other(path, f"{key}={folder}: ")


def _refuse_other(path: Path, address: str) -> None:
    if not os.path.lexists(path):
        return
    with suppress(OSError, ValueError, RecursionError), path.open(encoding="utf-8", errors="replace") as file:
        line = file.readline(LONGEST_LINE)
        if not line or '"schema": ' in line or '"prompt_ids": ' in line or len(line) == LONGEST_LINE:
            return
    raise ConfigError(f"{address}{path} is there, and no run wrote it. Give a folder of its own, or move it away.")


LONGEST_LINE = 2**24
"""Largest number of characters that are read of a file's first line."""


def dumped_steps(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdecimal())


def read_samples(folder: Path, step: int, tokenizer: str, num_tokens: int) -> list[Sample]:
    """Return the samples of one step of a dump, in the order of the file.

    ``tokenizer``: hash of the reader's tokenizer. Token ids must be below ``num_tokens``.

    Raises:
        DataError: The file is missing or incomplete, has another schema or tokenizer, or a row is malformed.
    """
    path = folder / f"{step}.jsonl"
    if not path.is_file():
        raise DataError(
            f"{path}: there is no such file, so step {step} cannot be replayed. Set actor_rollout_ref.rollout.skip_dump_dir to "
            "the folder of a dump, and trainer.total_training_steps to its steps."
        )
    rows = read_rows(path)
    samples = [_read(row, f"{path}, row {number}", tokenizer, num_tokens) for number, row in enumerate(rows, start=1)]
    for number, row in enumerate(rows, start=1):
        if (row["row"], row["rows"]) != (number, rows[0]["rows"]):
            raise DataError(
                f"{path}, row {number}: the file should have row {number} of {rows[0]['rows']} here, and has row {row['row']} "
                f"of {row['rows']}. A row is missing or moved. Write the dump again."
            )
    if not rows or len(rows) != rows[0]["rows"]:
        expected = rows[0]["rows"] if rows else "at least one"
        raise DataError(f"{path}, row {len(rows) + 1}: rows are missing: {len(rows)} of {expected}. Write the dump again.")
    return samples


def _read(row: dict[str, Any], address: str, tokenizer: str, num_tokens: int) -> Sample:
    if row.get("schema") != SCHEMA:
        raise DataError(
            f"{address}: a dump of schema {row.get('schema')} cannot be replayed; this version reads schema {SCHEMA}. Write the "
            "dump again, with trainer.rollout_data_dir or debug=rollout_only."
        )
    own = sample_row(0, EMPTY).keys()
    absent = [key for key in (*own, *FILE_KEYS) if key not in row]
    if absent:
        raise DataError(f"{address}: the key {absent[0]!r} is missing. Write the dump again.")
    if row["tokenizer"] != tokenizer:
        raise DataError(
            f"{address}: its token ids belong to another tokenizer than that of actor_rollout_ref.model.path. Replay the dump "
            "with the model that wrote it."
        )
    for key in ("prompt_ids", "response_ids"):
        ids = row[key]
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < num_tokens for token in ids):
            raise DataError(f"{address}: {key} must be token ids from 0 to {num_tokens - 1}, but it is {ids!r:.200}. Correct it.")
    log_probs = row["rollout_log_probs"]
    if not row["prompt_ids"] or (log_probs is not None and len(log_probs) != len(row["response_ids"])):
        raise DataError(f"{address}: it has no prompt, or not one log-prob for each response token. Write the dump again.")
    prefix = "reward_extra/"
    extra = {key.removeprefix(prefix): value for key, value in row.items() if key not in own and key not in FILE_KEYS}
    return Sample(**{name: row[name] for name in FIELDS}, extra=extra, address=address)


EMPTY = Sample("", "", "", "", None, None, [], [])
"""A sample without content. Its row shows which keys :func:`sample_row` writes for every sample."""
