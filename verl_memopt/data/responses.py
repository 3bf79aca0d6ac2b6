"""The responses of a supervised dataset. They are encoded as a model would write them, including the end of the turn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

from verl_memopt.config import schema
from verl_memopt.data.dataset import CustomRows, PromptReader, PromptRow, TeacherColumns, build_dataset, chosen_rows
from verl_memopt.data.encoder import RENDER_ERRORS, Spans, SpecialTokens, end_of_turn, moved, special_tokens_of, tokenize
from verl_memopt.data.messages import Messages, read_messages, render, template_arguments
from verl_memopt.data.sources import RawRow, read_source
from verl_memopt.errors import DataError

logger = logging.getLogger(__name__)

SOURCE = "sft"
"""``data_source`` of a row that has none."""


def build_supervised_dataset(
    files: Any, data: schema.Data, tokenizer: Any, split: str, teachers: TeacherColumns | None = None
) -> list[PromptRow] | CustomRows:
    """Return the rows of a split with their responses. A user's class (``data.custom_cls``) gives its own responses.

    Arguments are those of :class:`verl_memopt.data.dataset.PromptDataset`.

    Raises:
        DataError: A file or a row is wrong. The message names the row.
    """
    if data.custom_cls.path is not None:
        dataset = build_dataset(files, data, tokenizer, split)
        assert isinstance(dataset, CustomRows)
        _check_responses(dataset)
        return dataset
    chosen = chosen_rows(read_source(files, split, f"data.{split}_files"), data, split)
    return SupervisedReader(data, tokenizer, split, teachers=teachers).read(chosen)


class SupervisedReader:
    """Renders and checks rows with their responses. Arguments are those of :class:`PromptReader`."""

    def __init__(
        self, data: schema.Data, tokenizer: Any, split: str, streams: bool = False, teachers: TeacherColumns | None = None
    ) -> None:
        self._data, self._tokenizer, self._split, self._streams = data, tokenizer, split, streams
        self._teachers, self._said = teachers or TeacherColumns(), dict[str, Any]()
        self._answered: dict[str, Answered] = {}
        self._prompts = PromptReader(data, tokenizer, split, self._prepare, streams=streams, teachers=teachers)

    def _prepare(self, address: str, columns: dict[str, Any]) -> dict[str, Any]:
        if self._teachers.said is not None:
            self._said[address] = columns.get(self._teachers.said)
        return as_prompt_row(address, columns, self._data, self._answered)

    def read(self, raw: Iterable[RawRow]) -> list[PromptRow]:
        """Return the rows in order, without those that ``data.filter_overlong_prompts`` drops.

        Raises:
            DataError: A row is wrong, or all rows are dropped and are not part of a stream.
        """
        data, tokenizer, answered = self._data, self._tokenizer, self._answered
        answered.clear()
        prompts = [replace(row, index=index) for index, row in enumerate(self._prompts.read(raw))]
        end = chat_end = tokenizer.eos_token or ""
        if any(row.messages for row in prompts):
            # Cut the end of a turn after its first end token, where an engine stops. If it has no end token, add one.
            text = end_of_turn(tokenizer, data.apply_chat_template_kwargs)
            chat_end = text.partition(end)[0] + end if end else text
        ends = [(row.ground_truth, chat_end if row.messages else _missing_end(row, end)) for row in prompts]
        special, rendered = special_tokens_of(tokenizer), dict[int, Spans]()
        for place, row in enumerate(prompts):
            if row.address in answered:
                text, rendered[place] = answered[row.address].rendered(row, data, tokenizer, special)
                closing = (span[1] for span in special.find(text) if text[slice(*span)] == end and span not in rendered[place])
                ends[place] = ("", text[: next(closing, len(text))])
        rows = with_responses(prompts, ends, data, tokenizer, self._split, rendered, self._prompts if self._streams else None)
        if self._teachers.said is None:
            return rows
        rows = [replace(row, teacher_top=self._most_probable(row, self._said[row.address])) for row in rows]
        self._said.clear()
        return rows

    def _most_probable(self, row: PromptRow, said: Any) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Return what a teacher said of each token of a response: at least ``distill.top_k`` pairs (token id, log-prob).

        Raises:
            DataError: The column has no such pairs.
        """
        key, tokens = f"{row.address}: teacher.log_probs_key={self._teachers.said}", len(row.response)
        is_cut = tokens == self._data.max_response_length
        if not isinstance(said, list | tuple) or len(said) < tokens or (len(said) > tokens and not is_cut):
            found = f"a list of {len(said)}" if isinstance(said, list | tuple) else f"{said!r:.100}"
            raise DataError(
                f"{key}: the response has {tokens} tokens with the turn's end, and each needs a list of pairs [token id, "
                f"log-prob], but the column has {found}. Correct the column, or let the teacher score the policy's tokens."
            )
        return tuple(self._pairs(f"{key}, token {place}", entry) for place, entry in enumerate(said[:tokens], 1))

    def _pairs(self, key: str, entry: Any) -> tuple[tuple[int, float], ...]:
        top, vocabulary = self._teachers.top, self._vocabulary
        try:
            pairs = {int(token): float(value) for token, value in entry}
        except (TypeError, ValueError):
            pairs = {}
        if len(pairs) < top or min(pairs) < 0 or max(pairs) >= vocabulary or not all(v <= 1e-3 for v in pairs.values()):
            raise DataError(
                f"{key}: it must be at least distill.top_k={top} pairs [token id, log-prob] of different tokens below "
                f"{vocabulary}, but it is {entry!r:.100}. Correct the column, or lower distill.top_k."
            )
        return tuple(sorted(pairs.items(), key=lambda pair: -pair[1])[:top])

    @cached_property
    def _vocabulary(self) -> int:
        return max(self._tokenizer.get_vocab().values()) + 1


