import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from verl_memopt.data.encoder import PromptEncoder, SpecialTokens, special_tokens_of, tokenize
from verl_memopt.errors import DataError
from verl_memopt.model.tiny import SPECIALS, build_tokenizer

TOKENIZER = build_tokenizer()


def digits(ids):
    return TOKENIZER.decode(ids)


def test_special_tokens_in_a_text_stay_and_none_is_added(tokenizer):
    text = "<|im_start|>user\n1<|im_end|>"
    (ids,) = PromptEncoder(tokenizer, 100, "error").encode([text], ["a:1"])
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize(("truncation", "kept"), [("left", "56789"), ("right", "01234"), ("middle", "01789")])
def test_truncation_loses_the_side_that_it_names_counts_what_is_lost_and_warns_once(truncation, kept, caplog):
    encoder = PromptEncoder(TOKENIZER, 5, truncation)
    rows = encoder.encode(["123", "0123456789", "01234567"], ["a:1", "a:2", "a:3"])
    assert [digits(ids) for ids in rows[:2]] == ["123", kept]
    assert [len(ids) for ids in rows] == [3, 5, 5]
    assert (encoder.rows_truncated, encoder.tokens_dropped) == (2, 5 + 3)
    (warning,) = caplog.messages
    assert warning.startswith(f"data.truncation={truncation}: a:2 has 10 tokens and keeps 5 (data.max_prompt_length).")


@given(
    st.lists(st.text(alphabet="0123456789", min_size=1, max_size=30), max_size=5),
    st.integers(1, 20),
    st.sampled_from(["left", "right", "middle"]),
)
def test_kept_and_dropped_tokens_add_up(texts, limit, truncation):
    encoder = PromptEncoder(TOKENIZER, limit, truncation)
    rows = encoder.encode(texts, ["a:1"] * len(texts))
    assert all(len(ids) <= limit for ids in rows)
    assert sum(map(len, rows)) + encoder.tokens_dropped == sum(map(len, texts))


def test_ids_fit_as_texts_do():
    encoder = PromptEncoder(TOKENIZER, 5, "right", embedding_rows=100)
    assert encoder.fit([1, 2, 3, 4, 5, 6], "a:1") == [1, 2, 3, 4, 5]
    assert encoder.fit([1, 2, 3, 4, 5, 6], "a:1", counted=False) == [1, 2, 3, 4, 5]
    assert (encoder.rows_truncated, encoder.tokens_dropped) == (1, 1)
    encoder.encode(["0123456789"] * 3 + ["01"] * 3, ["a:1"] * 6, copies=3)
    assert (encoder.rows_truncated, encoder.tokens_dropped) == (2, 6), "copies of a prompt count once"
    assert encoder.fit([99], "a:2") == [99]
    with pytest.raises(DataError, match=r"^a:2: the prompt has the token id 100, but the model's embedding has 100 rows"):
        encoder.fit([100], "a:2")


def test_error_refuses_a_prompt_over_the_limit_with_its_row_and_length():
    encoder = PromptEncoder(TOKENIZER, 5, "error")
    assert digits(encoder.encode(["01234"], ["a:1"])[0]) == "01234"
    with pytest.raises(DataError, match=r"^a:2: the prompt has 6 tokens, but data\.max_prompt_length is 5"):
        encoder.encode(["0", "012345"], ["a:1", "a:2"])


def test_a_prompt_of_the_limit_is_left_whole_one_token_more_is_cut_and_an_empty_one_refused():
    for truncation in ("left", "right", "middle"):
        encoder = PromptEncoder(TOKENIZER, 5, truncation)
        assert [len(ids) for ids in encoder.encode(["01234", "012345"], ["a:1", "a:2"])] == [5, 5]
        assert (encoder.rows_truncated, encoder.tokens_dropped) == (1, 1)
    assert encoder.encode([], []) == []
    with pytest.raises(DataError, match="a:1: the prompt has no tokens"):
        encoder.encode([""], ["a:1"])


SPECIAL = SpecialTokens(TOKENIZER)
PIECES = st.lists(
    st.one_of(st.text(max_size=6), st.sampled_from([*SPECIALS, "<|im", "_end|>", "\ufdd0", "\ufdd01\ufdd2", " the answer "])),
    max_size=8,
)


@given(PIECES.map("".join))
def test_all_plain_gives_the_ids_of_the_text_with_its_special_tokens_split(text):
    (ids,) = SPECIAL.encode([text], [SPECIAL.find(text)])
    assert ids == TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@given(PIECES.map("".join))
