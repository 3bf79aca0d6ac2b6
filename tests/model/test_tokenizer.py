"""The byte-level tokenizer made offline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.model.tiny import SPECIALS, TURN_END, TURN_START, build_tokenizer

TOKENIZER = build_tokenizer()


@given(st.text())
def test_every_text_survives_a_round_trip(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(st.text(alphabet="0123456789+= ", min_size=1))
def test_each_digit_is_a_token_of_its_own(text):
    tokens = TOKENIZER.tokenize(text)
    assert [t for t in tokens if any(c.isdigit() for c in t)] == [c for c in text if c.isdigit()]


def test_a_turn_is_rendered_as_chatml_and_its_markers_are_single_tokens():
    turn = [{"role": "user", "content": "7+5"}]
    text = TOKENIZER.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n7+5<|im_end|>\n<|im_start|>assistant\n"
    tokens = TOKENIZER.tokenize(text)
    assert tokens.count(TURN_START) == 2
    assert tokens.count(TURN_END) == 1


def test_a_generation_ends_with_the_turn_and_padding_is_another_token():
    assert TOKENIZER.eos_token == TURN_END
    assert TOKENIZER.pad_token not in (TURN_END, TURN_START)
    assert TOKENIZER.padding_side == "left"


def test_a_vocabulary_without_room_for_all_bytes_is_refused():
    assert len(build_tokenizer(256 + len(SPECIALS))) == 259
    with pytest.raises(ValueError, match="259"):
        build_tokenizer(258)
