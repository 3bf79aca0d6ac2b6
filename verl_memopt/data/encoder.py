"""From texts to token ids: the tokens that are added, special tokens inside a text, and a count of what truncation cuts."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from verl_memopt.data.template_trial import render_bounded
from verl_memopt.errors import DataError

logger = logging.getLogger(__name__)


RENDER_ERRORS = (TemplateError, ValueError, TypeError, ArithmeticError, RecursionError, LookupError, AttributeError)
"""The exceptions that a chat template may raise if it cannot render a conversation."""

TRUNCATIONS: dict[str, Callable[[list[int], int], list[int]] | None] = {
    "error": None,
    "left": lambda ids, limit: ids[len(ids) - limit :],
    "right": lambda ids, limit: ids[:limit],
    "middle": lambda ids, limit: ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :],
}
"""How to cut a prompt over the limit, by the name of the part that is lost. None refuses the prompt."""


def tokenize(
    tokenizer: Any, texts: Sequence[str], plain: Sequence[Spans] = (), whole: Sequence[bool] | bool = False
) -> list[list[int]]:
    """Return the token ids of each text, without a length limit.

    Args:
        tokenizer: A tokenizer of transformers.
        texts: The texts.
        plain: For each text, the spans in which special tokens are encoded as plain text. Elsewhere they become tokens.
        whole: Whether each text is a complete text of the user. The tokenizer adds its usual special tokens, such as BOS, to such
            a text. It adds nothing to a conversation or a part of one, because the chat template has written all special tokens.
    """
    if not texts:
        return []
    wholes = [whole] * len(texts) if isinstance(whole, bool) else whole
    ids: dict[int, list[int]] = {}
    for adds in (False, True):
        places = [place for place, is_whole in enumerate(wholes) if is_whole == adds]
        chosen = [texts[place] for place in places]
        if places and any(plain):
            encoded = special_tokens_of(tokenizer).encode(chosen, [plain[place] for place in places], adds)
        elif places:
            encoded = tokenizer(chosen, add_special_tokens=adds, truncation=False, return_attention_mask=False, verbose=False)
            encoded = encoded["input_ids"]
        if places:
            ids |= zip(places, _one_start(tokenizer, encoded) if adds else encoded, strict=True)
    return [ids[place] for place in range(len(texts))]


def _one_start(tokenizer: Any, encoded: list[list[int]]) -> list[list[int]]:
    # If a text already begins with BOS, remove the second BOS that the tokenizer added.
    begin = tokenizer("", verbose=False)["input_ids"][:1]
    if not begin or begin[0] != tokenizer.bos_token_id:
        return encoded
    return [ids[1:] if ids[:2] == begin * 2 else ids for ids in encoded]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    # Keep special tokens in the text, and do not clean up spaces.
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


@dataclass
class PromptEncoder:
    """Encodes prompts and counts what truncation removes.

    Args:
        truncation: A key of ``TRUNCATIONS``.
        embedding_rows: Rows of the model's embedding. A prompt with a larger token id is refused; None = unknown.

    ``rows_truncated`` and ``tokens_dropped`` count over the whole life of the encoder. A prompt that is repeated n times counts
    once.
    """

    tokenizer: Any
    max_prompt_length: int
    truncation: str
    embedding_rows: int | None = None
    rows_truncated: int = 0
    tokens_dropped: int = 0

    def encode(
        self,
        texts: Sequence[str],
        addresses: Sequence[str],
        copies: int = 1,
        plain: Sequence[Spans] = (),
        whole: Sequence[bool] | bool = False,
    ) -> list[list[int]]:
        """Return the token ids of each text, at most ``max_prompt_length`` per text.

        Args:
            texts: The prompts.
            addresses: File and row of each text, for errors.
            copies: Number of times that each prompt is repeated in ``texts``, one copy after another.
            plain: See :func:`tokenize`.
            whole: See :func:`tokenize`.

        Raises:
            DataError: A prompt is empty, is too long with ``truncation=error``, or has a token id that the model does not have.
        """
        rows = tokenize(self.tokenizer, texts, plain, whole)
        return [self.fit(ids, addresses[i], counted=i % copies == 0) for i, ids in enumerate(rows)]

    def fit(self, ids: list[int], address: str, counted: bool = True) -> list[int]:
        """Cut the ids of a prompt to ``max_prompt_length``. The first prompt that is cut logs a warning.

        ``address``: file and row, for errors. ``counted``: False for further copies of a prompt.

        Raises:
            DataError: The prompt is empty, is too long with ``truncation=error``, or has a token id that the model does not have.
        """
        if not ids:
            raise DataError(f"{address}: the prompt has no tokens. Remove the row, or add a prompt.")
        if self.embedding_rows is not None and max(ids) >= self.embedding_rows:
            raise DataError(
                f"{address}: the prompt has the token id {max(ids)}, but the model's embedding has {self.embedding_rows} rows. "
                "Use the tokenizer that belongs to the model, or remove the row."
            )
        if len(ids) <= self.max_prompt_length:
            return ids
        cut = TRUNCATIONS[self.truncation]
        if cut is None:
            raise overlong(address, len(ids), self.max_prompt_length)
        if counted:
            if not self.rows_truncated:
                logger.warning(
                    "data.truncation=%s: %s has %d tokens and keeps %d (data.max_prompt_length). data/tokens_dropped counts the "
                    "tokens that each step loses.", self.truncation, address, len(ids), self.max_prompt_length,
                )  # fmt: skip
            self.rows_truncated += 1
            self.tokens_dropped += len(ids) - self.max_prompt_length
        return cut(ids, self.max_prompt_length)


def overlong(address: str, length: int, limit: int, others: int = 0) -> DataError:
    # `others`: further prompts over the limit.
    more = f" ({others} more rows are too long as well)" if others else ""
    return DataError(
        f"{address}: the prompt has {length} tokens, but data.max_prompt_length is {limit}{more}. Raise data.max_prompt_length, "
        "set data.filter_overlong_prompts=true to remove such rows, or set data.truncation to left, right or middle to cut them."
    )


TOKENIZER_PARTS = ("vocabulary", "merges", "added tokens", "normalizer", "pre-tokenizer")
"""The parts of a tokenizer that decide the ids of a text."""


def tokenizer_digests(tokenizer: Any) -> dict[str, str]:
    """Hash each part of a tokenizer that decides the ids of a text. The keys are those of ``TOKENIZER_PARTS``."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    added = sorted((token["id"], token["content"], token["special"]) for token in described["added_tokens"])
    added_names = {name for _, name, _ in added}
    vocabulary = described["model"].pop("vocab", None)
    if isinstance(vocabulary, dict):  # some tokenizers list their added tokens here too, and some do not
        vocabulary = {name: number for name, number in vocabulary.items() if name not in added_names}
    merges = described["model"].pop("merges", None)
    values = (vocabulary, merges, added, described.get("normalizer"), described.get("pre_tokenizer"))
    return {part: _digest(value) for part, value in zip(TOKENIZER_PARTS, values, strict=True)}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# Special tokens inside a user's text are found, hidden from the chat template, and encoded as plain text.