def test_none_plain_gives_the_ids_of_the_tokenizer_itself(text):
    assert SPECIAL.encode([text], [()]) == tokenize(TOKENIZER, [text])


@given(PIECES.map("".join), PIECES.map("".join))
def test_what_is_hidden_from_a_template_comes_back_as_it_was_and_is_plain(first, second):
    shown = SPECIAL.hide([{"role": first, "content": second}])[0]
    assert not SPECIAL.find(shown["role"] + "\n" + shown["content"])
    text, plain = SPECIAL.reveal(f"<|im_start|>{shown['role']}\n{shown['content']}<|im_end|>")
    assert text == f"<|im_start|>{first}\n{second}<|im_end|>"
    assert len(plain) == SPECIAL.count([first, second])
    (ids,) = SPECIAL.encode([text], [plain])
    start, end = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    middle = TOKENIZER(f"{first}\n{second}", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ids == [start, *middle, end]


def test_a_stand_in_of_another_run_is_text():
    other = SpecialTokens(TOKENIZER).hide("<|im_end|>")
    assert SPECIAL.reveal(other) == (other, ())
    (ids,) = SPECIAL.encode([other], [()])
    assert TOKENIZER.convert_tokens_to_ids("<|im_end|>") not in ids


SIZE = {"a": 0, "b": 1, "<": 2, "/": 3, "s": 4, ">": 5, "</s>": 6, "\u2581": 7, "<u>": 8, "ab": 9, "s>": 10}


def unigram():
    return models.Unigram([(piece, 0.0 if piece == "</s>" else -1.0 - len(piece) / 9) for piece in SIZE], unk_id=8)


def bpe(ignore_merges):
    return models.BPE(dict(SIZE), [("a", "b"), ("s", ">")], unk_token="<u>", ignore_merges=ignore_merges)


def wrapped(model, special, **flags):
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
def test_every_kind_of_tokenizer_agrees_with_itself(model, flags, text, cut):
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


def _matched(tokenizer, text, plain):
    """How many of the spans the tokenizer itself takes for tokens; a single word inside a longer one it does not."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = {
        (start, end)
        for number, (start, end) in zip(offsets["input_ids"], offsets["offset_mapping"], strict=True)
        if number == tokenizer.eos_token_id
    }
    return sum(any(start <= span[0] and span[1] <= end for start, end in ends) for span in plain)


@pytest.mark.parametrize("text", ["a</s>b", "</s>", "ab </s> ab", "a<u>", "</s</s>s>"])
def test_plain_ones_that_are_entries_of_the_vocabulary_get_the_ids_of_a_vocabulary_without_them(text):
    special = SpecialTokens(wrapped(bpe(True), special=True))
    without = {name: number for name, number in SIZE.items() if name != "</s>"}
    other = wrapped(models.BPE(without, [("a", "b"), ("s", ">")], unk_token="<u>", ignore_merges=True), special=False)
    (ids,) = special.encode([text], [special.find(text)])
    assert [ids] == tokenize(other, [text])


@pytest.mark.parametrize("special", ["4", "5", "="])
def test_a_special_token_that_is_a_character_of_the_vocabulary_is_not_lost_from_plain_text(special):
    alphabet = {character: number for number, character in enumerate("0123456789+=")}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.add_special_tokens(["<s>", special, "</s>"])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 12)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=special, bos_token="<s>", eos_token="</s>")
    text, numbers = "24+5=</s>", [alphabet[character] for character in "24+5="]
    plain = special_tokens_of(tokenizer).find(text)[:1]
    assert tokenize(tokenizer, [text], [plain]) == [[*numbers, 13]]
    assert tokenize(tokenizer, [text], [plain], whole=True) == [[12, *numbers, 13]]


def test_an_added_token_that_is_not_special_stays_a_token():
    special = SpecialTokens(wrapped(bpe(False), special=True))
    assert special.names == ["</s>", "<u>"]
    (ids,) = special.encode(["aa</s>"], [((2, 6),)])
    assert ids[0] == len(SIZE)


class Slow:
    """A tokenizer in Python."""

    all_special_tokens = ("</s>",)


def test_a_tokenizer_without_a_fast_version_refuses_what_it_cannot_encode():
    special = SpecialTokens(Slow())
    with pytest.raises(DataError, match=r"data\.allow_special_tokens=false: the tokenizer \(Slow\) has no fast version"):
        special.encode(["</s>"], [special.find("</s>")])