def stream_reader(
    data: schema.Data,
    tokenizer: Any,
    supervised: bool,
    by_rules: bool,
    converses: bool = False,
    teachers: TeacherColumns | None = None,
) -> Callable[[Sequence[Any]], list[PromptRow]]:
    """Return the function that reads items of a stream of training rows. An item is a pair (address, row).

    The rows of a user's class are PromptRows already.
    """
    if data.custom_cls.path is not None:
        return partial(_own_rows, supervised)
    if supervised:
        return SupervisedReader(data, tokenizer, "train", streams=True, teachers=teachers).read
    return PromptReader(data, tokenizer, "train", None, by_rules, True, converses, teachers).read


def _own_rows(supervised: bool, items: Sequence[tuple[str, PromptRow]]) -> list[PromptRow]:
    rows = [row for _, row in items]
    if supervised:
        _check_responses(rows)
    return rows


def _check_responses(rows: Iterable[PromptRow]) -> None:
    without = next((row for row in rows if not row.response), None)
    if without is not None:
        raise DataError(
            f"{without.address}: PromptRow.response is empty. Set it to the token ids of the response and of the turn's end."
        )


@dataclass(frozen=True)
class Answered:
    """A conversation whose last turn has more than its content: tool calls, or a field with its reasoning."""

    messages: Messages
    columns: dict[str, Any]

    def rendered(self, row: PromptRow, data: schema.Data, tokenizer: Any, special: SpecialTokens) -> tuple[str, Spans]:
        """Return the text of the last turn from the chat template, and the spans in which special tokens are plain text.

        Raises:
            DataError: The template renders the earlier turns in another way than it renders the prompt.
        """
        arguments = template_arguments(row.address, self.columns, data, tokenizer)
        hides = not data.allow_special_tokens and special.count(self.messages) > 0
        try:
            whole, plain = render(special, tokenizer, self.messages, hides, {**arguments, "add_generation_prompt": False})
        except RENDER_ERRORS as problem:
            raise DataError(f"{row.address}: the chat template cannot render the last turn ({problem}). Correct it.") from problem
        if not whole.startswith(row.text):
            raise DataError(
                f"{row.address}: the chat template renders the turns before the last one in another way than a prompt, so that "
                "the last turn cannot be learned from it. Remove the row, or give the whole turn as text in its content."
            )
        return whole[len(row.text) :], moved(tuple(span for span in plain if span[0] >= len(row.text)), -len(row.text))


def as_prompt_row(address: str, columns: dict[str, Any], data: schema.Data, answered: dict[str, Answered]) -> dict[str, Any]:
    """Return the columns of a row in the form that reinforcement learning reads. The response becomes the ground truth.

    A conversation whose last turn has more than its content is added to ``answered``, under the row's address.
    """
    found, prompt = _at(columns, data.response_key), columns.get(data.prompt_key)
    key, turns = f"data.response_key={data.response_key}", columns.get(data.messages_key)
    if found is None and turns is not None:
        key = f"data.messages_key={data.messages_key}"
        messages = read_messages(turns, address) or []
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise DataError(
                f"{address}: {key}: a conversation is a list of {{role, content}} with at least two turns, the last by the "
                f"assistant, but it is {turns!r:.200}. Correct the row, or set data.response_key."
            )
        prompt, found = messages[:-1], messages[-1]["content"]
        if messages[-1].keys() - {"role", "content"}:
            answered[address] = Answered(messages, columns)
            found = found or "-"  # the content may be empty, because the whole turn is rendered
    elif data.prompt_key not in columns:
        raise DataError(
            f"{address}: there is no column {data.prompt_key!r}. The row has {', '.join(sorted(columns))}. Set "
            "data.prompt_key, or data.messages_key for whole conversations."
        )
    if not isinstance(found, str) or not found.strip():
        what = "there is none" if found is None else "it is empty" if isinstance(found, str) else f"it is {found!r:.200}"
        raise DataError(
            f"{address}: {key}: the response must be a text, but {what}. The row has {', '.join(sorted(columns))}. Set "
            "data.response_key or data.messages_key, or correct the row."
        )
    source = columns.get(data.reward_fn_key) or SOURCE
    return {**columns, data.prompt_key: prompt, data.reward_fn_key: source, "reward_model": {"ground_truth": found}}


