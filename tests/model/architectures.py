from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from verl_memopt.model.families import is_uneven

SIZES = {
    512: ("max_position_embeddings", "n_positions"),
    320: ("vocab_size",),
    128: ("intermediate_size", "ffn_dim", "mamba_d_ssm"),
    64: ("hidden_size", "n_embd", "d_model", "lru_width"),
    32: ("head_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "mamba_d_head"),
    16: (
        *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        *("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "state_size"),
    ),
    4: (
        *("num_hidden_layers", "num_attention_heads", "n_layer", "n_head", "n_layers", "num_layers"),
        *("num_experts", "num_local_experts", "n_routed_experts", "linear_num_value_heads", "mamba_n_heads"),
    ),
    3: ("conv_L_cache",),
    2: ("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads", "mamba_expand", "eos_token_id"),
    1: ("first_k_dense_replace", "n_group", "topk_group", "mamba_n_groups", "bos_token_id"),
    0: ("pad_token_id",),
}
SMALL: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names} | {"block_auto_adjust_ff_dim": False}
"""Every field that some config has; each type takes those it knows."""


GEMMA_4 = {
    "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 0.8, "num_experts": None,
}  # fmt: skip
SMALL_GEMMA_4 = GEMMA_4 | {
    "attention_k_eq_v": False, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
OF_TEXT: dict[str, dict[str, Any]] = {"gemma4_text": GEMMA_4, "gemma4": SMALL_GEMMA_4}
NO_LAYER_INPUTS = {name: value for name, value in GEMMA_4.items() if name not in ("hidden_size_per_layer_input", "num_experts")}
OF_TEXT |= dict.fromkeys(("gemma4_unified", "gemma4_unified_text"), NO_LAYER_INPUTS)
"""Fields of the text part of some types. Not all of these are fields of a config that was made."""


def tiny_config(model_type, **more):
    """Return a small config of a model type; for a multimodal type, one with a small text part."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    text = default.get_text_config()
    text.allow_global_per_layer_attribute_access = True  # else a config with a size for each layer has none to ask for
    fields = {name: value for name, value in (SMALL | more).items() if hasattr(text, name)} | OF_TEXT.get(model_type, {})
    if text is default:
        return kind(**fields)
    outer = {name: value for name, value in more.items() if hasattr(default, name)}
    return kind(text_config=type(text)(**fields).to_dict(), **VISION.get(model_type, {}), **outer)


_QWEN_EYES = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
}
VISION: dict[str, Any] = {
    "gemma3": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
        },
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 8,
        },
        "audio_config": {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": [4, 4],
            "output_proj_dims": 32,
        },
    },
    "gemma4_unified": {
        "vision_config": {"mm_embed_dim": 64, "mm_posemb_size": 8, "output_proj_dims": 64, "patch_size": 4},
        "audio_config": {"audio_embed_dim": 32},
    },
    "qwen3_5": {"vision_config": _QWEN_EYES},
    "qwen3_5_moe": {"vision_config": _QWEN_EYES},
    "qwen3_vl": {"vision_config": {**_QWEN_EYES, "deepstack_visual_indexes": [0, 1]}},
    "qwen3_vl_moe": {"vision_config": {**_QWEN_EYES, "deepstack_visual_indexes": [0, 1]}},
}  # fmt: skip
"""Small parts for images, for the multimodal types of which a whole model is built."""


def tiny_folder(at, model_type, deviation=0.06, **more):
    """Return a folder with a random model of a type. ``deviation`` is the standard deviation of its weights."""
    config = tiny_config(model_type, **more)
    multimodal = config.get_text_config() is not config
    # Its other parts or its layers are large, or it is no decoder alone: the config is all that is read of it.
    if (multimodal and model_type not in VISION) or is_uneven(config) or config.is_encoder_decoder:
        config.save_pretrained(at)
        return at
    kind = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # Filters as small as these would make queries and keys so short that rounding decides.
            if parameter.dim() >= 2 and "conv1d" not in name:
                parameter.data.normal_(0, deviation)
            elif model_type.startswith("gemma4") and name.endswith("q_norm.weight"):  # else a softmax picks one key
                parameter.data.fill_(len(parameter) ** -0.5)
            elif name.endswith(("router.scale", "per_expert_scale")):  # else all experts of a token would weigh the same
                parameter.data.copy_(torch.linspace(0.5, 1.5, len(parameter)) * (8 if "per_expert" not in name else 1))
            elif model_type.startswith("qwen3_5"):  # its vectors do more than norms, and start at values that hide mistakes
                parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # else it would shift no choice
                buffer.normal_(0, 0.05)
    model.save_pretrained(at)
    return at


def whole_model(folder, **options):
    """Load a folder with transformers: all parts of a multimodal model, or a causal language model."""
    kind = AutoConfig.from_pretrained(folder)
    auto = AutoModelForCausalLM if kind.get_text_config() is kind else AutoModelForImageTextToText
    return auto.from_pretrained(folder, dtype=torch.float32, **options).eval()


def text_name(name):
    """Name of a weight of a loaded model in its text part."""
    return name.replace("model.language_model.", "model.")
