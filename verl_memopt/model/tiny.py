"""Build a tiny language model in Hugging Face format, locally and in well under a second.

It has the architecture of a real model (Qwen3 by default), a byte-level tokenizer and random weights, so a whole run can be tried
on a laptop. The default shape is the smallest that vLLM's CPU attention accepts (``head_dim`` of 32).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_memopt.model.families import CORRECTION
from verl_memopt.observe.files import written_aside
from verl_memopt.observe.own_files import mark, remove_left

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class TinyShape:
    model_type: str = "qwen3"
    """Architecture by its name in transformers: qwen3, qwen3_5_text, qwen3_5_moe_text, qwen3_moe, qwen2, llama, mistral,
    gemma3_text, gemma4_text, glm4_moe or gpt_oss."""
    vocab_size: int = 320
    """Number of rows of the embedding. The tokenizer has at most a few hundred tokens, so larger values only cost bytes."""
    hidden_size: int = 64
    """Hidden size."""
    intermediate_size: int = 128
    """Width of the MLP."""
    num_experts: int = 8
    """Number of experts in a block of a mixture. Where it has a shared expert too, this has the width ``intermediate_size``."""
    experts_per_token: int = 2
    """Number of experts that compute a token."""
    expert_size: int = 32
    """Width of the MLP of an expert, in GLM-4.5 also of the shared one."""
    num_layers: int = 2
    """Number of decoder blocks."""
    num_heads: int = 2
    """Number of query heads."""
    num_kv_heads: int = 1
    """Number of key heads, and of value heads."""
    head_dim: int = 32
    """Size of a head. vLLM on a CPU accepts 32, 64, 80, 96, 112, 128 and some larger sizes."""
    tie_embeddings: bool = True
    """Whether embedding and LM head share one matrix."""
    max_positions: int = 2048
    """Number of tokens of the longest sequence."""
    initializer_range: float = 0.02
    """Standard deviation of the random weights."""
    layer_inputs: int = 0
    """Width of the inputs that a small Gemma 4 has for each layer. 0 = none."""
    reading_layers: int = 0
    """How many of the last layers of a small Gemma 4 read the keys and values of an earlier one. Their MLPs are twice as wide."""
    experts_beside: bool = False
    """Whether the blocks of Gemma 4 have experts beside their MLPs."""
    linear_heads: tuple[int, int] | None = None
    """Key heads and value heads of the layers of Qwen3.5 that carry a state. None = as many as attention has."""
    linear_dims: tuple[int, int] | None = None
    """Sizes of these key heads and value heads. None = half of ``head_dim``, and ``head_dim``."""


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
"""Shapes of published models, for models of their size with random weights."""


def make_tiny_model(folder: str | Path, shape: TinyShape | None = None, *, seed: int = 0) -> Path:
    """Write a tiny model with random weights (fp32), its configs and its tokenizer into a folder.

    The same shape and seed give the same bytes. The folder is written under another name and then renamed, so an existing folder
    is always complete. It replaces an older tiny model.

    Raises:
        ConfigError: The folder contains other files.
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

    mixture: dict[str, Any] = {
        "n_routed_experts" if shape.model_type == "glm4_moe" else "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_size,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": shape.intermediate_size,
    }
    width = shape.intermediate_size
    if shape.model_type == "gpt_oss":
        width, mixture = shape.expert_size, {"num_experts_per_tok": shape.experts_per_token}
        mixture["num_local_experts"] = shape.num_experts
        mixture["rope_parameters"] = {
            "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": shape.max_positions // 32,
        }  # fmt: skip
    config = AutoConfig.for_model(
        shape.model_type,
        **(mixture if "_moe" in shape.model_type or shape.model_type == "gpt_oss" else {}),
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=width,
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
        **({"use_qk_norm": True, "attention_bias": True} if shape.model_type == "glm4_moe" else {}),
        **_linear_layers(shape),
        **_global_layers(shape),
    )
    # Do not change the state of the caller's random generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        # Scores of Gemma 4 have no factor. Trained models have one in these weights, and without it a softmax picks one key.
        if shape.model_type == "gemma4_text" and name.endswith("q_norm.weight"):
            weight.data.fill_(len(weight) ** -0.5)
        # The router divides its input by the root of the hidden size. So its scale is large, and no factor is 1.
        if name.endswith("router.scale"):
            weight.data.copy_(torch.linspace(0.5, 1.5, len(weight)) * len(weight) ** 0.5)
        if name.endswith("per_expert_scale"):
            weight.data.copy_(torch.linspace(0.5, 1.5, len(weight)))
    for name, buffer in model.named_buffers():
        # A router of GLM-4.5 starts without a correction, and training balances the experts with it.
        if name.endswith(CORRECTION):
            buffer.copy_(torch.linspace(-0.02, 0.02, len(buffer)))
    return model


def _linear_layers(shape: TinyShape) -> dict[str, Any]:
    # Of every four layers of Qwen3.5 the last has attention, and the others carry a state.
    if not shape.model_type.startswith("qwen3_5"):
        return {}
    every = min(4, shape.num_layers)
    kinds = ["linear_attention" if (place + 1) % every else "full_attention" for place in range(shape.num_layers)]
    keys, values = shape.linear_heads or (shape.num_kv_heads, shape.num_heads)
    key_dim, value_dim = shape.linear_dims or (shape.head_dim // 2, shape.head_dim)
    heads = {"linear_num_key_heads": keys, "linear_num_value_heads": values}
    return {"layer_types": kinds, **heads, "linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim}


def _global_layers(shape: TinyShape) -> dict[str, Any]:
    # The last layer of Gemma 4 and every second one before it attend to all tokens. Their heads are twice as wide, all query
    # heads share one key head, and their values are their keys.
    if shape.model_type != "gemma4_text":
        return {}
    kinds = ["full_attention" if (shape.num_layers - place) % 2 else "sliding_attention" for place in range(shape.num_layers)]
    return {
        "layer_types": kinds,
        "global_head_dim": 2 * shape.head_dim,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": not shape.reading_layers,
        "hidden_size_per_layer_input": shape.layer_inputs,
        "vocab_size_per_layer_input": shape.vocab_size,
        "num_kv_shared_layers": shape.reading_layers,
        "use_double_wide_mlp": bool(shape.reading_layers),
        "final_logit_softcapping": 30.0,
        "enable_moe_block": shape.experts_beside,
        "num_experts": shape.num_experts if shape.experts_beside else None,
        "top_k_experts": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_size,
    }


# A byte-level BPE tokenizer with ChatML turns, built from the text below without a download.

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIALS = (END_OF_TEXT, TURN_START, TURN_END)

SMALLEST_VOCABULARY = 256 + len(SPECIALS)
"""One token per byte value, and the special tokens, without merges."""

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


def build_tokenizer(
    vocab_size: int = 320, merge_text: str = _MERGE_TEXT, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Build a fast tokenizer of at most ``vocab_size`` tokens: 3 special tokens, 256 bytes and merges of frequent strings.

    Decoding the encoding of a text gives the same text. Each digit is a separate token. The eos token ends a turn, and the pad
    token is the end of text. The text has merges for only a few hundred tokens, so there may be fewer than ``vocab_size``.

    Raises:
        ValueError: ``vocab_size`` is too small for the bytes and the special tokens.
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
    tokenizer.train_from_iterator([merge_text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        # Pad on the left, because a generated token must directly follow the prompt.
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=chat_template,
    )