def with_responses(
    rows: Sequence[PromptRow],
    responses: Sequence[tuple[str, str]],
    data: schema.Data,
    tokenizer: Any,
    split: str,
    rendered: Mapping[int, Spans] = MappingProxyType({}),
    stream: PromptReader | None = None,
) -> list[PromptRow]:
    """Return the rows with the token ids of their responses, at most ``data.max_response_length`` each.

    A longer response is refused, its row is left out (``filter_overlong_prompts``), or its end is cut off (``truncation``).

    Args:
        rows: The prompts.
        responses: For each row the text of the response, and the text that ends the turn. Special tokens in the response are
            plain text, unless ``data.allow_special_tokens`` is true or the prompt is a string too.
        data: The ``data`` section of the settings.
        tokenizer: Encodes the texts.
        split: ``train`` or ``val``, for the log.
        rendered: Position of a row -> spans in the end of its turn in which special tokens are plain text.
        stream: The reader of the prompts, if the rows are part of a stream.

    Raises:
        DataError: A response is too long, or no row is left and the rows are not part of a stream.
    """
    encoded = _encoded(rows, responses, data, tokenizer, rendered)
    limit, kept, overlong = data.max_response_length, [], 0
    for row, ids in encoded:
        if len(ids) > limit:
            if data.truncation == "error" and not data.filter_overlong_prompts:
                raise DataError(
                    f"{row.address}: the response has {len(ids)} tokens, but data.max_response_length is {limit}. Raise it, set "
                    "data.filter_overlong_prompts=true to leave such rows out, or data.truncation=right to cut them."
                )
            overlong += 1
            if data.filter_overlong_prompts:
                continue
        kept.append(replace(row, response=tuple(ids[:limit])))
    if overlong:
        done = "left out" if data.filter_overlong_prompts else "cut the end of"
        log = partial(logger.log, logging.WARNING) if stream is None else partial(stream.log, logging.WARNING, "responses")
        text = "data.%s_files: %s %d of %d responses over data.max_response_length=%d tokens"
        log(text, split, done, overlong, len(rows), limit)
    if not kept and stream is None:
        raise DataError(
            f"data.{split}_files: no row is left, because all responses exceed data.max_response_length={limit} tokens. Raise it."
        )
    return kept


def _missing_end(row: PromptRow, end: str) -> str:
    # If the prompt is a string, the response may already end with the end token.
    return "" if end and row.is_text and row.ground_truth.endswith(end) else end


def _encoded(
    rows: Sequence[PromptRow],
    responses: Sequence[tuple[str, str]],
    data: schema.Data,
    tokenizer: Any,
    rendered: Mapping[int, Spans],
) -> list[tuple[PromptRow, list[int]]]:
    """Return each row with the ids of its response.

    A response is encoded together with its prompt, because a model reads both. It begins where the ids of the prompt end. But a
    token may span the border. If the prompt is a string, the response then begins with that token, as in TRL. A turn of a
    conversation is then encoded alone, because generation begins where the template ends.
    """
    special = special_tokens_of(tokenizer)
    found = [() if data.allow_special_tokens or row.is_text else special.find(responses[i][0]) for i, row in enumerate(rows)]
    plain = [(*spans, *moved(rendered.get(i, ()), len(responses[i][0]))) for i, spans in enumerate(found)]
    is_text, prompts = [row.is_text for row in rows], [row.plain for row in rows]
    before = tokenize(tokenizer, [row.text for row in rows], prompts, is_text)
    both = [row.text + text + end for row, (text, end) in zip(rows, responses, strict=True)]
    spans = [(*row.plain, *moved(answer_spans, len(row.text))) for row, answer_spans in zip(rows, plain, strict=True)]
    whole = tokenize(tokenizer, both, spans, is_text)
    alone = tokenize(tokenizer, [text + end for text, end in responses], plain)
    encoded = []
    for place, row in enumerate(rows):
        prompt, joined = before[place], whole[place]
        shared = next((i for i, pair in enumerate(zip(prompt, joined, strict=False)) if pair[0] != pair[1]), len(prompt))
        if row.ids is None and (shared == len(prompt) or row.is_text):
            cut = row if shared == len(prompt) else replace(row, ids=tuple(prompt[:shared]))
            encoded.append((cut, joined[shared:]))
        else:
            encoded.append((row, alone[place]))
    return encoded


def _at(columns: Any, key: str) -> Any:
    if not isinstance(columns, dict):
        return None
    column, _, rest = key.partition(".")
    return _at(columns.get(column), rest) if rest and key not in columns else columns.get(key)
