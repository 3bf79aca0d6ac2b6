"""A byte-level BPE tokenizer with ChatML turns, built from inline text without a download."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIALS = (END_OF_TEXT, TURN_START, TURN_END)

SMALLEST_VOCABULARY = 256 + len(SPECIALS)
"""All bytes and the special tokens, no merge."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)

_MERGE_TEXT = """
user user user user user user user user system system system
assistant assistant assistant assistant assistant assistant assistant assistant
the answer is the sum of the two numbers and the question asks for the answer
a small model reads the question and then the model writes the answer to the user
what is the result, think and then answer, the user asks and the assistant answers
"""


def build_tokenizer(vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """Build a fast tokenizer of at most ``vocab_size`` tokens: 3 specials, 256 bytes, merges of short English words.

    Every text round-trips. Each digit is a token of its own, eos is the end of a turn and pad the end of text. The merges are
    used up at a few hundred tokens, so the tokenizer may have fewer than ``vocab_size``.

    Args:
        vocab_size: Size of the vocabulary, at least ``SMALLEST_VOCABULARY``.

    Raises:
        ValueError: ``vocab_size`` is smaller.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"vocab_size={vocab_size}: a byte-level tokenizer needs {SMALLEST_VOCABULARY} or more.")
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_MERGE_TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )
