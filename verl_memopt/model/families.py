"""The table of known model families, and what the config of any model says. Imports no torch.

A model type that is not in the table is checked by its config here. ``packing_check.py`` then builds it and compares packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_memopt.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    model_type: str
    """The type in config.json."""
    models: str
    """Names of published models of this type."""
    classes: str | None = None
    """Prefix of its class names in transformers, if :class:`verl_memopt.model.decoder.Decoder` computes its blocks."""
    multiplied_by: str | None = None
    """Config field with a factor of the logits."""
    divided_by: str | None = None
    """Config field with a divisor of the logits."""
    capped: bool = False
    """Whether its config can cap the logits."""
    uneven: bool = False
    """Whether its config gives layers heads of different sizes, which our own decoder computes."""
    carries: bool = False
    """Whether it has layers that carry a state from token to token, which our own decoder keeps apart in a pack."""
    sinks: bool = False
    """Whether attention has a learned score of one more key for each head, whose value is zero. SDPA of transformers has none."""
    whole_experts: bool = False
    """Whether its files hold all experts of a block as one tensor, and not one by one."""
    inputs_first: bool = False
    """Whether the model's tensors of all experts have the inputs before the outputs: [E, in, out]."""
    text: str | None = None
    """Type of its text part, for a model that reads more than text. Only this part is trained."""
    apart: tuple[str, ...] = ()
    """Beginnings of the names of weights beside the text model: other parts, and heads for drafting. They are not trained."""
    turned: bool = False
    """Whether its files may have rows and columns of the experts exchanged, in one tensor for all experts of a block."""
    note: str = ""
    """A sentence with other facts that a user must know."""
    refused: str | None = None
    """Reason that follows "models of type X" in the error. None = packed log-probs and gradients equal those of transformers."""
    nearest: str | None = None
    """A related type that works, for a type of which some or all configs are refused. None = :data:`NEAREST` says which."""


STATE_LAYER = "linear_attention"
STATE = f"have layers of type {STATE_LAYER}"
UNEVEN = "have layers of different sizes"
EXPERTS = "are mixtures of experts"
OTHER_EXPERTS = "A mixture of experts that transformers computes. Its experts have no adapters and are not quantised."
CAPPED = "Its capped scores of attention need `attn_implementation=eager`, which `auto` takes."
MORE = "take more than text"
FIXED = "cannot be built with attention over packed rows"
BESIDE = "Its vision tower is not trained: it stays on disk, and every saved model gets a copy of it."
ADAPTED = "Its routed experts get adapters if `target_parameters` names them."
REPLAYED = "`router_replay` replays its experts."
PLAIN_EXPERTS = f"{ADAPTED} {REPLAYED} `load_mode=mmap` and an auxiliary loss are refused."
SHARED = f"{ADAPTED} {REPLAYED} An auxiliary loss is refused; `load_mode=mmap` too, if the files have experts one by one."
BESIDE_GEMMA_4 = tuple(
    f"model.{part}." for part in ("vision_tower", "audio_tower", "vision_embedder", "embed_vision", "embed_audio")
)
WITH_MIXTURE = f"26B-A4B has experts beside each MLP. {ADAPTED} {REPLAYED}"
NO_LIST = "do not keep their decoder blocks in a list named layers"
RENAMED = "use other names for their weights in a checkpoint than in the model"
OWN_WAY = "cannot compute packed rows"

