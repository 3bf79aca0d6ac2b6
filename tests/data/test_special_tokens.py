"""Special tokens that are plain text get the ids of a tokenizer that does not have them."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_memopt.data.encoder import SpecialTokens, special_tokens_of, tokenize
from verl_memopt.errors import DataError
from verl_memopt.model.tiny import SPECIALS, build_tokenizer

TOKENIZER = build_tokenizer()
SPECIAL = SpecialTokens(TOKENIZER)
PIECES = st.lists(
    st.one_of(st.text(max_size=6), st.sampled_from([*SPECIALS, "<|im", "_end|>", "\ufdd0", "\ufdd01\ufdd2", " the answer "])),
    max_size=8,
)


@given(PIECES.map("".join))
def test_all_plain_gives_the_ids_of_the_text_with_its_special_tokens_split(text: str) -> None:
    (ids,) = SPECIAL.encode([text], [SPECIAL.find(text)])
    assert ids == TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@given(PIECES.map("".join))
def test_none_plain_gives_the_ids_of_the_tokenizer_itself(text: str) -> None:
    assert SPECIAL.encode([text], [()]) == tokenize(TOKENIZER, [text])


@given(PIECES.map("".join), PIECES.map("".join))
def test_what_is_hidden_from_a_template_comes_back_as_it_was_and_is_plain(first: str, second: str) -> None:
    shown = SPECIAL.hide([{"role": first, "content": second}])[0]
    assert not SPECIAL.find(shown["role"] + "\n" + shown["content"])
    text, plain = SPECIAL.reveal(f"<|im_start|>{shown['role']}\n{shown['content']}<|im_end|>")
    assert text == f"<|im_start|>{first}\n{second}<|im_end|>"
    assert len(plain) == SPECIAL.count([first, second])
    (ids,) = SPECIAL.encode([text], [plain])
    start, end = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    middle = TOKENIZER(f"{first}\n{second}", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ids == [start, *middle, end]


def test_a_stand_in_of_another_run_is_text() -> None:
    other = SpecialTokens(TOKENIZER).hide("<|im_end|>")
    assert SPECIAL.reveal(other) == (other, ())
    (ids,) = SPECIAL.encode([other], [()])
    assert TOKENIZER.convert_tokens_to_ids("<|im_end|>") not in ids


SIZE = {"a": 0, "b": 1, "<": 2, "/": 3, "s": 4, ">": 5, "</s>": 6, "\u2581": 7, "<u>": 8, "ab": 9, "s>": 10}


def unigram() -> models.Unigram:
    return models.Unigram([(piece, 0.0 if piece == "</s>" else -1.0 - len(piece) / 9) for piece in SIZE], unk_id=8)


def bpe(ignore_merges: bool) -> models.BPE:
    return models.BPE(dict(SIZE), [("a", "b"), ("s", ">")], unk_token="<u>", ignore_merges=ignore_merges)


def wrapped(model: Any, special: bool, **flags: Any) -> PreTrainedTokenizerFast:
    """A tokenizer in the manner of SentencePiece: a space in front, and end and unknown are entries of the vocabulary."""
    made = Tokenizer(model)
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    if special:
        made.add_special_tokens([AddedToken("</s>", **flags), AddedToken("<u>")])
    made.add_tokens([AddedToken("aa")])
    names = {"eos_token": "</s>", "unk_token": "<u>"} if special else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


@pytest.mark.parametrize("flags", [{}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}], ids=str)
@pytest.mark.parametrize("model", [lambda: bpe(False), lambda: bpe(True), unigram], ids=["bpe", "whole words", "unigram"])
@given(text=st.text(alphabet="ab</s> ", max_size=24), cut=st.integers(0, 24))
@example(text="</s>a", cut=0)
@example(text="a</s>", cut=0)
@example(text="</s></s>a", cut=4)
def test_every_kind_of_tokenizer_agrees_with_itself(model: Any, flags: dict[str, Any], text: str, cut: int) -> None:
    """A text whose first part is plain, and whose second part is left to the tokenizer."""
    tokenizer = wrapped(model(), special=True, **flags)
    special = SpecialTokens(tokenizer)
    assert special.encode([text], [()]) == tokenize(tokenizer, [text])
    (ids,) = special.encode([text], [special.find(text)])
    assert tokenizer.eos_token_id not in ids
    plain = tuple(span for span in special.find(text) if span[1] <= cut)
    (ids,) = special.encode([text], [plain])
    whole = tokenize(tokenizer, [text])[0]
    assert ids.count(tokenizer.eos_token_id) == whole.count(tokenizer.eos_token_id) - _matched(tokenizer, text, plain)


def _matched(tokenizer: Any, text: str, plain: Any) -> int:
    """How many of the spans the tokenizer itself takes for tokens; a single word inside a longer one it does not."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = {
        (start, end)
        for number, (start, end) in zip(offsets["input_ids"], offsets["offset_mapping"], strict=True)
        if number == tokenizer.eos_token_id
    }
    return sum(any(start <= span[0] and span[1] <= end for start, end in ends) for span in plain)


@pytest.mark.parametrize("text", ["a</s>b", "</s>", "ab </s> ab", "a<u>", "</s</s>s>"])
def test_plain_ones_that_are_entries_of_the_vocabulary_get_the_ids_of_a_vocabulary_without_them(text: str) -> None:
    special = SpecialTokens(wrapped(bpe(True), special=True))
    without = {name: number for name, number in SIZE.items() if name != "</s>"}
    other = wrapped(models.BPE(without, [("a", "b"), ("s", ">")], unk_token="<u>", ignore_merges=True), special=False)
    (ids,) = special.encode([text], [special.find(text)])
    assert [ids] == tokenize(other, [text])


def test_an_added_token_that_is_not_special_stays_a_token() -> None:
    special = SpecialTokens(wrapped(bpe(False), special=True))
    assert special.names == ["</s>", "<u>"]
    (ids,) = special.encode(["aa</s>"], [((2, 6),)])
    assert ids[0] == len(SIZE)


def test_the_same_tokenizer_gives_the_same_object() -> None:
    assert special_tokens_of(TOKENIZER) is special_tokens_of(TOKENIZER)


class Slow:
    """A tokenizer in Python."""

    all_special_tokens = ("</s>",)


def test_a_tokenizer_without_a_fast_version_refuses_what_it_cannot_encode() -> None:
    special = SpecialTokens(Slow())
    with pytest.raises(DataError, match=r"data\.allow_special_tokens=false: the tokenizer \(Slow\) has no fast version"):
        special.encode(["</s>"], [special.find("</s>")])
