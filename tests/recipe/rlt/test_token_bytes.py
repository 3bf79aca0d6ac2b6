"""The bytes of tokens against decoding and against the text itself."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.recipe.rlt.naive import token_text
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import SPECIALS, build_tokenizer
from verl_memopt.recipes.rlt.student_rows import TokenBytes

TOKENIZER = build_tokenizer()
BYTES = TokenBytes(TOKENIZER)


@given(st.lists(st.one_of(st.text(max_size=8), st.sampled_from([*SPECIALS, " the answer"])), max_size=6).map("".join))
def test_a_text_is_the_bytes_of_its_tokens(text):
    ids = torch.tensor(TOKENIZER(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
    assert BYTES.spell(ids) == text.encode()


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=12))
def test_any_tokens_are_spelled_one_by_one_and_end_where_their_bytes_end(ids):
    texts = [token_text(TOKENIZER, token) for token in ids]
    assert BYTES.spell(np.array(ids, dtype=np.int64)) == b"".join(texts)
    assert BYTES.ends(np.array(ids, dtype=np.int64)).tolist() == [len(b"".join(texts[: n + 1])) for n in range(len(ids))]


def test_ids_that_the_tokenizer_lacks_have_no_bytes():
    a, missing = TOKENIZER.convert_tokens_to_ids("a"), len(TOKENIZER)
    ids = torch.tensor([a, missing, missing + 1000, -2, a])
    assert BYTES.spell(ids) == b"aa"
    assert BYTES.ends(ids).tolist() == [1, 1, 1, 1, 2]


def test_added_tokens_that_are_not_special_are_spelled_as_they_are():
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["</think>", "\u00e9\u00e9"])
    ids = torch.tensor(tokenizer("x</think>\u00e9\u00e9", add_special_tokens=False)["input_ids"])
    assert len(ids) == 3
    assert TokenBytes(tokenizer).spell(ids) == "x</think>\u00e9\u00e9".encode()


def test_a_tokenizer_that_is_not_byte_level_is_refused():
    word_level = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    sentencepiece = Tokenizer(models.BPE({"\u2581": 0, "a": 1}, []))
    sentencepiece.decoder = decoders.Metaspace()
    lossy = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    lossy.decoder = decoders.ByteLevel()
    for tokenizer in (word_level, sentencepiece, lossy):
        with pytest.raises(ConfigError, match=r"the tokenizer \(\w+\) is not byte-level"):
            TokenBytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