FAMILIES = (
    Family("arcee", "Arcee AFM"),
    Family("bitnet", "BitNet b1.58"),
    Family("cohere", "Command R", multiplied_by="logit_scale"),
    Family("cohere2", "Command R7B, Command A", multiplied_by="logit_scale"),
    Family("cwm", "Code World Model"),
    Family("diffllama", "DiffLlama"),
    Family("ernie4_5", "ERNIE 4.5, dense"),
    Family("exaone4", "EXAONE 4"),
    Family("gemma", "Gemma"),
    Family("gemma2", "Gemma 2", capped=True, note=CAPPED),
    Family(
        "gemma3",
        "Gemma 3 with images, as text",
        text="gemma3_text",
        apart=("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector."),
        note=BESIDE,
    ),
    Family("gemma3_text", "Gemma 3", "Gemma3", capped=True),
    Family(
        "gemma4",
        "Gemma 4 with images and sound, as text",
        text="gemma4_text",
        apart=BESIDE_GEMMA_4,
        note=f"{BESIDE} {WITH_MIXTURE}",
    ),
    Family("gemma4_text", "Gemma 4", "Gemma4Text", capped=True, uneven=True, whole_experts=True, note=WITH_MIXTURE),
    Family("gemma4_unified", "Gemma 4 12B, as text", text="gemma4_unified_text", apart=BESIDE_GEMMA_4, note=BESIDE),
    Family("gemma4_unified_text", "Gemma 4 12B", "Gemma4UnifiedText", capped=True, uneven=True),
    Family("glm", "GLM-4-9B and GLM-Edge"),
    Family("glm4", "GLM-4-0414"),
    Family(
        "glm4_moe",
        "GLM-4.5, GLM-4.5-Air, GLM-4.6",
        "Glm4Moe",
        note=f"{SHARED} The correction of its router is not trained. Its layers for drafting stay on disk, and every saved model "
        "gets a copy of them. Its head must not be tied if the engine is vLLM.",
    ),
    Family(
        "gpt_oss",
        "gpt-oss",
        "GptOss",
        sinks=True,
        whole_experts=True,
        inputs_first=True,
        note=f"It needs the engine `hf`. {ADAPTED} Experts of a folder in MXFP4 keep its bytes with LoRA, on several devices if "
        "`share_weights` is on, and in a model with `quantization`; otherwise they are decoded. Saved models are never in MXFP4. "
        f"{REPLAYED} An auxiliary loss is refused.",
    ),
    Family("granite", "Granite, dense", divided_by="logits_scaling"),
    Family("hunyuan_v1_dense", "Hunyuan, dense"),
    Family("hyperclovax", "HyperCLOVA X", multiplied_by="logits_scaling"),
    Family("jais2", "Jais 2"),
    Family("jetmoe", "JetMoE", note=OTHER_EXPERTS),
    Family("llama", "Llama 2 and 3, SmolLM2, Yi, DeepSeek LLM", "Llama"),
    Family("ministral", "Ministral"),
    Family("ministral3", "Ministral 3"),
    Family("mistral", "Mistral 7B, Nemo, Small", "Mistral"),
    Family("nanochat", "nanochat", capped=True),
    Family("olmo", "OLMo"),
    Family("olmo2", "OLMo 2"),
    Family("olmo3", "OLMo 3"),
    Family("olmoe", "OLMoE", note=OTHER_EXPERTS),
    Family("persimmon", "Persimmon"),
    Family("phi", "Phi-1, Phi-1.5, Phi-2"),
    Family("phi3", "Phi-3, Phi-4", note="Rows beyond a LongRoPE model's trained length are refused."),
    Family("qwen2", "Qwen2, Qwen2.5", "Qwen2"),
    Family("qwen2_moe", "Qwen1.5-MoE, Qwen2-57B-A14B", note=f"{OTHER_EXPERTS} A config with a sliding window is refused."),
    Family("qwen3", "Qwen3, dense", "Qwen3"),
    Family("qwen3_5", "Qwen3.5, dense, as text", text="qwen3_5_text", apart=("model.visual.", "mtp."), note=BESIDE),
    Family(
        "qwen3_5_moe",
        "Qwen3.5, mixture of experts, as text",
        text="qwen3_5_moe_text",
        apart=("model.visual.", "mtp."),
        note=f"{BESIDE} {SHARED}",
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3.5, mixture of experts, and those of its type (3.6)",
        "Qwen3_5Moe",
        carries=True,
        apart=("model.visual.", "mtp."),
        note=SHARED,
    ),
    Family(
        "qwen3_5_text",
        "Qwen3.5, dense, and those of its type (3.6, 3.8)",
        "Qwen3_5",
        carries=True,
        apart=("model.visual.", "mtp."),
    ),
    Family(
        "qwen3_moe",
        "Qwen3, mixture of experts",
        "Qwen3Moe",
        note=PLAIN_EXPERTS,
    ),
    Family("qwen3_vl", "Qwen3-VL, dense, as text", text="qwen3", apart=("model.visual.",), note=BESIDE),
    Family(
        "qwen3_vl_moe",
        "Qwen3-VL, mixture of experts, as text",
        text="qwen3_moe",
        apart=("model.visual.",),
        turned=True,
        note=f"{BESIDE} {PLAIN_EXPERTS}",
    ),
    Family("seed_oss", "Seed-OSS", note="Dropout in its config drops nothing."),
    Family("smollm3", "SmolLM3"),
    Family("starcoder2", "StarCoder2"),
    Family("apertus", "Apertus", refused=RENAMED),
    Family("bamba", "Bamba", refused=STATE),
    Family("bart", "BART", refused="have an encoder"),
    Family("bert", "BERT", refused=NO_LIST),
    Family("bloom", "BLOOM", refused=FIXED),
    Family("deepseek_v3", "DeepSeek-V3, DeepSeek-R1", refused=f"{EXPERTS} with latent attention, groups and a shared expert"),
    Family("falcon_h1", "Falcon-H1", refused="have layers of type hybrid"),
    Family("falcon_mamba", "Falcon Mamba", refused=STATE),
    Family("gpt2", "GPT-2", refused=NO_LIST),
    Family("gpt_bigcode", "StarCoder", refused=NO_LIST, nearest="starcoder2"),
    Family("gpt_neox", "Pythia, GPT-NeoX", refused=RENAMED),
    Family("granitemoe", "Granite, mixture of experts", refused=f"{EXPERTS} with factors of the residual and the logits"),
    Family("jamba", "Jamba", refused=STATE),
    Family("kimi_linear", "Kimi Linear", refused=STATE),
    Family("llama4_text", "Llama 4", refused="have layers of type chunked_attention", nearest="llama"),
    Family("mamba", "Mamba", refused=STATE),
    Family("minimax", "MiniMax", refused=STATE),
    Family("mixtral", "Mixtral", refused=f"{EXPERTS} with other names for their weights in a checkpoint"),
    Family("mpt", "MPT", refused=FIXED),
    Family("nemotron", "Nemotron-4, Minitron", refused=OWN_WAY),
    Family("olmo_hybrid", "OLMo Hybrid", refused=STATE, nearest="olmo3"),
    Family("phimoe", "Phi-3.5-MoE", refused=f"{EXPERTS} with layer norms and a router of their own"),
    Family("qwen3_next", "Qwen3-Next", refused=STATE, nearest="qwen3_5_moe_text"),
    Family("recurrent_gemma", "RecurrentGemma", refused="have layers of type recurrent", nearest="gemma2"),
    Family("rwkv", "RWKV", refused=FIXED),
    Family("stablelm", "StableLM", refused=OWN_WAY),
    Family("t5", "T5", refused="have an encoder"),
    Family("xlm", "XLM", refused=FIXED),
)
"""All known families: first those that can be trained, then those that are refused."""

