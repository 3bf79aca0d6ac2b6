"""Dumps of generated samples that a later run can replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_memopt.observe.files import json_line, replace_text

SCHEMA = 1
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
    """The ground truth the reward function saw."""
    score: float
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further entries that the reward function returned, each a key of the row."""


def sample_row(step: int, sample: Sample) -> dict[str, Any]:
    """Return a sample as a dump row: verl's keys, then this project's, then the reward function's.

    A key of the reward function that is already used appears as ``reward_extra/<key>``.
    """
    row = {
        "input": sample.input,
        "output": sample.output,
        "gts": sample.gts,
        "score": sample.score,
        "step": step,
        "uid": sample.uid,
        "data_source": sample.data_source,
        "prompt_ids": list(sample.prompt_ids),
        "response_ids": list(sample.response_ids),
        "schema": SCHEMA,
    }
    return row | {f"reward_extra/{key}" if key in row else key: value for key, value in sample.extra.items()}


def dump_samples(folder: Path, step: int, samples: Sequence[Sample]) -> Path:
    """Write ``{folder}/{step}.jsonl``, one row per sample, completely or not at all, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step}.jsonl"
    replace_text(path, "".join(json_line(sample_row(step, sample)) for sample in samples))
    return path
