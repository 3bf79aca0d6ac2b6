"""Builds the student's sequences from token ids: prefix, explanation, bridge, solution and end.

By default the explanation keeps the teacher's own tokens, so the log-probs of both models belong to the same tokens. A row is
built from its parts, so the places of explanation and solution are known.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_memopt.algorithms.rows import positions
from verl_memopt.data.batch import Ragged
from verl_memopt.data.encoder import Spans, tokenize
from verl_memopt.errors import ConfigError
from verl_memopt.model.prefix_layout import ranges
from verl_memopt.recipes.rlt.dataset import RltPrompts
from verl_memopt.recipes.rlt.settings import RltReward

OK = 0
"""The row has no special status. Each status is a number, and if several apply to a row, the largest counts."""
NO_END_TAG = 1
"""The response has no end tag, and all of it is the explanation."""
EMPTY_THINK = 2
"""The explanation has no token."""
THINK_TRUNCATED = 3
"""The end of the explanation was cut, so that the student's sequence fits."""
SKIPPED = 4
"""The row is not scored, and leaves its group."""

NAMES = {OK: "ok", NO_END_TAG: "no_end_tag", EMPTY_THINK: "empty_think", THINK_TRUNCATED: "think_truncated", SKIPPED: "skipped"}
"""Names of the statuses in metrics."""


_PROBE = "a b\n\n7\u00e9\U0001f642<x>"
"""A text to test the tokenizer: with a space, line breaks, a digit, characters of two and four bytes, and brackets."""