NEAREST = {EXPERTS: "qwen3_moe", MORE: "qwen3_vl", STATE: "qwen3_5_text"}
"""Beginning of a reason -> the type that works and is nearest to a type that is refused for it. Others: qwen3."""

PACKED_LAYERS = ("full_attention", "sliding_attention")
"""Layer types in a config that packed attention can compute."""

LOGIT_CAP, SCORE_CAP = "final_logit_softcapping", "attn_logit_softcapping"
"""Config fields with the bound of the logits, and with the bound of the attention scores. A tanh keeps the values below it."""

LOGIT_SCALES = (LOGIT_CAP, "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Config fields that change the logits after the head. One type multiplies by a field by which another type divides, so only
``FAMILIES`` says what a type does."""

AMONG_IMAGES = "vision"
"""Value of ``use_bidirectional_attention`` in models whose parts of images alone see later ones."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""Config fields with the number of experts in a layer."""

CORRECTION = "e_score_correction_bias"
"""Name of the buffer of a router that shifts which experts are chosen. It is not trained, and is fp32 in a model of any dtype: a
shorter one would choose other experts."""

LENGTH_DEPENDENT_ROTARY = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies change if the longest sequence in a forward is longer than the trained length."""


LARGEST_SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), 2**31 - 1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 2**16),
    "num_hidden_layers": 10_000,
}
"""Config field with a size -> its largest plausible value. A larger model could not even be built."""


def impossible_size(config: PretrainedConfig) -> tuple[str, str] | None:
    """Return the first config field with an impossible size, and what is wrong with it. None = all sizes are possible."""
    for layer in layer_configs(config):
        for name, most in LARGEST_SIZES.items():
            value = getattr(layer, name, None)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not isinstance(value, list | tuple) and not (whole and 1 <= value <= most):
                return name, f"it must be a whole number from 1 to {most}"
        heads, shared = getattr(layer, "num_attention_heads", None), getattr(layer, "num_key_value_heads", None)
        if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
            return "num_key_value_heads", f"it must divide num_attention_heads={heads}"
    return None


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Return the config as the layers of each type read it. If all layers have equal sizes, this is the config itself.

    Raises:
        ValueError: Layers of one type differ.
    """
    if not getattr(config, "is_heterogeneous", False):
        return [config]
    by_type: Any = config.per_layer_config
    return [by_type[kind] for kind in dict.fromkeys(layer_types(config))]


def is_uneven(config: PretrainedConfig) -> bool:
    """Whether layers have sizes of their own in a way that is not computed here."""
    try:
        return len(layer_configs(config)) > 1 and not family_of(config.model_type).uneven
    except ValueError:
        return True


def working_types() -> tuple[str, ...]:
    """Return the model types for which a test compares packed log-probs with transformers' own forward."""
    return tuple(family.model_type for family in FAMILIES if family.refused is None)


def own_classes(part: str) -> tuple[str, ...]:
    """Return the classes of a part of the models whose blocks :class:`verl_memopt.model.decoder.Decoder` computes.

    ``part`` is the end of their names, such as ``MLP``.
    """
    return tuple(f"{family.classes}{part}" for family in FAMILIES if family.classes is not None)


def own_blocks() -> tuple[str, ...]:
    """Return the classes of their blocks.

    Each has two RMS norms, rotary attention with or without norms of queries and keys, and the MLP
    ``down(act(gate(x)) * up(x))``. Those of Gemma 3 and 4 have two more norms, of the outputs of attention and MLP. Those of
    Gemma 4 also norm values, multiply the block's output by a factor, and may have experts beside the MLP.
    """
    return own_classes("DecoderLayer")


POLICY_KEY = "actor_rollout_ref.model"
"""Section of the settings for the policy's model. The critic's section is ``critic.model``."""


def refused(config: PretrainedConfig, source: str, reason: str, key: str = POLICY_KEY) -> ConfigError:
    """Build the error for a model that cannot be trained.

    ``reason`` continues "models of type X ...". ``source`` is the folder of the config. ``key`` is the model's section of the
    settings.
    """
    by_reason = next((nearest for beginning, nearest in NEAREST.items() if reason.startswith(beginning)), "qwen3")
    nearest = family_of(config.model_type).nearest or by_reason
    return ConfigError(
        f"{key}.path={source}: models of type {config.model_type} {reason}. The nearest type that works is {nearest}. "
        f"Types that are tested: {', '.join(working_types())}."
    )


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def unsupported(config: PretrainedConfig) -> str | None:
    """Return why packed rows or the chunked head would compute wrong log-probs. None = the config shows no reason.

    The text continues "models of type X ...".
    """
    text = config.get_text_config()
    family = family_of(text.model_type)
    others = sorted(set(layer_types(text)) - {*PACKED_LAYERS, *((STATE_LAYER,) if family.carries else ())})
    handled = (family.multiplied_by, family.divided_by, LOGIT_CAP if family.capped else None)
    scales = [name for name in LOGIT_SCALES if getattr(text, name, None) not in (None, 1, 1.0) and name not in handled]
    # The order matters, because the user reads only the first reason.
    if config.is_encoder_decoder:
        return "have an encoder; only models without an encoder are supported"
    if others:
        return (
            f"have layers of type {', '.join(others)}; rows are packed into one sequence, and only layers of type "
            f"{' and '.join(PACKED_LAYERS)} keep the rows of a pack apart"
        )
    if text is not config:
        return f"{MORE}; only text models and the text parts of some others are supported"
    later = getattr(text, "use_bidirectional_attention", False)
    if later and later != AMONG_IMAGES:
        stated = f"use_bidirectional_attention={str(later).lower()}"
        return f"see later tokens ({stated}), so no token can be learned from those before it"
    if scales:
        return f"change the logits after the head ({scales[0]}) in an unknown way"
    tested, experts = config.model_type in working_types(), num_experts(config)
    if not tested and experts > 1:
        reason = family.refused or EXPERTS
        return f"{reason} ({experts} in a layer), which are not computed here"
    if not tested and window(config) is not None:
        return f"slide attention over a window (sliding_window={window(config)}) in a way that is not tested here"
    return None


def num_experts(config: PretrainedConfig) -> int:
    if not getattr(config, "enable_moe_block", True):  # a config of Gemma 4 may have a number that nothing reads
        return 0
    counts = [getattr(config, name, None) for name in EXPERT_COUNTS]
    return max((count for count in counts if isinstance(count, int)), default=0)


def is_mxfp4(config: PretrainedConfig) -> bool:
    """Whether the experts of a folder of gpt-oss are stored in MXFP4, by its config."""
    stated = getattr(config, "quantization_config", None)
    return isinstance(stated, dict) and stated.get("quant_method") == "mxfp4"


def why_not_replayed(config: PretrainedConfig) -> str | None:
    """Return why the experts of a model cannot be replayed. The text continues "models of type X ...". None = they can."""
    if num_experts(config) <= 1:
        return "have no experts to replay"
    return "have experts that transformers computes" if family_of(config.model_type).classes is None else None


def logit_shape(config: PretrainedConfig) -> tuple[float, float | None]:
    """Return the factor of the logits, and the bound to which they are capped afterwards (None = no bound)."""
    family = family_of(config.model_type)
    # An unknown family has no factor, because unsupported() refuses configs that need one.
    factor: float = getattr(config, family.multiplied_by) if family.multiplied_by else 1.0
    if family.divided_by:
        factor /= getattr(config, family.divided_by)
    return factor, getattr(config, LOGIT_CAP) if family.capped else None


def family_of(model_type: str) -> Family:
    return next((family for family in FAMILIES if family.model_type == model_type), Family(model_type, ""))


TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Beginning of a text weight's name in a multimodal model -> its beginning in the text model. Transformers has the first form,
and folders of earlier versions have the others."""


def text_name(name: str) -> str:
    prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), "")
    return TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def whole_name(name: str) -> str:
    """Return the name of a weight of the text model in the multimodal model as transformers builds it."""
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def layer_types(config: PretrainedConfig) -> list[str]:
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if kinds:
            return ["full_attention" if kind == "attention" else str(kind) for kind in kinds]
    return []


def window(config: PretrainedConfig) -> int | None:
    size, layers = getattr(config, "sliding_window", None), layer_types(config)
    # Some configs have a window that no layer uses.
    slides = "sliding_attention" in layers if layers else getattr(config, "use_sliding_window", True)
    return size if slides else None


SPECIAL = (
    LOGIT_CAP, SCORE_CAP, "query_pre_attn_scalar", "attention_multiplier", "embedding_multiplier", "residual_multiplier",
    "use_qk_norm", "no_rope_layers", "partial_rotary_factor",
)  # fmt: skip
"""Config fields that an engine and a trainer may implement differently. :func:`features` adds window and factor of the logits."""


def features(config: PretrainedConfig) -> tuple[str, ...]:
    family = family_of(config.model_type)
    fields = (*SPECIAL, *(name for name in (family.multiplied_by, family.divided_by) if name))
    found = {name: getattr(config, name, None) for name in fields}
    found |= {"sliding_window": window(config), "rope_type": _rope_type(config)}
    return tuple(f"{name}={value}" for name, value in found.items() if value not in (None, False, 1, 1.0, [], "default"))


def _rope_type(config: PretrainedConfig) -> Any:
    parameters = getattr(config, "rope_parameters", None)
    return parameters.get("rope_type") if isinstance(parameters, dict) else None


def check_lengths(config: PretrainedConfig, longest: int) -> None:
    """Refuse rows that are so long that the rotary frequencies of one row would depend on the other rows of its pack.

    ``longest`` is the length of the longest prompt and response together.

    Raises:
        ConfigError: The rows are too long. The message names the kind of rotary embedding and its trained length.
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