#
# A tokenizer turns the text ``<|im_end|>`` into the token that ends a turn, wherever the text comes from. A chat template needs
# that. In the content of a message it is harmful, because the message could end its own turn and start another.


Spans = tuple[tuple[int, int], ...]
"""Parts of a text, each as (first character, character after the last)."""


def moved(spans: Spans, by: int) -> Spans:
    # Shift spans by the number of characters that were added before their text.
    return tuple((start + by, end + by) for start, end in spans)


_OPEN, _BETWEEN, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
"""Noncharacters: they have no meaning in Unicode, and no normalisation changes them."""


class SpecialTokens:
    """The special tokens of a tokenizer, without tokens that it does not mark as special, such as ``<think>``.

    Each special token has a stand-in, a string with a random number. No text can contain a stand-in by chance or on purpose.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._single_words = {token.content for token in added if token.single_word}
        names = {token.content for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))
        self.names = sorted(names - {""}, key=lambda name: (-len(name), name))
        # If several names match at the same position, the longest one is taken, as in tokenizers.
        self._pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")
        self._number = secrets.randbelow(10**18)
        self._hidden = re.compile(f"{_OPEN}{self._number}{_BETWEEN}(\\d+){_CLOSE}")
        self._stand_ins = {name: f"{_OPEN}{self._number}{_BETWEEN}{place}{_CLOSE}" for place, name in enumerate(self.names)}
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._kind = type(tokenizer).__name__
        self._blind: Any = None
        self._ids: dict[int, int] = {}
        """Id of a stand-in -> id of its special token, for the stand-ins whose id differs in the copy of the tokenizer."""
        self._merges = False

    def find(self, text: str) -> Spans:
        return tuple(match.span() for match in self._pattern.finditer(text))

    def count(self, value: Any) -> int:
        found: list[tuple[int, int]] = []
        _map_texts(value, lambda text: found.extend(self.find(text)))
        return len(found)

    def hide(self, value: Any) -> Any:
        """Replace special tokens by their stand-ins in all strings of a nested value, before a chat template reads it."""
        return _map_texts(value, lambda text: self._pattern.sub(lambda match: self._stand_ins[match[0]], text))

    def reveal(self, text: str) -> tuple[str, Spans]:
        """Replace stand-ins by their special tokens in a rendered text. Return the text and the spans of these tokens."""
        parts, spans, length, end = [], [], 0, 0
        for match in self._hidden.finditer(text):
            name = self.names[int(match[1])]
            parts += [text[end : match.start()], name]
            length += match.start() - end
            spans.append((length, length + len(name)))
            length, end = length + len(name), match.end()
        whole = "".join([*parts, text[end:]])
        # The pattern does not find a stand-in that the template has cut or changed, but the random number is still there.
        if f"{_OPEN}{self._number}" in whole:
            raise ValueError("it changes the text of a message that contains a special token")
        return whole, tuple(spans)

    def render(self, tokenizer: Any, messages: Any, hides: bool, /, **arguments: Any) -> tuple[str, Spans]:
        """Render messages with the chat template. Return the text and the spans in which special tokens are plain text.

        ``hides``: special tokens in messages and tools are plain text. False = they become tokens. ``arguments``: further
        arguments of the template. One of ``RENDER_ERRORS`` is raised if the messages cannot be rendered.
        """
        shown = self.hide(messages) if hides else messages
        if hides and "tools" in arguments:
            arguments["tools"] = self.hide(arguments["tools"])
        text = render_bounded(tokenizer, shown, **arguments)
        return self.reveal(text) if hides else (text, ())

    def encode(self, texts: Sequence[str], plain: Sequence[Spans], adds: bool = False) -> list[list[int]]:
        """Return the ids of each text. Special tokens are plain text inside the spans ``plain``, and tokens elsewhere.

        Plain text gets the ids that a tokenizer without the special token would give it. ``adds``: the tokenizer adds its usual
        special tokens, such as BOS.

        Raises:
            DataError: The tokenizer has no fast backend.
        """
        self._blind = self._blind or self._blinded()
        marked = ["".join(self._with_stand_ins(text, spans)) for text, spans in zip(texts, plain, strict=True)]
        encoded = self._blind.encode_batch(marked, add_special_tokens=adds)
        return [self._numbered(encoding) for encoding in encoded]

    def _numbered(self, encoded: Any) -> list[int]:
        # Tokens that the tokenizer added already have the right ids, so map only the stand-ins.
        pairs = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        return [number if added else self._ids.get(number, number) for number, added in pairs] if self._ids else encoded.ids

    def _with_stand_ins(self, text: str, plain: Spans) -> Iterator[str]:
        end = 0
        for start, after in (*plain, (len(text), len(text))):
            for match in self._pattern.finditer(text, end, start):
                if self._becomes_token(text, match):
                    yield text[end : match.start()]
                    yield self._stand_ins[match[0]]
                    end = match.end()
            yield text[end:after]
            end = after

    def _becomes_token(self, text: str, match: re.Match[str]) -> bool:
        """Return whether the tokenizer turns the name of a special token into that token.

        A token marked ``single_word`` is not matched inside a longer word, so the tokenizer's model reads it as text there. A
        model that looks up pieces in its vocabulary can still find the token. A model that builds pieces by merges cannot.
        """
        neighbors = text[: match.start()][-1:] + text[match.end() :][:1]
        stands_alone = match[0] not in self._single_words or not any(map(_in_word, neighbors))
        return stands_alone or not self._merges

    def _blinded(self) -> Any:
        # Make a copy of the tokenizer in which each special token is spelled as its stand-in. The copy reads the usual spelling
        # as plain text.
        if self._backend is None:
            raise DataError(
                f"data.allow_special_tokens=false: the tokenizer ({self._kind}) has no fast version, so special tokens in a "
                "prompt cannot be encoded as plain text. Remove them from the data, or set data.allow_special_tokens=true."
            )
        from tokenizers import Tokenizer

        serialized = json.loads(self._backend.to_str())
        self._merges = "merges" in serialized["model"]
        for token in serialized["added_tokens"]:
            if token["content"] in self._stand_ins:
                token |= {"content": self._stand_ins[token["content"]], "normalized": False}
        _rename(serialized["model"], self._stand_ins)
        blind: Any = Tokenizer.from_str(json.dumps(serialized))
        blind.no_truncation()
        blind.no_padding()
        # If plain text needs the name of a special token, the name keeps its id, and the stand-in gets another id.
        names = {blind.token_to_id(stand_in): name for name, stand_in in self._stand_ins.items()}
        self._ids = {own: number for own, name in names.items() if (number := self._backend.token_to_id(name)) != own}
        return blind


def _in_word(character: str) -> bool:
    # Whether ``\w`` of the tokenizers library matches a character. Python's ``\w`` is different.
    kind = unicodedata.category(character)
    return kind[0] in "LM" or kind in ("Nd", "Nl", "Pc") or character in "\u200c\u200d" or "\u24b6" <= character <= "\u24e9"


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    # Names that merges produce stay, because plain text produces them too. Single characters without another spelling stay as
    # well, because plain text would lose them.
    merged = {merge.replace(" ", "") if isinstance(merge, str) else "".join(merge) for merge in model.get("merges", ())}
    kept = merged if model.get("byte_fallback") else merged | {name for name in names if len(name) == 1}
    new = {name: stand_in for name, stand_in in names.items() if name not in kept}
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, dict):
        model["vocab"] = {new.get(name, name): number for name, number in vocabulary.items()}
    else:
        model["vocab"] = [[new.get(name, name), score] for name, score in vocabulary]
    if model.get("unk_token") in new:
        model["unk_token"] = new[model["unk_token"]]


def _map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_texts(key, change): _map_texts(entry, change) for key, entry in value.items()}
    return [_map_texts(entry, change) for entry in value] if isinstance(value, list | tuple) else value


_KNOWN: WeakKeyDictionary[Any, SpecialTokens] = WeakKeyDictionary()


def special_tokens_of(tokenizer: Any) -> SpecialTokens:
    # The stand-ins are random, so render and encode must use the same object.
    if tokenizer not in _KNOWN:
        _KNOWN[tokenizer] = SpecialTokens(tokenizer)
    return _KNOWN[tokenizer]


_MARK = "\ufdd3"
"""A noncharacter in place of an answer. It shows what a chat template writes after the answer."""


def end_of_turn(tokenizer: Any, chat_kwargs: Mapping[str, Any]) -> str:
    """Return what the chat template writes after an answer, such as ``<|im_end|>`` and a line break.

    Raises:
        DataError: The chat template drops or changes an answer.
    """
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    try:
        text = render_bounded(tokenizer, turns, **chat_kwargs)
    except RENDER_ERRORS as problem:
        raise DataError(
            f"data.apply_chat_template_kwargs: the chat template cannot render an answer ({problem}). Correct them, or set "
            "another template with actor_rollout_ref.model.custom_chat_template."
        ) from problem
    before, mark, after = text.partition(_MARK)
    if not mark or not before:
        raise DataError("the chat template does not write the answer of an assistant. Use the template of a chat model.")
    return after
