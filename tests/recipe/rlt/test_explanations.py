"""Where the explanation ends, in token space."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.recipe.rlt.naive import explanation_of, token_text
from tests.recipe.rlt.tokens import ids, with_merges
from verl_memopt.data.batch import Ragged
from verl_memopt.recipes.rlt.student_rows import TokenBytes, locate_explanations

END = "</explanation>"
TOKENIZER = with_merges((b"!", b"<"), (b"\xa9", b"<"), (b">", b"\n"), (b"o", b"n"), (b"on", b">"))
BYTES = TokenBytes(TOKENIZER)
STOP = {TOKENIZER.eos_token_id, TOKENIZER.pad_token_id}


def locate(*rows):
    return locate_explanations(Ragged.from_rows([ids(TOKENIZER, *row) for row in rows], torch.int64), BYTES, END, STOP)


def one(*row):
    """Returns K as text, whether there is an end tag, and whether text follows it."""
    located = locate(row)
    kept = ids(TOKENIZER, *row)[: int(located.lengths[0])]
    spelled = b"".join(token_text(TOKENIZER, token) for token in kept)
    return spelled, bool(located.matched[0]), bool(located.has_text_after[0])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (["why", END, "<|im_end|>"], (b"why", True, False)),
        (["why", END], (b"why", True, False)),
        (["why", END, "\n \n<|im_end|>"], (b"why", True, False)),
        (["why", END, " more ", END, "<|im_end|>"], (b"why", True, True)),
        (["why", "<|im_end|>"], (b"why", False, False)),
        (["why"], (b"why", False, False)),
        (["why", "<|endoftext|>", "<|endoftext|>"], (b"why", False, False)),
        ([END, "<|im_end|>"], (b"", True, False)),
        (["<|im_end|>"], (b"", False, False)),
        ([], (b"", False, False)),
        (["a<explanation>b", END], (b"a<explanation>b", True, False)),
        (["<explanation><explanation>", END, END], (b"<explanation><explanation>", True, True)),
        (["</explanatio", END], (b"</explanatio", True, False)),
        (["why<|im_end|>", END], (b"why", False, False)),
        (["why<|im_start|>x", END], (b"why<|im_start|>x", True, False)),
    ],
    ids=str,
)
def test_the_first_end_tag_before_the_end_of_the_response_decides(row, expected):
    assert one(*row) == expected


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (["why", b"!<", "/explanation>"], b"why"),
        ([b"!<", "/explanation>"], b""),
        (["wh!<y", END], b"wh!<y"),
        (["why", "</explanati", b"on>", "x"], b"why"),
        (["why", "</explanation", b">\n", "x"], b"why"),
    ],
    ids=str,
)
def test_a_token_that_reaches_into_the_tag_is_not_part_of_the_explanation(row, kept):
    assert one(*row)[:2] == (kept, True)


def test_a_character_of_two_bytes_may_end_inside_the_straddling_token():
    spelled, matched, _ = one("caf", b"\xc3", b"\xa9<", "/explanation>")
    assert (spelled, matched) == (b"caf\xc3", True)
    assert locate(["caf", b"\xc3", b"\xa9<", "/explanation>"]).texts == ("caf\u00e9".encode(),)
    assert one("caf\u00e9", END)[:2] == ("caf\u00e9".encode(), True)


def test_rows_are_located_each_for_itself_and_there_may_be_none():
    located = locate(["a", END], [], ["bcd"], [END, "x"])
    assert located.lengths.tolist() == [1, 0, 3, 0]
    assert located.matched.tolist() == [True, False, False, True]
    assert located.has_text_after.tolist() == [False, False, False, True]
    assert located.texts == (b"a", b"", b"bcd", b"")
    assert locate().lengths.tolist() == []


PIECES = st.one_of(
    st.text(max_size=3),
    st.sampled_from([END, "</explan", "ation>", "<|im_end|>", "<explanation>", b"!<", b"\xa9<", b"on>", b"\xc3"]),
)


@given(st.lists(st.lists(PIECES, max_size=6), max_size=4))
def test_the_naive_reference_agrees_token_by_token(rows):
    located = locate(*rows)
    for row, length, matched in zip(rows, located.lengths.tolist(), located.matched.tolist(), strict=True):
        tokens = ids(TOKENIZER, *row)
        assert (tokens[:length], matched) == explanation_of(TOKENIZER, tokens, END, STOP)
