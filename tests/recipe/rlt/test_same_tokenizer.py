"""A student that reads other tokens is refused."""

import pytest
from tokenizers import normalizers, pre_tokenizers

from tests.recipe.rlt.tokens import with_merges
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import build_tokenizer
from verl_memopt.recipes.rlt.student import check_same_tokenizer


def changed(change):
    tokenizer = with_merges((b"a", b"b"), (b"c", b"d"))
    change(tokenizer)
    return tokenizer


def test_a_copy_from_another_folder_is_the_same(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    other = type(tokenizer).from_pretrained(tmp_path)
    other.chat_template = "another"
    other.padding_side = "right"
    check_same_tokenizer(tokenizer, other, "student")


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        (with_merges((b"c", b"d"), (b"a", b"b")), "vocabulary, merges, added|vocabulary, merges"),
        (with_merges((b"a", b"b")), "vocabulary, merges"),
        (changed(lambda tokenizer: tokenizer.add_tokens(["</think>"])), "added tokens"),
        (changed(lambda tokenizer: setattr(tokenizer.backend_tokenizer, "normalizer", normalizers.NFC())), "normalizer"),
        (
            changed(lambda tokenizer: setattr(tokenizer.backend_tokenizer, "pre_tokenizer", pre_tokenizers.Digits(True))),
            "pre-tokenizer",
        ),
    ],
)
def test_a_tokenizer_that_differs_is_refused_by_what_differs(other, parts):
    with pytest.raises(ConfigError, match=rf"^the student folder/s: its tokenizer differs from the policy's in (?:{parts})[., ]"):
        check_same_tokenizer(with_merges((b"a", b"b"), (b"c", b"d")), other, "folder/s")
