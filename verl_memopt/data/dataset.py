"""Prompts with what their reward needs, read from files in verl's schema and checked as a whole before a run starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jinja2 import TemplateError

from verl_memopt.config import schema
from verl_memopt.data.encoder import overlong, tokenize
from verl_memopt.data.files import RawRow, read_rows
from verl_memopt.data.plugin import load_from_file
from verl_memopt.data.special_tokens import Spans, special_tokens_of
from verl_memopt.errors import DataError

logger = logging.getLogger(__name__)

REFUSED_COLUMNS = ("images", "videos")


@dataclass(frozen=True)
class PromptRow:
    index: int
    """Place in the dataset."""
    text: str
    """The prompt, rendered by the chat template or as the file gives it; special tokens in it as they are written."""
    data_source: str
    """Chooses the default reward and groups validation metrics."""
    ground_truth: Any
    """What the reward compares with."""
    extra_info: dict[str, Any]
    """Handed to the reward function."""
    address: str
    """File and row, counted from 1."""
    plain: Spans = ()
    """Where ``text`` holds special tokens that are text and not tokens. Anywhere else they are tokens."""


class PromptDataset:
    """The rows of ``files``, rendered and checked: ``len``, indexing, iteration.

    ``split`` is train or val; it chooses ``{split}_max_samples`` and the keys that errors name. Raises DataError for
    everything a file can have wrong, with the row.
    """

    def __init__(self, files: Any, data: schema.Data, tokenizer: Any, split: str) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._split = split
        limit, shuffle = {
            "train": (data.train_max_samples, data.shuffle),
            "val": (data.val_max_samples, data.validation_shuffle),
        }[split]
        chosen = _subset(read_rows(files, f"data.{split}_files"), limit, data.seed if shuffle else None)
        self._special = special_tokens_of(tokenizer)
        self._found: list[tuple[str, int]] = []
        rows = [self._row(address, columns) for address, columns in chosen]
        self._tell_special_tokens()
        self._rows = [replace(row, index=index) for index, row in enumerate(self._checked(rows))]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        return self._rows[index]

    def __iter__(self) -> Iterator[PromptRow]:
        return iter(self._rows)

    def _row(self, address: str, columns: dict[str, Any]) -> PromptRow:
        for name in REFUSED_COLUMNS:
            if name in columns:
                raise DataError(f"{address}: the column {name!r} holds media, only text is trained on. Drop the column.")
        source = _column(address, columns, self._data.reward_fn_key, "Set data.reward_fn_key, or add it")
        if not isinstance(source, str):
            raise DataError(f"{address}: {self._data.reward_fn_key} must be a text, it is {source!r}. Mend the row.")
        text, plain = self._render(address, _column(address, columns, self._data.prompt_key, "Set data.prompt_key, or add it"))
        if not text:
            raise DataError(f"{address}: the prompt is empty. Drop the row, or give it a prompt.")
        return PromptRow(
            index=-1,
            text=text,
            data_source=source,
            ground_truth=_ground_truth(address, columns),
            extra_info=_extra_info(address, columns),
            address=address,
            plain=plain,
        )

    def _render(self, address: str, prompt: Any) -> tuple[str, Spans]:
        """A list of turns goes through the chat template, a text stays as it is. Gives where special tokens in it are text."""
        num_special = self._special.count(prompt)
        if num_special:
            self._found.append((address, num_special))
        hides = num_special > 0 and not self._data.allow_special_tokens
        if isinstance(prompt, str):
            return prompt, self._special.find(prompt) if hides else ()
        if not _is_chat(prompt):
            raise DataError(
                f"{address}: {self._data.prompt_key} must be a text or a list of {{role, content}} with texts in them, "
                f"it is {prompt!r:.200}. Mend the row."
            )
        arguments = self._data.apply_chat_template_kwargs
        shown = self._special.hide(prompt) if hides else prompt
        try:
            text = self._tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True, **arguments)
            return self._special.reveal(text) if hides else (text, ())
        except (TemplateError, ValueError, TypeError) as problem:
            raise DataError(
                f"{address}: the chat template does not render this prompt ({problem}). Set another with "
                "actor_rollout_ref.model.custom_chat_template, or mend the row or data.apply_chat_template_kwargs."
            ) from problem

    def _tell_special_tokens(self) -> None:
        """Logs once how many special tokens the prompts hold, and what becomes of them."""
        if not self._found:
            return
        what = (
            "become tokens, as data.allow_special_tokens=true asks"
            if self._data.allow_special_tokens
            else "are encoded as plain text. Set data.allow_special_tokens=true if they are meant as tokens, as in prompts "
            "that the file holds already rendered"
        )
        logger.warning("data.%s_files: %d special tokens inside %d prompts (the first in %s) %s", self._split,
                       sum(count for _, count in self._found), len(self._found), self._found[0][0], what)  # fmt: skip

    def _checked(self, rows: list[PromptRow]) -> list[PromptRow]:
        """The rows within ``max_prompt_length``; what happens to others is ``filter_overlong_prompts`` and ``truncation``."""
        data = self._data
        if data.truncation != "error" and not data.filter_overlong_prompts:
            return rows
        lengths = [len(ids) for ids in tokenize(self._tokenizer, [row.text for row in rows], [row.plain for row in rows])]
        too_long = [i for i, length in enumerate(lengths) if length > data.max_prompt_length]
        if not too_long:
            return rows
        first = too_long[0]
        if not data.filter_overlong_prompts:
            raise overlong(rows[first].address, lengths[first], data.max_prompt_length, others=len(too_long) - 1)
        logger.info("%s: dropped %d of %d prompts over data.max_prompt_length=%d tokens", self._split, len(too_long),
                    len(rows), data.max_prompt_length)  # fmt: skip
        kept = [row for row, length in zip(rows, lengths, strict=True) if length <= data.max_prompt_length]
        if not kept:
            raise overlong(rows[first].address, lengths[first], data.max_prompt_length, others=len(too_long) - 1)
        return kept


def build_dataset(files: Any, data: schema.Data, tokenizer: Any, split: str) -> PromptDataset:
    """The dataset of ``split``: :class:`PromptDataset`, or the class named by ``data.custom_cls``, called the same way.

    Raises DataError when the user's class cannot be loaded, is no dataset, or has no rows.
    """
    custom = data.custom_cls
    if custom.path is None:
        return PromptDataset(files, data, tokenizer, split)
    made = load_from_file(custom.path, custom.name, key="data.custom_cls.path", error=DataError)(files, data, tokenizer, split)
    if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
        raise DataError(f"data.custom_cls.name={custom.name}: the class needs __len__ and __getitem__. Add them.")
    if not len(made) or not isinstance(made[0], PromptRow):
        raise DataError(
            f"data.custom_cls.name={custom.name}: indexing must give PromptRow, and at least one row. Mend the class."
        )
    return made


def _subset(rows: list[RawRow], limit: int, seed: int | None) -> list[RawRow]:
    """At most ``limit`` rows (-1 = all) in file order: the first, or with a seed a random choice."""
    if limit < 0 or limit >= len(rows):
        return rows
    if seed is None:
        return rows[:limit]
    return [rows[i] for i in sorted(np.random.default_rng(seed).permutation(len(rows))[:limit].tolist())]


def _column(address: str, columns: dict[str, Any], name: str, way_out: str) -> Any:
    if name in columns and columns[name] is None:
        raise DataError(f"{address}: the column {name!r} is null in this row. Fill it in, or drop the row.")
    if name not in columns:
        raise DataError(f"{address}: there is no column {name!r}; the row has {', '.join(sorted(columns))}. {way_out}.")
    return columns[name]


def _ground_truth(address: str, columns: dict[str, Any]) -> Any:
    reward_model = _column(address, columns, "reward_model", "Add {ground_truth: ...} under that name")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise DataError(f"{address}: reward_model has no ground_truth, it is {reward_model!r:.200}. Add {{ground_truth: ...}}.")
    return reward_model["ground_truth"]


def _extra_info(address: str, columns: dict[str, Any]) -> dict[str, Any]:
    extra = columns.get("extra_info")
    if extra is None:
        return {}
    if not isinstance(extra, dict):
        raise DataError(f"{address}: extra_info must be an object, it is {extra!r:.200}. Mend the row.")
    return extra


def _is_chat(prompt: Any) -> bool:
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(t, dict) and isinstance(t.get("role"), str) and isinstance(t.get("content"), str) for t in prompt)
