"""Prompts and the data for their rewards, from rows in verl's schema. They are rendered and checked before a run starts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, Protocol, TypeVar

import numpy as np

from verl_memopt.config import schema
from verl_memopt.config.teacher_rules import IN_BRACES
from verl_memopt.data.encoder import RENDER_ERRORS, Spans, decode, overlong, special_tokens_of, tokenize
from verl_memopt.data.messages import (
    NO_PROMPT,
    Messages,
    read_messages,
    refuse_agents,
    refuse_media,
    render,
    template_arguments,
)
from verl_memopt.data.plugin import load_from_file, refuse_verls_arguments, users_code
from verl_memopt.data.sources import RawRow, read_source, still_reading
from verl_memopt.errors import DataError

logger = logging.getLogger(__name__)

Row = TypeVar("Row")

Prepare = Callable[[str, dict[str, Any]], dict[str, Any]]

VERL_COLUMNS = ("reward_model", "extra_info")
"""Columns of verl's schema whose contents reach a reward function by themselves: the ground truth, and the extra info."""
VALIDATION_SET = "validation_set"
"""Entry of a held-out row's ``extra_info`` that names its set. Validation metrics are grouped by set, else by data source."""
ENVIRONMENT_COLUMN = "environment"
"""Column with the name of a row's environment, as in TRL."""
MANY_COLUMNS = 8
MOST_ROWS = 10_000_000
"""Most rows of a user's dataset class whose rows are all read at the start."""
DEFAULT_SOURCE = "dataset"
"""``data_source`` of a row that has none, if no built-in rule scores it."""


@dataclass(frozen=True)
class PromptRow:
    """One rendered prompt with the data of its reward."""

    index: int
    """Position in the dataset."""
    text: str
    """The prompt as text: rendered by the chat template, taken from the file, or decoded from ids. Special tokens are spelled
    out."""
    data_source: str
    """Selects the default reward and groups validation metrics."""
    ground_truth: Any
    """The reference answer for the reward."""
    extra_info: dict[str, Any]
    """Passed to the reward function."""
    address: str
    """File and row, counted from 1."""
    plain: Spans = ()
    """Spans of ``text`` in which special tokens are encoded as plain text. Elsewhere they become tokens."""
    is_text: bool = False
    """The prompt is a string and not a conversation. The tokenizer then adds its usual special tokens, such as BOS."""
    messages: Messages | None = None
    """The messages from :func:`read_messages`, if the prompt is a conversation. A reward model renders them with its own
    template."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template for this row, such as the schemas of its tools, if rows become conversations of
    several turns."""
    environment: str | None = None
    """Name of the environment of a conversation. None = the only one."""
    teacher: tuple[str, Spans] | None = None
    """The prompt that a teacher reads instead, like ``text`` and ``plain``. None = it reads the policy's prompt."""
    teacher_weight: float = 1.0
    """The weight of the teacher in this row."""
    teacher_number: int = 0
    """The teacher of the row: 0 = the first one, 1, 2, ... = the further ones in their order."""
    teacher_top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token of ``response``: ids and log-probs of a teacher's most probable tokens, if the rows have them."""
    ids: tuple[int, ...] | None = None
    """The prompt's token ids, if the file has ids instead of text. They are used unchanged."""
    response: tuple[int, ...] = ()
    """Token ids of the response that a supervised run learns, including the end of the turn."""


