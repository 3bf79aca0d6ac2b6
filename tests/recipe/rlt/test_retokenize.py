"""One text tokenized again, cut at the borders of its parts."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from tests.recipe.rlt.naive import token_text
from tests.recipe.rlt.tokens import with_merges
from verl_memopt.recipes.rlt.student_rows import TokenBytes, retokenized_parts

TOKENIZER = with_merges((b"a", b"b"), (b"ab", b"a"), (b"b", b"b"), (b"\xa9", b"a"))
BYTES = TokenBytes(TOKENIZER)
NO_SPANS = ((), (), (), (), ())
TEXT = st.text("ab\u00e9", max_size=5)


def spelled(tokenizer, ids):
    return b"".join(token_text(tokenizer, token) for token in ids)


@given(st.tuples(TEXT, TEXT, TEXT, TEXT, TEXT))
def test_sections_hold_the_tokens_that_lie_wholly_in_them(texts):
    parts = retokenized_parts(TOKENIZER, BYTES, texts, NO_SPANS)
    ids = [token for part in parts for token in part]
    assert ids == TOKENIZER("".join(texts), add_special_tokens=False)["input_ids"]
    borders = [len("".join(texts[:place]).encode()) for place in range(6)]
    end, expected = 0, [[], []]
    for token in ids:
        start, end = end, end + len(token_text(TOKENIZER, token))
        for section, (first, last) in zip(expected, (borders[1:3], borders[3:5]), strict=True):
            if first <= start and end <= last:
                section.append(token)
    assert [parts[1], parts[3]] == expected


def test_special_tokens_are_text_where_the_spans_say_so():
    name = "<|im_end|>"
    parts = retokenized_parts(TOKENIZER, BYTES, (name, "a", name, name, name), ((), (), (), ((0, len(name)),), ()))
    end = TOKENIZER.eos_token_id
    assert [part.count(end) for part in parts] == [1, 0, 1, 0, 1]
    assert spelled(TOKENIZER, parts[3]) == name.encode()


def test_borders_follow_the_normal_form_of_the_tokenizer():
    tokenizer = with_merges()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    parts = retokenized_parts(tokenizer, TokenBytes(tokenizer), ("x", "e\u0301", "y", "e\u0301s", "z"), NO_SPANS)
    assert [spelled(tokenizer, part).decode() for part in parts] == ["x", "\u00e9", "y", "\u00e9s", "z"]
