from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "d_model": 64,
    "n_layers": 4,
    "num_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "state_size": 16,
    "ffn_dim": 128,
    "lru_width": 64,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
}
"""Every field that some config has; each type takes those it knows."""


def tiny_config(model_type, **more):
    """Gives a small config of a type; of a multimodal one a config whose text part is small."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    text = default.get_text_config()
    text.allow_global_per_layer_attribute_access = True  # else a config with a size for each layer has none to ask for
    fields = {name: value for name, value in (SMALL | more).items() if hasattr(text, name)}
    return kind(**fields) if text is default else kind(text_config=type(text)(**fields).to_dict())


def tiny_folder(at, model_type, deviation=0.06, **more):
    """Gives a folder with a random model of a type; ``deviation`` is that of its weights."""
    config = tiny_config(model_type, **more)
    # Its other parts or its layers are large: the config is all that is read of it.
    if config.get_text_config() is not config or config.is_heterogeneous:
        config.save_pretrained(at)
        return at
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.data.normal_(0, deviation)
    model.save_pretrained(at)
    return at
