"""Which architectures can be trained, as far as the config and the model without weights say."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from verl_memopt.errors import ConfigError

TESTED = (
    *("arcee", "bitnet", "cwm", "diffllama", "ernie4_5", "exaone4", "glm", "glm4", "granite", "hunyuan_v1_dense"),
    *("hyperclovax", "jais2", "jetmoe", "llama", "ministral", "ministral3", "mistral", "olmo", "olmo2", "olmo3", "persimmon"),
    *("phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2"),
)
"""Model types whose packed log-probs a test compares with those of transformers' own forward."""

PACKED_LAYERS = ("full_attention", "sliding_attention")
"""Names in ``layer_types`` of layers that packed attention computes."""

LOGIT_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Config fields of models whose logits are more than a product with the head's weight."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""Config fields that count the experts of a layer."""

LENGTH_DEPENDENT_ROTARY = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies change when the longest sequence of a forward passes the trained length."""


LARGEST_SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), 2**31 - 1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 2**16),
    "num_hidden_layers": 10_000,
}
"""Config fields that are sizes, and the largest plausible value. A model beyond it could not even be built."""


def impossible_size(config: PretrainedConfig) -> tuple[str, str] | None:
    """Return the first field of a config with an impossible size, and what is wrong with it; None if all are possible."""
    for name, most in LARGEST_SIZES.items():
        value = getattr(config, name, None)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not isinstance(value, list | tuple) and not (whole and 1 <= value <= most):
            return name, f"it must be a whole number from 1 to {most}"
    heads, shared = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        return "num_key_value_heads", f"it must divide num_attention_heads={heads}"
    return None


POLICY_KEY = "actor_rollout_ref.model"
"""The settings section of the policy's model. The critic's is ``critic.model``."""


def refused(config: PretrainedConfig, source: str, reason: str, key: str = POLICY_KEY) -> ConfigError:
    """Return the error for a model that cannot be trained.

    Args:
        config: Config of the model.
        source: The folder it was read from.
        reason: Continues "models of type X ...".
        key: The settings section of the model.
    """
    return ConfigError(
        f"{key}.path={source}: models of type {config.model_type} {reason}. Types that are tested: {', '.join(TESTED)}."
    )


def unsupported(config: PretrainedConfig) -> str | None:
    """Return why packed rows or the chunked head would give wrong log-probs, as far as the config says; None if they would not.

    The sentence continues "models of type X ...".
    """
    text = config.get_text_config()
    others = sorted(set(layer_types(text)) - set(PACKED_LAYERS))
    scales = [name for name in LOGIT_SCALES if getattr(text, name, None) not in (None, 1, 1.0)]
    if config.is_encoder_decoder:
        return "have an encoder; only models with a decoder alone are supported"
    if others:
        return (
            f"have layers of type {', '.join(others)}; rows are packed into one sequence, and only layers of type "
            f"{' and '.join(PACKED_LAYERS)} keep the rows of a pack apart"
        )
    if text is not config:
        return "take more than text; only text models are supported"
    if scales:
        return f"change the logits after the head ({scales[0]}); log-probs are computed from the head's product alone"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "cap the scores of attention (attn_logit_softcapping); attention over packed rows does not"
    tested, experts = config.model_type in TESTED, max(_number(config, name) for name in EXPERT_COUNTS)
    if not tested and experts > 1:
        return f"are mixtures of experts ({experts} of them), which are not supported"
    if not tested and window(config) is not None:
        return f"slide attention over a window (sliding_window={window(config)}) in a way that is not tested here"
    return None


def _number(config: PretrainedConfig, name: str) -> int:
    value = getattr(config, name, 0)
    return value if isinstance(value, int) else 0


def layer_types(config: PretrainedConfig) -> list[str]:
    """Return the kind of each layer from the config; an empty list where the config does not say."""
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if kinds:
            return ["full_attention" if kind == "attention" else str(kind) for kind in kinds]
    return []


def window(config: PretrainedConfig) -> int | None:
    """Return the sliding window of the model's attention in tokens, None where no layer slides."""
    size, layers = getattr(config, "sliding_window", None), layer_types(config)
    slides = "sliding_attention" in layers if layers else getattr(config, "use_sliding_window", True)
    return size if slides else None


def check_lengths(config: PretrainedConfig, longest: int) -> None:
    """Refuse rows so long that the rotary frequencies of one row would depend on the other rows of its pack.

    Args:
        config: Config of the model.
        longest: Tokens of the longest prompt and response together.

    Raises:
        ConfigError: The rows are too long. The message names the kind of rotary embedding and the length it was trained for.
    """
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *(part for part in parameters.values() if isinstance(part, dict))]:
        kind = rope.get("rope_type")
        trained = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        limit: int = trained or getattr(config, "max_position_embeddings", None) or longest
        if kind in LENGTH_DEPENDENT_ROTARY and longest > limit:
            raise ConfigError(
                f"data.max_prompt_length + data.max_response_length = {longest}: the rotary embedding of {config.model_type} "
                f"({kind}) changes beyond {limit} tokens, and for all rows of a pack at once. Keep the sum at {limit} or less."
            )
