"""The sizes of a model, from a table of published models or from a config.json. No weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl_memopt.config.schema import CriticModel, Model
from verl_memopt.errors import ConfigError
from verl_memopt.memory.quantized_frozen import row_bytes
from verl_memopt.model.attention import REGISTERED
from verl_memopt.model.block_options import LAYER_INPUTS
from verl_memopt.model.delta_rule import DeltaShape
from verl_memopt.model.families import NO_LIST, is_mxfp4, layer_configs, layer_types, num_experts, own_blocks, refused, window
from verl_memopt.model.folder import HUB_ID, fetch, refuse_odd_files
from verl_memopt.model.weights import empty_model, load_model_config


@dataclass(frozen=True)
class MixtureSize:
    """A mixture of experts: the number of experts of a block, the width of the MLP of one, and how many compute a token."""

    experts: int
    width: int
    top_k: int
    shared: int = 0
    """Width of the MLP of an expert that computes all tokens (Qwen3.5, GLM-4.5). 0 = there is none."""
    shared_gate: bool = True
    """Whether the output of this expert has a gate (Qwen3.5)."""
    dense: tuple[int, int] = (0, 0)
    """How many layers have an MLP and no experts, and its width (GLM-4.5)."""
    beside: bool = False
    """Whether all layers have an MLP too, beside the experts (Gemma 4)."""

    def bytes_of_one(self, kind: str, hidden: int) -> int:
        """Return the bytes of an expert in a format of :data:`verl_memopt.memory.quantized_frozen.STORED`."""
        return 2 * self.width * row_bytes(kind, hidden) + hidden * row_bytes(kind, self.width)


@dataclass(frozen=True)
class LocalHeads:
    """Heads of the layers that slide over a window, in a model whose other layers have wider ones (Gemma 4)."""

    layers: int
    """How many layers have these heads."""
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class ModelSize:
    hidden: int
    mlp: int
    """Width of the MLP; in a mixture of experts without one, of all experts together that compute a token, with a shared one."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """Whether embedding and LM head share one matrix."""
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have a bias (Qwen2)."""
    qk_norm: bool = False
    """Whether queries and keys have a norm (Qwen3)."""
    window: int | None = None
    """Number of positions that a token sees in layers with sliding-window attention. None = no layer has a window."""
    window_layers: int = 0
    """How many layers have the window."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP have norms (Gemma 3 and 4), which multiply in fp32."""
    prunes: bool = True
    """Whether its last block can skip outputs that nothing reads (``prune_last_block``)."""
    positions: int | None = None
    """Number of tokens of the longest sequence, from its config. None = unknown."""
    counted: tuple[int, int] | None = None
    """(parameters of the model, parameters of its largest block), counted in a model without storage. None = they follow from the
    sizes."""
    gated: bool = False
    """Whether the outputs of attention's heads have a gate, which the projection of queries computes too (Qwen3.5)."""
    rule: DeltaShape | None = None
    """Heads of the blocks that carry a state instead of attention (Qwen3.5). None = there are none."""
    linear_layers: int = 0
    """How many of ``layers`` carry a state."""
    mixture: MixtureSize | None = None
    """None = it has no experts."""
    sinks: bool = False
    """Whether attention has sinks (gpt-oss)."""
    mxfp4: bool = False
    """Its folder stores the experts in MXFP4."""
    v_norm: bool = False
    """Whether values have a norm (Gemma 4)."""
    local: LocalHeads | None = None
    """Heads of some layers, if these are smaller than those of the others. None = all layers have the same."""
    keys_are_values: bool = False
    """Whether layers beside those of ``local`` have no projection of values."""
    reading: tuple[int, int] = (0, 0)
    """How many layers read the keys of an earlier one: of those beside ``local``, and of those of ``local``."""
    own_mlp: int | None = None
    """Width of the MLP of the other layers. None = as theirs."""
    layer_inputs: int = 0
    """Width of the inputs that each token has for each layer (small models of Gemma 4)."""
    root_params: int = 0
    """Parameters outside of blocks, beside those of the vocabulary: of the inputs of layers."""

    @property
    def has_own_blocks(self) -> bool:
        """Whether our own decoder computes its blocks. The last one is pruned, unless it carries a state."""
        return self.prunes or self.linear_layers > 0

    @property
    def kinds(self) -> list[tuple[int, int, int]]:
        """(layers, key heads, size of a head) of the layers with attention, for each kind of heads."""
        if self.local is None:
            return [(self.attention_layers, self.kv_heads, self.head_dim)]
        own, layers = self.local, self.attention_layers - self.local.layers
        return [(layers, self.kv_heads, self.head_dim), (own.layers, own.kv_heads, own.head_dim)]

    @property
    def kinds_with_keys(self) -> list[tuple[int, int, int]]:
        """:attr:`kinds` without the layers that read the keys of an earlier one."""
        return [(kind[0] - read, kind[1], kind[2]) for kind, read in zip(self.kinds, self.reading, strict=False)]

    @property
    def pair_elements(self) -> int:
        """Elements of the keys and values of a token in all layers."""
        return sum(2 * layers * kv_heads * head_dim for layers, kv_heads, head_dim in self.kinds_with_keys)

    @property
    def widest(self) -> int:
        """A side of the largest matrix that is quantised at once, of which the other side is ``hidden``."""
        mixture, rule, queries = self.mixture, self.rule, self.heads * self.head_dim * (2 if self.gated else 1)
        mlp = self.mlp if mixture is None else max(2 * mixture.width, self.mlp if mixture.beside else mixture.shared)
        return max(mlp, queries, 0 if rule is None else 2 * rule.keys + rule.values)

    @cached_property
    def block_params(self) -> int:
        return self.token_params if self.counted is None else self.counted[1]

    @property
    def token_params(self) -> int:
        """Parameters of a block with attention that compute a token: without the experts that it does not go to."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (query + key) + self.qkv_bias * (query + 2 * key) + self.qk_norm * 2 * self.head_dim
        attention += self.hidden * (self.gated * query - self.keys_are_values * key)
        return attention + 3 * self.hidden * self.mlp + 2 * self.hidden

    @property
    def active_params(self) -> int:
        """Parameters that compute a token."""
        mixture = self.mixture
        idle = 0 if mixture is None else (mixture.experts - mixture.top_k) * mixture.width
        return self.params - self.root_params - self.mixture_layers * 3 * self.hidden * idle

    @property
    def mixture_layers(self) -> int:
        """Number of layers with experts."""
        return 0 if self.mixture is None else self.layers - self.mixture.dense[0]

    @property
    def expert_params(self) -> int:
        # Weights of all experts, without biases.
        return 0 if self.mixture is None else self.mixture_layers * self.mixture.experts * 3 * self.mixture.width * self.hidden

    def expert_bytes(self, kind: str) -> int:
        """Return the bytes of all experts in a format of :data:`verl_memopt.memory.quantized_frozen.STORED`."""
        mixture = self.mixture
        return 0 if mixture is None else self.mixture_layers * mixture.experts * mixture.bytes_of_one(kind, self.hidden)

    @property
    def attention_layers(self) -> int:
        return self.layers - self.linear_layers

    @cached_property
    def params(self) -> int:
        if self.counted is not None:
            return self.counted[0]
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.layers * self.block_params + self.hidden


PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": ModelSize(896, 4864, 24, 14, 2, 64, 151_936, True, qkv_bias=True, positions=2**15),
    "Qwen/Qwen2.5-1.5B-Instruct": ModelSize(1536, 8960, 28, 12, 2, 128, 151_936, True, qkv_bias=True, positions=2**15),
    "Qwen/Qwen2.5-3B-Instruct": ModelSize(2048, 11_008, 36, 16, 2, 128, 151_936, True, qkv_bias=True, positions=2**15),
    "Qwen/Qwen2.5-7B-Instruct": ModelSize(3584, 18_944, 28, 28, 4, 128, 152_064, False, qkv_bias=True, positions=2**15),
    "Qwen/Qwen2.5-14B-Instruct": ModelSize(5120, 13_824, 48, 40, 8, 128, 152_064, False, qkv_bias=True, positions=2**15),
    "Qwen/Qwen2.5-32B-Instruct": ModelSize(5120, 27_648, 64, 40, 8, 128, 152_064, False, qkv_bias=True, positions=2**15),
    "Qwen/Qwen3-0.6B": ModelSize(1024, 3072, 28, 16, 8, 128, 151_936, True, qk_norm=True, positions=40_960),
    "Qwen/Qwen3-1.7B": ModelSize(2048, 6144, 28, 16, 8, 128, 151_936, True, qk_norm=True, positions=40_960),
    "Qwen/Qwen3-4B": ModelSize(2560, 9728, 36, 32, 8, 128, 151_936, True, qk_norm=True, positions=40_960),
    "Qwen/Qwen3-8B": ModelSize(4096, 12_288, 36, 32, 8, 128, 151_936, False, qk_norm=True, positions=40_960),
    "Qwen/Qwen3-14B": ModelSize(5120, 17_408, 40, 40, 8, 128, 151_936, False, qk_norm=True, positions=40_960),
    "Qwen/Qwen3-32B": ModelSize(5120, 25_600, 64, 64, 8, 128, 151_936, False, qk_norm=True, positions=40_960),
    "Qwen/Qwen3-30B-A3B": ModelSize(
        2048, 6144, 48, 32, 4, 128, 151_936, False, qk_norm=True, positions=40_960, counted=(30_532_122_624, 623_120_640),
        mixture=MixtureSize(128, 768, 8),
    ),
    "openai/gpt-oss-20b": ModelSize(
        2880, 11_520, 24, 64, 8, 64, 201_088, False, qkv_bias=True, window=128, window_layers=12, positions=2**17,
        counted=(20_914_757_184, 823_186_976), mixture=MixtureSize(32, 2880, 4), sinks=True, mxfp4=True,
    ),
    "Qwen/Qwen3.5-0.8B": ModelSize(
        1024, 3584, 24, 8, 2, 256, 248_320, True, qk_norm=True, positions=2**18, counted=(752_393_024, 21_555_360),
        gated=True, rule=DeltaShape(16, 16, 128, 128), linear_layers=18,
    ),
    "Qwen/Qwen3.5-4B": ModelSize(
        2560, 9216, 32, 16, 4, 256, 248_320, True, qk_norm=True, positions=2**18, counted=(4_205_751_296, 112_923_840),
        gated=True, rule=DeltaShape(16, 32, 128, 128), linear_layers=24,
    ),
    "Qwen/Qwen3.5-9B": ModelSize(
        4096, 12_288, 32, 16, 4, 256, 248_320, False, qk_norm=True, positions=2**18, counted=(8_953_803_264, 218_407_104),
        gated=True, rule=DeltaShape(16, 32, 128, 128), linear_layers=24,
    ),
    "Qwen/Qwen3.5-27B": ModelSize(
        5120, 17_408, 64, 24, 4, 256, 248_320, False, qk_norm=True, positions=2**18, counted=(26_895_998_464, 383_273_184),
        gated=True, rule=DeltaShape(16, 48, 128, 128), linear_layers=48,
    ),
    "Qwen/Qwen3.5-35B-A3B": ModelSize(
        2048, 4608, 40, 16, 2, 256, 248_320, False, qk_norm=True, positions=2**18, counted=(34_660_610_688, 842_700_992),
        gated=True, rule=DeltaShape(16, 32, 128, 128), linear_layers=30, mixture=MixtureSize(256, 512, 8, 512),
    ),
    # From transformers' defaults, with the attention of the published config. The parameters are those of the model's card.
    "zai-org/GLM-4.5-Air": ModelSize(
        4096, 12_672, 46, 96, 8, 128, 151_552, False, qkv_bias=True, positions=2**17, counted=(106_852_245_504, 2_341_492_736),
        mixture=MixtureSize(128, 1408, 8, 1408, False, (1, 10_944)),
    ),
    "google/gemma-3-4b-it": ModelSize(
        2560, 10_240, 34, 8, 4, 256, 262_208, True, qk_norm=True, window=1024, window_layers=29, post_norms=True,
        positions=2**17, counted=(3_880_263_168, 94_382_592),
    ),
    "google/gemma-4-E4B-it": ModelSize(
        2560, 10_240, 42, 8, 2, 512, 262_144, True, qk_norm=True, window=512, window_layers=35, post_norms=True,
        positions=2**17, counted=(7_463_013_418, 106_182_145), v_norm=True, local=LocalHeads(35, 2, 256), reading=(3, 15),
        layer_inputs=256, root_params=2_846_097_664,
    ),
    "google/gemma-4-26B-A4B-it": ModelSize(
        2816, 2112, 30, 16, 2, 512, 262_144, True, qk_norm=True, window=1024, window_layers=25, post_norms=True, positions=2**18,
        counted=(25_233_141_790, 828_513_409), v_norm=True, local=LocalHeads(25, 8, 256), keys_are_values=True,
        mixture=MixtureSize(128, 704, 8, beside=True),
    ),
    "google/gemma-4-31B-it": ModelSize(
        5376, 21_504, 60, 32, 4, 512, 262_144, True, qk_norm=True, window=1024, window_layers=50, post_norms=True,
        positions=2**18, counted=(30_697_345_340, 534_009_857), v_norm=True, local=LocalHeads(50, 16, 256), keys_are_values=True,
    ),
    "meta-llama/Llama-3.2-1B-Instruct": ModelSize(2048, 8192, 16, 32, 8, 64, 128_256, True, positions=2**17),
    "meta-llama/Llama-3.2-3B-Instruct": ModelSize(3072, 8192, 28, 24, 8, 128, 128_256, True, positions=2**17),
}  # fmt: skip
"""Hub id -> sizes, for the models of the presets ``model=``, so that nothing must be fetched for them. Of a model that reads more
than text, these are the sizes of its text part."""


def size_of(model: Model | CriticModel, key: str) -> ModelSize:
    """Return the sizes of a model from the table, from a folder or from the hub. Only config.json is read."""
    source = str(model.hf_config_path or model.path)
    if source in PUBLISHED and not model.override_config:
        return PUBLISHED[source]
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if folder.exists() or not HUB_ID.match(source):
            raise ConfigError(f"{key}.path={source}: no such folder. Give a folder with config.json, or a hub id (owner/name).")
        folder = _config_of_hub(source, key)
    refuse_odd_files(folder, f"{key}.path={source}")
    return _read_size(model, folder, key)


def _config_of_hub(name: str, key: str) -> Path:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return fetch(name, ["config.json"])
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"{key}.path={name}: the hub could not give its config.json ({type(error).__name__}: {error}). Give a folder "
            "with the file, or a model whose sizes are built in: " + ", ".join(PUBLISHED) + "."
        ) from error


def _read_size(model: Model | CriticModel, folder: Path, key: str) -> ModelSize:
    config = load_model_config(model, folder, key)
    empty = empty_model(config, REGISTERED["sdpa"], torch.float32, bool(model.trust_remote_code), key)
    layers: Any = getattr(empty.get_decoder(), "layers", None)
    if layers is None:
        raise refused(config, str(folder), NO_LIST, key)
    # The layers of a model need not be equal: some have no attention, and some of a mixture of experts have an MLP. The largest
    # decides.
    block, heads = max(layers, key=_parameters), config.num_attention_heads
    # Layers of one type have the same heads. Those with the widest count for all that is not said of the others.
    wide, *others = sorted(layer_configs(config), key=lambda layer: getattr(layer, "head_dim", None) or 0, reverse=True)
    kv_heads, head_dim = _heads(wide)
    local = None if not others else LocalHeads(layer_types(config).count("sliding_attention"), *_heads(others[0]))
    attention: Any = next((block.self_attn for block in layers if hasattr(block, "self_attn")), None)
    linear: list[Any] = [block.linear_attn for block in layers if hasattr(block, "linear_attn")]
    mixture, rule = None, None
    if linear and hasattr(linear[0], "head_k_dim"):
        rule = DeltaShape(linear[0].num_k_heads, linear[0].num_v_heads, linear[0].head_k_dim, linear[0].head_v_dim)
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if hasattr(block, "experts"):
        mixture = MixtureSize(num_experts(config), config.moe_intermediate_size, config.top_k_experts, beside=True)
    own_width, doubles = width, bool(getattr(config, "use_double_wide_mlp", False) and config.num_kv_shared_layers)
    width *= 2 if doubles else 1
    if hasattr(getattr(block, "mlp", None), "experts"):
        # Some types call the width of an expert by the name that others give to the width of an MLP.
        own = getattr(config, "moe_intermediate_size", None) or width
        expert: Any = getattr(block.mlp, "shared_expert", getattr(block.mlp, "shared_experts", None))
        shared = 0 if expert is None else expert.down_proj.in_features
        dense = sum(hasattr(other.mlp, "gate_proj") for other in layers), width
        gates = shared > 0 and hasattr(block.mlp, "shared_expert_gate")
        mixture = MixtureSize(num_experts(config), own, config.num_experts_per_tok, shared, gates, dense if dense[0] else (0, 0))
        width = mixture.top_k * own + shared
    return ModelSize(
        hidden=config.hidden_size,
        mlp=width,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        qk_norm=hasattr(attention, "q_norm"),
        window=window(config),
        window_layers=_sliding(config),
        post_norms=hasattr(block, "post_feedforward_layernorm"),
        prunes=type(layers[-1]).__name__ in own_blocks() and not hasattr(layers[-1], "linear_attn"),
        positions=getattr(config, "max_position_embeddings", None),
        counted=(_parameters(empty), _parameters(block)),
        gated=_is_gated(attention),
        rule=rule,
        linear_layers=0 if rule is None else len(linear),
        mixture=mixture,
        sinks=hasattr(attention, "sinks"),
        mxfp4=is_mxfp4(config),
        v_norm=hasattr(attention, "v_norm"),
        local=local,
        keys_are_values=local is not None and bool(getattr(config, "attention_k_eq_v", False)),
        reading=_reading(config, local),
        own_mlp=own_width if doubles else None,
        layer_inputs=getattr(config, "hidden_size_per_layer_input", 0) or 0,
        root_params=sum(
            _parameters(part) for name in LAYER_INPUTS for part in [getattr(empty.get_decoder(), name, None)] if part
        ),
    )


def _sliding(config: Any) -> int:
    kinds = layer_types(config)
    count = kinds.count("sliding_attention") if kinds else config.num_hidden_layers
    return count if window(config) is not None else 0


def _reading(config: Any, local: LocalHeads | None) -> tuple[int, int]:
    count = getattr(config, "num_kv_shared_layers", 0) or 0
    last = layer_types(config)[len(layer_types(config)) - count :]
    near = last.count("sliding_attention") if local is not None else 0
    return count - near, near


def _heads(layer: Any) -> tuple[int, int]:
    heads = layer.num_attention_heads
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return getattr(layer, "num_key_value_heads", None) or heads, head_dim


def _is_gated(attention: Any) -> bool:
    query, out = getattr(attention, "q_proj", None), getattr(attention, "o_proj", None)
    return isinstance(query, nn.Linear) and isinstance(out, nn.Linear) and query.out_features == 2 * out.in_features


def _parameters(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
