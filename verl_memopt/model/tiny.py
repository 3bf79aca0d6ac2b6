"""A tiny language model in Hugging Face format, built locally in well under a second.

It has the architecture of a real one (Qwen3 by default), a byte-level tokenizer and random weights, so a whole run can be tried
on a laptop. The default shape is the smallest that vLLM's CPU attention accepts (``head_dim`` of 32).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_memopt.observe.files import written_aside
from verl_memopt.observe.own_files import mark, remove_left

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class TinyShape:
    model_type: str = "qwen3"
    """Architecture by its transformers name: qwen3, qwen2, llama, mistral."""
    vocab_size: int = 320
    """Rows of the embedding. The tokenizer has at most a few hundred tokens, so larger values only cost bytes."""
    hidden_size: int = 64
    """Width."""
    intermediate_size: int = 128
    """Width of the MLP."""
    num_layers: int = 2
    """Decoder blocks."""
    num_heads: int = 2
    """Query heads."""
    num_kv_heads: int = 1
    """Key and value heads."""
    head_dim: int = 32
    """Size of a head. vLLM on a CPU takes 32, 64, 80, 96, 112, 128 and more."""
    tie_embeddings: bool = True
    """One matrix for the embedding and the LM head."""
    max_positions: int = 2048
    """Longest sequence."""
    initializer_range: float = 0.02
    """Standard deviation of the random weights."""


SHAPES = {
    "qwen3-0.6b": TinyShape(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_positions=40_960,
    )
}
"""Shapes of published models, for random weights of their size."""


def make_tiny_model(folder: str | Path, shape: TinyShape | None = None, *, seed: int = 0) -> Path:
    """Write a tiny model with random weights (fp32), its configs and its tokenizer into a folder.

    The same shape and seed give the same bytes. The folder is written under another name and then renamed, so a folder that
    exists is complete. An older tiny model is replaced.

    Raises:
        ConfigError: Something else is in the folder.
    """
    shape = TinyShape() if shape is None else shape
    folder = Path(folder)
    with written_aside(folder) as aside:
        remove_left(aside)
        aside.mkdir(parents=True)
        mark(aside)
        tokenizer = build_tokenizer(min(shape.vocab_size, 320))
        _random_model(shape, tokenizer, seed).save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        remove_left(folder)
    return folder


def _random_model(shape: TinyShape, tokenizer: Any, seed: int) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        shape.model_type,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=shape.max_positions,
        initializer_range=shape.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # The caller's random numbers go on as if no model had been made.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


# A byte-level BPE tokenizer with ChatML turns, built from inline text without a download.

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

    Raises:
        ValueError: ``vocab_size`` is too small for bytes and specials.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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
        # As generation needs it: the next token follows the prompt's last.
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )
