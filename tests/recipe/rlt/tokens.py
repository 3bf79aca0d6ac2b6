"""Tokenizers whose merges a test chooses, and responses written as pieces of tokens."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from verl_memopt.model.tiny import CHAT_TEMPLATE, SPECIALS, TURN_END

CHARACTER_OF = bytes_to_unicode()


def as_token(raw):
    return "".join(CHARACTER_OF[byte] for byte in raw)


def with_merges(*merges):
    """Build a tokenizer of single bytes and of the given merges, pairs of byte strings that may cross any border."""
    pairs = [(as_token(left), as_token(right)) for left, right in merges]
    names = [*(CHARACTER_OF[byte] for byte in range(256)), *("".join(pair) for pair in pairs)]
    tokenizer = Tokenizer(models.BPE({name: place for place, name in enumerate(dict.fromkeys(names))}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=SPECIALS[0],
        additional_special_tokens=[SPECIALS[1]],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def ids(tokenizer, *pieces):
    """Return the tokens of a response. A byte string is one token; a text is tokenized."""
    tokens = []
    for piece in pieces:
        if isinstance(piece, bytes):
            tokens.append(tokenizer.convert_tokens_to_ids(as_token(piece)))
        else:
            tokens += tokenizer(piece, add_special_tokens=False)["input_ids"]
    assert None not in tokens
    return tokens
