"""Encoding and truncation of prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from verl_memopt.data.encoder import PromptEncoder, decode
from verl_memopt.errors import ConfigError, DataError
from verl_memopt.model.tiny import build_tokenizer

TOKENIZER = build_tokenizer()


def digits(ids: list[int]) -> str:
    return TOKENIZER.decode(ids)


def test_special_tokens_in_a_text_stay_and_none_is_added(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "<|im_start|>user\n1<|im_end|>"
    (ids,) = PromptEncoder(tokenizer, 100, "error").encode([text], ["a:1"])
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize(("truncation", "kept"), [("left", "56789"), ("right", "01234"), ("middle", "01789")])
def test_truncation_loses_the_side_that_it_names_and_counts_what_is_lost(truncation: str, kept: str) -> None:
    encoder = PromptEncoder(TOKENIZER, 5, truncation)
    rows = encoder.encode(["0123456789", "123", "01234567"], ["a:1", "a:2", "a:3"])
    assert digits(rows[0]) == kept
    assert digits(rows[1]) == "123"
    assert [len(ids) for ids in rows] == [5, 3, 5]
    assert (encoder.rows_truncated, encoder.tokens_dropped) == (2, 5 + 3)


@given(
    st.lists(st.text(alphabet="0123456789", min_size=1, max_size=30), max_size=5),
    st.integers(1, 20),
    st.sampled_from(["left", "right", "middle"]),
)
def test_kept_and_dropped_tokens_add_up(texts: list[str], limit: int, truncation: str) -> None:
    encoder = PromptEncoder(TOKENIZER, limit, truncation)
    rows = encoder.encode(texts, ["a:1"] * len(texts))
    assert all(len(ids) <= limit for ids in rows)
    assert sum(map(len, rows)) + encoder.tokens_dropped == sum(map(len, texts))


def test_copies_of_a_prompt_count_once() -> None:
    encoder = PromptEncoder(TOKENIZER, 5, "left")
    encoder.encode(["0123456789"] * 3 + ["01"] * 3, ["a:1"] * 6, copies=3)
    assert (encoder.rows_truncated, encoder.tokens_dropped) == (1, 5)


def test_the_first_prompt_that_is_cut_earns_the_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    encoder = PromptEncoder(TOKENIZER, 5, "left")
    encoder.encode(["01234", "0123456789", "01234567"], ["a:1", "a:2", "a:3"])
    (warning,) = caplog.messages
    assert warning.startswith("data.truncation=left: a:2 has 10 tokens and keeps 5 (data.max_prompt_length).")


def test_ids_fit_as_texts_do() -> None:
    encoder = PromptEncoder(TOKENIZER, 5, "right", embedding_rows=100)
    assert encoder.fit([1, 2, 3, 4, 5, 6], "a:1") == [1, 2, 3, 4, 5]
    assert encoder.fit([1, 2, 3, 4, 5, 6], "a:1", counted=False) == [1, 2, 3, 4, 5]
    assert (encoder.rows_truncated, encoder.tokens_dropped) == (1, 1)
    with pytest.raises(DataError, match=r"^a:2: the prompt has the token id 100, but the model's embedding has 100 rows"):
        encoder.fit([100], "a:2")


def test_decoded_text_keeps_special_tokens_and_spaces() -> None:
    text = "<|im_start|>user\n1 , 2 ! it 's<|im_end|>"
    assert decode(TOKENIZER, TOKENIZER(text, add_special_tokens=False)["input_ids"]) == text


def test_error_refuses_a_prompt_over_the_limit_with_its_row_and_length() -> None:
    encoder = PromptEncoder(TOKENIZER, 5, "error")
    assert digits(encoder.encode(["01234"], ["a:1"])[0]) == "01234"
    with pytest.raises(DataError, match=r"^a:2: the prompt has 6 tokens, but data\.max_prompt_length is 5"):
        encoder.encode(["0", "012345"], ["a:1", "a:2"])


@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_a_prompt_of_the_limit_is_left_whole_and_one_token_more_is_cut(truncation: str) -> None:
    encoder = PromptEncoder(TOKENIZER, 5, truncation)
    assert digits(encoder.encode(["01234"], ["a:1"])[0]) == "01234"
    assert (encoder.rows_truncated, encoder.tokens_dropped) == (0, 0)
    assert len(encoder.encode(["012345"], ["a:1"])[0]) == 5
    assert (encoder.rows_truncated, encoder.tokens_dropped) == (1, 1)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="a:1: the prompt has no tokens"):
        PromptEncoder(TOKENIZER, 5, "left").encode([""], ["a:1"])


def test_an_unknown_truncation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"data\.truncation=top: .*error, left, right, middle"):
        PromptEncoder(TOKENIZER, 5, "top")


def test_no_text_gives_no_row() -> None:
    assert PromptEncoder(TOKENIZER, 5, "error").encode([], []) == []


def test_an_id_beyond_the_embedding_is_refused_and_the_last_one_is_not() -> None:
    last = max(TOKENIZER("the answer 9", add_special_tokens=False)["input_ids"])
    assert PromptEncoder(TOKENIZER, 20, "error", last + 1).encode(["the answer 9"], ["a:1"])
    with pytest.raises(DataError, match=rf"^a:1: the prompt has the token id {last}, but the model's embedding has {last} rows"):
        PromptEncoder(TOKENIZER, 20, "error", last).encode(["the answer 9"], ["a:1"])