class PromptRows(Protocol):
    """What the trainer needs of a dataset: of the dataset in this file, of a recipe's dataset, and of a user's class."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> PromptRow: ...


TEACHER_PROMPT = "distill.teacher_prompt"


@dataclass(frozen=True)
class TeacherColumns:
    """What the rows say of their teachers. The fields are settings of ``distill`` and ``teacher``.

    Attributes:
        prompt: ``distill.teacher_prompt``, from which each row gets a prompt for the teacher; None = it needs none.
        key: ``teacher.key``.
        names: The names in ``teacher.further_models``.
        weight: ``distill.weight_key``.
        said: ``teacher.log_probs_key``.
        top: ``distill.top_k``.
        tokenizer: The tokenizer of a teacher that reads text, and whose chat template its prompts have; None = it reads the
            policy's tokens.
    """

    prompt: str | None = None
    key: str = ""
    names: tuple[str, ...] = ()
    weight: str | None = None
    said: str | None = None
    top: int = 0
    tokenizer: Any = None

    def number(self, address: str, columns: Mapping[str, Any]) -> int:
        name = columns.get(self.key) if self.names else None
        if name is None:
            return 0
        if name not in self.names:
            raise DataError(
                f"{address}: teacher.key={self.key} names the teacher {name!r:.100}, and teacher.further_models has "
                f"{', '.join(self.names)}. Add it there, or correct the row."
            )
        return 1 + self.names.index(name)

    def weight_of(self, address: str, columns: Mapping[str, Any]) -> float:
        if self.weight is None:
            return 1.0
        value = columns.get(self.weight)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise DataError(
                f"{address}: distill.weight_key={self.weight} must be a number of at least 0, but it is {value!r:.100}. Correct "
                "the row, or remove the key."
            )
        return float(value)


class PromptReader:
    """Renders and checks the rows of a split.

    Args:
        data: The ``data`` section of the settings.
        tokenizer: Renders the chat template and finds special tokens.
        split: ``train`` or ``val``, for the log.
        prepare: Returns the columns that a row needs, given its address and the file's columns; None = the file has them.
        by_rules: Built-in rules score the answers, so each row needs a data source and a ground truth. Otherwise both may be
            missing, and all columns of the row reach the reward function in ``extra_info``.
        streams: Each call reads a few rows of a stream. Each kind of log message then appears only once.
        converses: Prompts are answered by conversations with tools. All columns of a row then reach its environment.
        teachers: What the rows say of their teachers; None = there is no teacher.
    """

    def __init__(
        self,
        data: schema.Data,
        tokenizer: Any,
        split: str,
        prepare: Prepare | None = None,
        by_rules: bool = True,
        streams: bool = False,
        converses: bool = False,
        teachers: TeacherColumns | None = None,
    ) -> None:
        self._data, self._tokenizer, self._split, self._prepare = data, tokenizer, split, prepare
        self._by_rules, self._streams, self._converses = by_rules, streams, converses
        self._teachers = teachers or TeacherColumns()
        self._special = special_tokens_of(tokenizer)
        self._special_counts: list[tuple[str, int]] = []
        self._said = set[str]()

    def read(self, raw: Iterable[RawRow]) -> list[PromptRow]:
        """Render and check rows, in order, without those that ``data.filter_overlong_prompts`` drops. They have no ``index`` yet.

        Raises:
            DataError: A row is wrong; or all rows are dropped, and they are not part of a stream.
        """
        prepare = self._prepare
        rows = [self._row(address, prepare(address, columns) if prepare else columns) for address, columns in raw]
        self._log_special_tokens()
        return self._checked(rows)

    def log(self, level: int, kind: str, text: str, *values: Any) -> None:
        if kind not in self._said:
            logger.log(
                level, text + (" (so far; the following rows are treated in the same way)" if self._streams else ""), *values
            )
        if self._streams:
            self._said.add(kind)

    def _row(self, address: str, columns: dict[str, Any]) -> PromptRow:
        refuse_media(address, columns)
        if not self._converses:
            refuse_agents(address, columns)
        source = self._optional(address, columns, self._data.reward_fn_key, "Set data.reward_fn_key, or add it", DEFAULT_SOURCE)
        if not isinstance(source, str):
            raise DataError(f"{address}: {self._data.reward_fn_key} must be a string, but it is {source!r}. Correct the row.")
        prompt = self._prompt(address, columns)
        ids = _token_ids(address, prompt)
        if self._converses and isinstance(prompt, str):
            # A conversation needs messages, as in TRL.
            prompt = [{"role": "user", "content": prompt}]
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
            {}
            if self._by_rules and not self._converses
            else {name: columns[name] for name in columns if name not in (self._data.prompt_key, *VERL_COLUMNS)}
        )
        template = template_arguments(address, columns, self._data, self._tokenizer) if self._converses and messages else {}
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
            template=template,
            environment=others.get(ENVIRONMENT_COLUMN),
            teacher=self._for_teacher(address, columns, prompt if is_text else messages),
            teacher_number=self._teachers.number(address, columns),
            teacher_weight=self._teachers.weight_of(address, columns),
        )

    def _prompt(self, address: str, columns: dict[str, Any]) -> Any:
        if self._converses and columns.get(self._data.prompt_key) is None:
            return NO_PROMPT
        return _column(address, columns, self._data.prompt_key, "Set data.prompt_key, or add it")

    def _for_teacher(self, address: str, columns: dict[str, Any], prompt: str | Messages | None) -> tuple[str, Spans] | None:
        template, tokenizer = self._teachers.prompt, self._teachers.tokenizer
        if template is None and tokenizer is None:
            return None
        template = "{prompt}" if template is None else template
        if prompt is None:
            raise DataError(f"{address}: {TEACHER_PROMPT} needs a prompt that is text or messages, and this one is token ids.")
        extra = columns.get("extra_info") or {}
        told = {**extra, **columns, "ground_truth": self._ground_truth(address, columns)}
        told["prompt"] = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        missing = sorted({name for name in IN_BRACES.findall(template) if told.get(name) is None})
        if missing:
            raise DataError(
                f"{address}: the row has no {', '.join(missing)}, which {TEACHER_PROMPT} names. It has "
                f"{', '.join(sorted(name for name, value in told.items() if value is not None))}. Change the template or the row."
            )
        text = IN_BRACES.sub(lambda match: str(told[match[1]]), template)
        if isinstance(prompt, str):
            return text, ()
        return self._render(address, [*prompt[:-1], {**prompt[-1], "content": text}], columns, tokenizer)

    def _optional(self, address: str, columns: dict[str, Any], name: str, remedy: str, default: Any) -> Any:
        return default if name not in columns and not self._by_rules else _column(address, columns, name, remedy)

    def _ground_truth(self, address: str, columns: dict[str, Any]) -> Any:
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

    def _render(self, address: str, messages: Messages, columns: dict[str, Any], other: Any = None) -> tuple[str, Spans]:
        # ``other``: the tokenizer of another model, which will read the prompt.
        tokenizer, special = (self._tokenizer, self._special) if other is None else (other, special_tokens_of(other))
        arguments = template_arguments(address, columns, self._data, tokenizer)
        num_special = special.count([messages, arguments.get("tools")])
        if num_special:
            self._special_counts.append((address, num_special))
        hides = num_special > 0 and not self._data.allow_special_tokens
        try:
            return render(special, tokenizer, messages, hides, {"add_generation_prompt": True, **arguments})
        except RENDER_ERRORS as problem:
            raise DataError(
                f"{address}: the chat template cannot render this prompt ({problem}). Set another template with "
                "actor_rollout_ref.model.custom_chat_template, or correct the row or data.apply_chat_template_kwargs."
            ) from problem

    def _log_special_tokens(self) -> None:
        if not self._special_counts:
            return
        encoding = (
            "become tokens, because data.allow_special_tokens=true"
            if self._data.allow_special_tokens
            else "are encoded as plain text. Set data.allow_special_tokens=true if they should become tokens"
        )
        self.log(
            logging.WARNING, "special", "data.%s_files: %d special tokens inside the messages of %d prompts (the first in %s) %s",
            self._split, sum(count for _, count in self._special_counts), len(self._special_counts), self._special_counts[0][0],
            encoding,
        )  # fmt: skip
        self._special_counts.clear()

    def _checked(self, rows: list[PromptRow]) -> list[PromptRow]:
        # Drop or refuse prompts that are too long. With truncation they stay, and are cut when they are encoded.
        data = self._data
        if data.truncation != "error" and not data.filter_overlong_prompts:
            return rows
        kept = within_limit(rows, data, self._tokenizer, may_be_empty=self._streams)
        if len(kept) < len(rows):
            numbers = len(rows) - len(kept), len(rows), data.max_prompt_length
            text = "%s: dropped %d of %d prompts over data.max_prompt_length=%d tokens"
            self.log(logging.INFO, "dropped", text, self._split, *numbers)
        return kept


class PromptDataset(list[PromptRow]):
    """The rows of the dataset files, rendered and checked.

    Args:
        files: As in :func:`verl_memopt.data.sources.read_source`.
        data: The ``data`` section of the settings.
        tokenizer: As in :class:`PromptReader`. So are ``prepare`` and the following arguments.
        split: ``train`` or ``val``. It selects ``{split}_max_samples`` and the keys that errors name.

    Raises:
        DataError: A file or a row is wrong. The message names the row.
    """

    def __init__(
        self,
        files: Any,
        data: schema.Data,
        tokenizer: Any,
        split: str,
        prepare: Prepare | None = None,
        by_rules: bool = True,
        converses: bool = False,
        teachers: TeacherColumns | None = None,
    ) -> None:
        self._split = split
        chosen = chosen_rows(read_source(files, split, f"data.{split}_files"), data, split)
        reader = PromptReader(data, tokenizer, split, prepare, by_rules, False, converses, teachers)
        rows = reader.read(chosen)
        # Number the rows after long prompts were dropped. The number seeds the samples, and must be the position in this list.
        super().__init__(replace(row, index=index) for index, row in enumerate(rows))


def build_dataset(
    files: Any,
    data: schema.Data,
    tokenizer: Any,
    split: str,
    by_rules: bool = True,
    converses: bool = False,
    teachers: TeacherColumns | None = None,
) -> PromptDataset | CustomRows:
    """Build the dataset of a split: a :class:`PromptDataset`, or the class that ``data.custom_cls`` names.

    Arguments are those of :class:`PromptDataset`.

    Raises:
        DataError: The user's class cannot be loaded or is not a dataset, or its rows are wrong (see :class:`CustomRows`).
    """
    if data.custom_cls.path is None:
        return PromptDataset(files, data, tokenizer, split, None, by_rules, converses, teachers)
    dataset, address = custom_dataset(files, data, tokenizer, split)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        instead = "set data.val_files=null" if split == "val" else "set data.streaming=true for a class with __iter__"
        raise DataError(f"{address}: the class needs __len__ and __getitem__ to be read whole. Add them, or {instead}.")
    return CustomRows(dataset, address, data.custom_cls.path)


def custom_dataset(files: Any, data: schema.Data, tokenizer: Any, split: str) -> tuple[Any, str]:
    """Return an instance of the class that ``data.custom_cls`` names, and the address of the class for errors.

    Raises:
        DataError: The class cannot be loaded, was written for verl, or raised an error.
    """
    custom = data.custom_cls
    assert custom.path is not None, "callers check this"
    dataset_class = load_from_file(custom.path, custom.name, key="data.custom_cls.path", error=DataError)
    address = f"data.custom_cls.name={custom.name}"
    refuse_verls_arguments(dataset_class, ("data_files", "config"), "files, data, tokenizer, split", address)
    with users_code(f"{address}: __init__ of {custom.path}", DataError):
        return dataset_class(files, data, tokenizer, split), address


class CustomRows:
    """The rows of a user's dataset class. Every row is read once at the start, so that mistakes are reported before the run.

    ``address``: setting and class, for errors. ``path``: the user's file, for errors.

    Raises:
        DataError: The dataset raised an error, has no rows or more than :data:`MOST_ROWS`, an item is not a PromptRow, or two
            rows have the same index.
    """

    def __init__(self, dataset: Any, address: str, path: str) -> None:
        self._dataset, self._address, self._path = dataset, address, path
        places: dict[int, int] = {}
        if (number := len(self)) > MOST_ROWS:
            raise DataError(
                f"{address}: __len__ of {path} is {number:,}, but at most {MOST_ROWS:,} rows can be read at the start. Correct "
                "it, or set data.streaming=true, with which the class needs only an __iter__."
            )
        with still_reading(address, lambda: len(places), "With data.streaming=true rows are read as steps need them"):
            self._check(places)

    def _check(self, places: dict[int, int]) -> None:
        # `places`: index -> position of the row that has it.
        for place, row in enumerate(self):
            if row.index in places:
                raise DataError(
                    f"{self._address}: rows {places[row.index]} and {place} have the same PromptRow.index={row.index} "
                    f"({row.address}), and would be sampled with the same seeds. Give each row an index of its own, such as its "
                    "position."
                )
            places[row.index] = place
        if not places:
            raise DataError(
                f"{self._address}: the dataset has no rows, but there must be at least one row. Correct {self._path}."
            )

    def __len__(self) -> int:
        with users_code(f"{self._address}: __len__ of {self._path}", DataError):
            return len(self._dataset)

    def __getitem__(self, index: int) -> PromptRow:
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
        return (self[index] for index in range(len(self)))


def chosen_rows(rows: list[Row], data: schema.Data, split: str) -> list[Row]:
    """Apply ``data.{split}_max_samples`` (-1 = all rows): keep the first rows, or a random choice, in file order."""
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
    # List the columns of a row for an error. If there are many, list the three whose names are nearest to ``name``.
    names = sorted(columns)
    if len(names) <= MANY_COLUMNS:
        return f"The row has {', '.join(names)}"
    nearest = sorted(names, key=lambda other: -SequenceMatcher(None, name, other).ratio())[:3]
    return f"The row has {len(names)} columns, and the most similar names are {', '.join(nearest)}"


def _token_ids(address: str, prompt: Any) -> tuple[int, ...] | None:
    if not isinstance(prompt, list) or not prompt or not all(isinstance(token, int) for token in prompt):
        return None
    if any(isinstance(token, bool) or token < 0 for token in prompt):
        raise DataError(
            f"{address}: a token id must be a whole number of at least 0, but the prompt is {prompt!r:.200}. Correct it."
        )
    return tuple(prompt)


def within_limit(rows: list[PromptRow], data: schema.Data, tokenizer: Any, may_be_empty: bool = False) -> list[PromptRow]:
    """Return the rows within ``max_prompt_length``.

    Raises:
        DataError: A prompt is longer and ``filter_overlong_prompts`` is false; or no row would be left, unless ``may_be_empty``.
    """
    texts = [row for row in rows if row.ids is None]
    plain, whole = [row.plain for row in texts], [row.is_text for row in texts]
    encoded = iter(tokenize(tokenizer, [row.text for row in texts], plain, whole))
    lengths = [len(next(encoded) if row.ids is None else row.ids) for row in rows]
    too_long = [i for i, length in enumerate(lengths) if length > data.max_prompt_length]
    if data.filter_overlong_prompts and len(too_long) == len(rows) > 0 and not may_be_empty:
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
