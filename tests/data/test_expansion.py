"""Prompt expansion: every method, the same rows."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.expansion import EXPANSIONS, expand
from verl_memopt.data.special_tokens import special_tokens_of
from verl_memopt.errors import ConfigError
from verl_memopt.models.tokenizer import SPECIALS, build_tokenizer

TOKENIZER = build_tokenizer()
PIECES = st.one_of(st.text(min_size=1, max_size=8), st.sampled_from(SPECIALS))
TEXTS = st.lists(st.lists(PIECES, min_size=1, max_size=5).map("".join), max_size=5)


def prompts(texts: list[str]) -> list[PromptRow]:
    return [PromptRow(i, text, "s", None, {}, f"a:{i + 1}") for i, text in enumerate(texts)]


@given(TEXTS, st.integers(1, 4), st.integers(1, 12), st.sampled_from(["left", "right", "middle"]))
def test_every_method_gives_the_same_ids_and_the_same_counts(texts: list[str], n: int, limit: int, truncation: str) -> None:
    seen: list[Any] = []
    for method in EXPANSIONS:
        encoder = PromptEncoder(TOKENIZER, limit, truncation)
        rows = expand(prompts(texts), n, method, encoder)
        seen.append((rows, encoder.rows_truncated, encoder.tokens_dropped))
    assert all(entry == seen[0] for entry in seen)
    assert len(seen[0][0]) == len(texts) * n


@pytest.mark.parametrize("method", EXPANSIONS)
def test_the_copies_of_a_prompt_stand_together_and_keep_its_special_tokens(method: str) -> None:
    texts = ["<|im_start|>1<|im_end|>", "<|im_start|>234<|im_end|>"]
    rows = expand(prompts(texts), 3, method, PromptEncoder(TOKENIZER, 10, "error"))
    assert [TOKENIZER.decode(ids) for ids in rows] == [texts[0]] * 3 + [texts[1]] * 3


@given(TEXTS, st.lists(st.booleans(), min_size=5, max_size=5))
def test_every_method_gives_the_same_ids_where_special_tokens_are_text(texts: list[str], are_text: list[bool]) -> None:
    special = special_tokens_of(TOKENIZER)
    rows = [
        replace(row, plain=special.find(row.text) if plain else ()) for row, plain in zip(prompts(texts), are_text, strict=False)
    ]
    seen = [expand(rows, 2, method, PromptEncoder(TOKENIZER, 100, "left")) for method in EXPANSIONS]
    assert seen[0] == seen[1]
    for row, ids in zip(rows, seen[0][::2], strict=True):
        assert ids == TOKENIZER(row.text, add_special_tokens=False, split_special_tokens=bool(row.plain))["input_ids"]


@pytest.mark.parametrize("method", EXPANSIONS)
def test_each_row_owns_its_ids(method: str) -> None:
    first, second = expand(prompts(["12"]), 2, method, PromptEncoder(TOKENIZER, 10, "error"))
    first.append(0)
    assert len(second) == 2


class CountingTokenizer:
    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, texts: list[str], **settings: Any) -> Any:
        self.calls.append(len(texts))
        return TOKENIZER(texts, **settings)


@pytest.mark.parametrize(("method", "texts_tokenized"), [("string", 6), ("token", 2)])
def test_string_tokenizes_the_repeated_texts_and_token_each_once_in_one_call(method: str, texts_tokenized: int) -> None:
    counting = CountingTokenizer()
    expand(prompts(["12", "3"]), 3, method, PromptEncoder(counting, 10, "error"))
    assert counting.calls == [texts_tokenized]


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.expansion=magic: .*string, token"):
        expand([], 1, "magic", PromptEncoder(TOKENIZER, 10, "error"))