class TokenBytes:
    """The bytes of each token of a vocabulary.

    Args:
        tokenizer: A Hugging Face tokenizer with a byte-level vocabulary, such as those of GPT-2, Qwen and Llama 3.

    Raises:
        ConfigError: The tokenizer is not byte-level.
    """

    def __init__(self, tokenizer: Any) -> None:
        spelled = _spelled(tokenizer)
        self._bytes = np.frombuffer(b"".join(spelled), dtype=np.uint8)
        # One more token without bytes: every id that the tokenizer does not have, such as padding of the embedding.
        self._sizes = np.array([*map(len, spelled), 0], dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        if self.spell(np.asarray(ids, dtype=np.int64)) != _PROBE.encode():
            raise _not_byte_level(tokenizer)

    def spell(self, ids: Tensor | np.ndarray) -> bytes:
        """Join the bytes of some tokens. An id that the tokenizer does not have adds no bytes.

        Args:
            ids: int64 [T].
        """
        indices = self._known(ids)
        return self._bytes[ranges(self._starts[indices], self._sizes[indices])].tobytes()

    def ends(self, ids: Tensor | np.ndarray) -> np.ndarray:
        """int64 [T]: the number of bytes up to the end of each token.

        Args:
            ids: int64 [T].
        """
        return np.cumsum(self._sizes[self._known(ids)])

    def _known(self, ids: Tensor | np.ndarray) -> np.ndarray:
        unknown = len(self._sizes) - 1
        values = np.asarray(ids, dtype=np.int64)
        return np.where((values >= 0) & (values < unknown), values, unknown)


def _spelled(tokenizer: Any) -> list[bytes]:
    # The text of an added token is its plain text. All other tokens have one character per byte.
    if not _has_byte_level_decoder(tokenizer):
        raise _not_byte_level(tokenizer)
    byte_of = _byte_of_character()
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    spelled = []
    for number, text in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        if number in added or text is None:
            spelled.append(added.get(number, "").encode())
        elif all(character in byte_of for character in text):
            spelled.append(bytes(byte_of[character] for character in text))
        else:
            raise _not_byte_level(tokenizer)
    return spelled


def _has_byte_level_decoder(tokenizer: Any) -> bool:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return False
    description = json.loads(decoder.__getstate__())
    parts = [description, *description.get("decoders", ())]
    return any(part.get("type") == "ByteLevel" for part in parts)


def _byte_of_character() -> dict[str, int]:
    """Return character -> byte, as byte-level vocabularies spell them.

    A printable byte of Latin-1 is its own character. The others take the characters from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _not_byte_level(tokenizer: Any) -> ConfigError:
    return ConfigError(
        f"actor_rollout_ref.model.path: the tokenizer ({type(tokenizer).__name__}) is not byte-level, so the end of an "
        "explanation cannot be located in its tokens. Choose a model with a byte-level tokenizer, such as Qwen or Llama 3."
    )


@dataclass(frozen=True)
class Explanations:
    """The explanations of N responses. An explanation starts with its response.

    Attributes:
        lengths: int64 [N], tokens of each explanation. A token with the first byte of the end tag does not count.
        matched: bool [N], whether there is an end tag.
        has_text_after: bool [N], whether text other than white space follows the end tag.
        texts: The bytes of each explanation, up to the end tag. The last of them may be in a token that ``lengths`` leaves out.
    """

    lengths: Tensor
    matched: Tensor
    has_text_after: Tensor
    texts: tuple[bytes, ...]


def locate_explanations(responses: Ragged, token_bytes: TokenBytes, end_tag: str, stop_ids: Collection[int]) -> Explanations:
    """Find the explanation in each response.

    Only the tokens before the first stop token count. The first end tag ends the explanation. Without an end tag, all these
    tokens are the explanation.

    ``responses``: int64, the tokens after the forced prefix.
    """
    tag = end_tag.encode()
    stops = torch.isin(responses.flat, torch.tensor(sorted(stop_ids), dtype=torch.int64)).split(responses.sizes())
    found_in = [_locate(ids[: _first(is_stop)], token_bytes, tag) for ids, is_stop in zip(responses.rows(), stops, strict=True)]
    lengths, matched, after, texts = zip(*found_in, strict=True) if found_in else ((), (), (), ())
    return Explanations(
        lengths=torch.tensor(lengths, dtype=torch.int64),
        matched=torch.tensor(matched, dtype=torch.bool),
        has_text_after=torch.tensor(after, dtype=torch.bool),
        texts=tuple(texts),
    )


def _first(is_stop: Tensor) -> int:
    # The place of the first True, or the length if there is none.
    places = is_stop.nonzero()
    return int(places[0]) if len(places) else len(is_stop)


def _locate(ids: Tensor, token_bytes: TokenBytes, tag: bytes) -> tuple[int, bool, bool, bytes]:
    # The tokens of an explanation, whether it has an end tag, whether text follows it, and its bytes.
    text = token_bytes.spell(ids)
    place = text.find(tag)
    if place < 0:
        return len(ids), False, False, text
    length = int(np.searchsorted(token_bytes.ends(ids), place, side="right"))
    return length, True, bool(text[place + len(tag) :].strip()), text[:place]


Parts = tuple[list[int], list[int], list[int], list[int], list[int]]
"""The ids of the prefix, the explanation, the bridge, the solution and the end of one row."""
Texts = tuple[str, str, str, str, str]
"""The texts of the same parts."""


def retokenized_parts(
    tokenizer: Any, token_bytes: TokenBytes, texts: Texts, plain: tuple[Spans, Spans, Spans, Spans, Spans]
) -> Parts:
    """Tokenize the texts of a row as one text, and return its parts.

    A token that spans the border of the explanation or of the solution belongs to the neighbouring part.

    ``plain``: for each text, the spans whose special tokens are encoded as plain text.
    """
    starts = np.cumsum([0, *map(len, texts)])
    spans = tuple(
        (int(start) + first, int(start) + last)
        for start, spans_of_text in zip(starts, plain, strict=False)
        for first, last in spans_of_text
    )
    (ids,) = tokenize(tokenizer, ["".join(texts)], [spans])
    ends = token_bytes.ends(np.asarray(ids, dtype=np.int64))
    begins = np.concatenate([[0], ends[:-1]])
    borders = np.cumsum([len(_normalized(tokenizer, text).encode()) for text in texts])
    cuts = [0]
    for border, is_begin in zip(borders[:4], (True, False, True, False), strict=True):
        # A part begins with the first token that starts at or after its border, and ends with the last that ends before or at it.
        place = np.searchsorted(begins, border, "left") if is_begin else np.searchsorted(ends, border, "right")
        cuts.append(max(cuts[-1], int(place)))
    cuts.append(len(ids))
    prefix, think, bridge, solution, end = (ids[first:last] for first, last in pairwise(cuts))
    return prefix, think, bridge, solution, end


def _normalized(tokenizer: Any, text: str) -> str:
    # The borders count bytes of the normalised text, because the tokenizer normalises Unicode before it cuts.
    normalizer = tokenizer.backend_tokenizer.normalizer
    return text if normalizer is None else normalizer.normalize_str(text)


PREFIX, THINK, BRIDGE, SOLUTION, END = range(5)
"""The parts of a row, in order."""
NUM_PARTS = 5

_NOTHING: Parts = ([], [], [], [], [])


@dataclass(frozen=True)
class StudentRows:
    """The student's sequences. A skipped row has no token.

    Attributes:
        ids: int64, N rows: all parts of each row, one after another.
        parts: int64 [N, 5], tokens of each part.
        status: int8 [N], a key of ``NAMES``.
        matched: bool [N], whether the explanation has an end tag.
        has_text_after: bool [N], whether text follows the end tag.
    """

    ids: Ragged
    parts: Tensor
    status: Tensor
    matched: Tensor
    has_text_after: Tensor

    @property
    def num_rows(self) -> int:
        # Number of rows, including skipped ones.
        return int(self.parts.shape[0])

    def part(self, which: int) -> Ragged:
        return Ragged(flat=self.ids.flat[self.part_of_token() == which], lengths=self.parts[:, which], batch_size=[])

    def part_of_token(self) -> Tensor:
        # int64 [tokens]: the index of the part to which each token of `ids` belongs.
        return torch.arange(NUM_PARTS).repeat(self.num_rows).repeat_interleave(self.parts.flatten())

    def scored(self) -> Tensor:
        # bool [N]: False for skipped rows.
        return self.status != SKIPPED

    def select(self, rows: Sequence[int]) -> StudentRows:
        index = torch.as_tensor(rows, dtype=torch.int64)
        return StudentRows(
            ids=self.ids.select(rows),
            parts=self.parts[index],
            status=self.status[index],
            matched=self.matched[index],
            has_text_after=self.has_text_after[index],
        )


class StudentEncoder:
    """Builds the student's sequences from questions, solutions and the teacher's responses.

    Args:
        prompts: Renders the student's prompt with the tokenizer that teacher and student share.
        settings: How rows are aligned and what happens to long ones.
        stop_ids: Tokens that end a response, and padding.

    Raises:
        ConfigError: The tokenizer is not byte-level.
        DataError: The chat template cannot render an answer.
    """

    def __init__(self, prompts: RltPrompts, settings: RltReward, stop_ids: Collection[int]) -> None:
        self.prompts = prompts
        self._format = prompts.rlt_format
        self._settings = settings
        self._stop_ids = frozenset(stop_ids)
        self._token_bytes = TokenBytes(prompts.tokenizer)
        self._end_text = self._format.solution.end + prompts.end_of_turn()
        forced, bridge, end = tokenize(prompts.tokenizer, [self._format.padding, self._format.bridge, self._end_text])
        self._forced = forced if settings.include_forced_prefix else []
        self._bridge, self._end = bridge, end

    def encode(
        self, questions: Sequence[str], solutions: Sequence[str], responses: Ragged, addresses: Sequence[str]
    ) -> StudentRows:
        """Build the student's sequence of each response.

        ``responses``: int64, the teacher's tokens after the forced prefix.

        Raises:
            ConfigError: A sequence is longer than ``max_student_len``, and ``overlong`` is ``error``.
        """
        explanations = locate_explanations(responses, self._token_bytes, self._format.explanation.end, self._stop_ids)
        build = self._retokenized if self._settings.align == "retokenize" else self._concatenated
        built = build(questions, solutions, responses, explanations)
        rows = [self._fit(parts, address) for parts, address in zip(built, addresses, strict=True)]
        status = torch.tensor([status for _, status in rows], dtype=torch.int8)
        return StudentRows(
            ids=Ragged.from_rows([[token for part in parts for token in part] for parts, _ in rows], torch.int64),
            parts=torch.tensor([[len(part) for part in parts] for parts, _ in rows], dtype=torch.int64).reshape(-1, NUM_PARTS),
            status=torch.where(explanations.matched, status, status.clamp(min=NO_END_TAG)),
            matched=explanations.matched,
            has_text_after=explanations.has_text_after,
        )

    def teacher_prompts(self, questions: Sequence[str], solutions: Sequence[str]) -> Ragged:
        """Return the teacher's prompt of each row, int64, which ends where the scored explanation begins."""
        pairs = list(zip(questions, solutions, strict=True))
        rendered = {pair: self.prompts.teacher(*pair) for pair in dict.fromkeys(pairs)}
        texts, plain = [text for text, _ in rendered.values()], [spans for _, spans in rendered.values()]
        openings = [text.removesuffix(self._format.padding) for text in texts] if self._settings.include_forced_prefix else texts
        if self._settings.align == "concat":
            prompts = tokenize(self.prompts.tokenizer, openings, plain)
        else:
            # Tokenize the whole text before the cut. One token may hold the end of the tag and the blank line. In the student's
            # row it comes before the explanation, so the teacher's prompt must have it too.
            whole = tokenize(self.prompts.tokenizer, texts, plain)
            prompts = [self._before(ids, opening) for ids, opening in zip(whole, openings, strict=True)]
        ids_of = dict(zip(rendered, prompts, strict=True))
        return Ragged.from_rows([ids_of[pair] for pair in pairs], torch.int64)

    def _before(self, ids: list[int], opening: str) -> list[int]:
        # Keep the tokens that begin inside of the opening of their text.
        ends = self._token_bytes.ends(np.asarray(ids, dtype=np.int64))
        begins = np.concatenate([[0], ends[:-1]])
        return ids[: int(np.searchsorted(begins, len(_normalized(self.prompts.tokenizer, opening).encode()), "left"))]

    def _concatenated(
        self, questions: Sequence[str], solutions: Sequence[str], responses: Ragged, explanations: Explanations
    ) -> list[Parts]:
        # The explanation keeps the teacher's own tokens.
        tokenizer, openings = self.prompts.tokenizer, {question: self._opening(question) for question in questions}
        prefixes = tokenize(tokenizer, [text for text, _ in openings.values()], [plain for _, plain in openings.values()])
        prefix_of = dict(zip(openings, prefixes, strict=True))
        plain = [self.prompts.plain(solution) for solution in solutions]
        thoughts = [ids[:length].tolist() for ids, length in zip(responses.rows(), explanations.lengths.tolist(), strict=True)]
        return [
            (prefix_of[question], [*self._forced, *thought], self._bridge, solution, self._end)
            for question, thought, solution in zip(questions, thoughts, tokenize(tokenizer, solutions, plain), strict=True)
        ]

    def _retokenized(
        self, questions: Sequence[str], solutions: Sequence[str], responses: Ragged, explanations: Explanations
    ) -> list[Parts]:
        # The texts of the parts are joined, and tokenized as one text.
        rows: list[Parts] = []
        forced = self._format.padding if self._settings.include_forced_prefix else ""
        for question, solution, thought in zip(questions, solutions, explanations.texts, strict=True):
            opening, plain = self._opening(question)
            texts = (opening, forced + thought.decode(errors="replace"), self._format.bridge, solution, self._end_text)
            spans = (plain, (), (), self.prompts.plain(solution), ())
            rows.append(retokenized_parts(self.prompts.tokenizer, self._token_bytes, texts, spans))
        return rows

    def _opening(self, question: str) -> tuple[str, Spans]:
        # If the padding is scored, it belongs to the explanation and not to the opening.
        text, plain = self.prompts.student(question)
        return text.removesuffix(self._format.padding) if self._settings.include_forced_prefix else text, plain

    def _fit(self, parts: Parts, address: str) -> tuple[Parts, int]:
        prefix, think, bridge, solution, end = parts
        limit = self._settings.max_student_len
        length = sum(map(len, parts))
        if not solution:  # possible only with retokenize, if tokens span the solution and its tags
            return _NOTHING, SKIPPED
        if limit is None or length <= limit:
            return parts, OK if think else EMPTY_THINK
        if self._settings.overlong == "error":
            raise ConfigError(
                f"max_student_len={limit}: the student's sequence for {address} has {length} tokens. Raise it to at least "
                f"{length}, lower data.max_response_length, or set overlong to truncate_think or skip."
            )
        room = len(think) - (length - limit)
        if self._settings.overlong == "skip" or room < 0:
            return _NOTHING, SKIPPED
        return (prefix, think[:room], bridge, solution, end), THINK_TRUNCATED


def needs_teacher_pass(settings: RltReward, temperature: float) -> bool:
    """Return whether the reward needs log-probs of the teacher that differ from those of the rollouts."""
    own_tokens = settings.align == "concat" and not settings.include_forced_prefix
    own_temperature = settings.unbias_teacher_log_probs or temperature == 1
    return settings.include_teacher_think_entropy and not (own_tokens and own_temperature)


def reused_log_probs(log_probs: Ragged, think_lengths: Tensor) -> Tensor:
    """Return the log-probs of the explanations, fp32 [tokens of all explanations], from the log-probs of whole responses.

    Args:
        log_probs: fp32, the log-prob of each response token.
        think_lengths: int64 [N], tokens of each explanation, which starts at the start of its response.
    """
    row = torch.repeat_interleave(torch.arange(log_probs.num_rows), log_probs.lengths)
    return log_probs.flat[positions(row, log_probs.lengths) < think_lengths[row]]
