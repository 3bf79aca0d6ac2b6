"""Train low-rank adapters on a frozen base model (LoRA).

The reference is the same base with the adapters that training started from.

Use it when: gradients and optimizer state do not fit, and low-rank training is good enough.
Saves: gradients and optimizer state of all frozen parameters (12 bytes per parameter with fp32 AdamW), and the second model that
    a KL would need.
Costs: two thin matrix products per adapted layer. An engine that shares the base computes them too. Any other engine gets weights
    into which the adapters are merged, one tensor at a time. Experts of a mixture get adapters if ``target_parameters`` names
    them: rank x (in + out) parameters for each expert, which for 128 experts is more than all other adapters together.
Works with: ``rollout.share_weights``, ``model.quantization`` of the base, checkpointing, and every knob that packs tokens. The
    base rests in the compute dtype on one device, and also on several devices if they share the base with their engines. It
    refuses a reference with another ``path``, and ``ref.quantization``. Source: arXiv 2106.09685.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from verl_memopt.memory.knob import Claim, Knob, LadderRow, NaturalInt, PositiveFloat, Refusal, needs_reference

if TYPE_CHECKING:
    from verl_memopt.config.role_settings import TrainedFsdp
    from verl_memopt.config.schema import Settings
    from verl_memopt.model.sizes import MixtureSize
    from verl_memopt.plan.formulas import Shapes

_MODEL = "actor_rollout_ref.model"
_RANK, _PATH = f"{_MODEL}.lora_rank", f"{_MODEL}.lora_adapter_path"
_REFERENCE, _QUANTIZATION = "actor_rollout_ref.ref.model.path", "actor_rollout_ref.ref.quantization"


@dataclass(frozen=True)
class Lora:
    lora_rank: NaturalInt = 0
    """Rank of the adapters on a frozen base; 0 = train every weight. Use LoRA when gradients and optimizer state do not fit. If
    the rank is not given, it is read from ``adapter_config.json`` in ``lora_adapter_path``, like all other LoRA settings that are
    not given."""
    lora_alpha: PositiveFloat = 16
    """Adapters are scaled by lora_alpha / lora_rank."""
    use_rslora: bool = False
    """Scale adapters by lora_alpha / sqrt(lora_rank) instead, so that a large rank learns as fast as a small one (rsLoRA, arXiv
    2312.03732)."""
    target_modules: Any = "all-linear"
    """Layers that get an adapter: all-linear (all linear layers but the LM head), a list of name endings, or a regular
    expression. A name that matches no layer is an error."""
    exclude_modules: Any = None
    """Layers that get no adapter: a list of name endings or a regular expression. A name that matches no part of the model is an
    error."""
    target_parameters: list[str] | None = None
    """Weights of a mixture whose experts get an adapter each: a list of name endings, such as ``mlp.experts.gate_up_proj`` and
    ``mlp.experts.down_proj``. null = no expert gets one. Linear layers get theirs by ``target_modules``; ``[]`` there adapts
    experts alone. A name that matches no weight of experts is an error."""
    lora_adapter_path: str | None = None
    """Folder in the peft format from which the adapters start. The reference of a KL uses these adapters too (see
    ``ref.adapter``)."""

    @property
    def lora_scale(self) -> float:
        return adapter_scale(self.lora_rank, self.lora_alpha, self.use_rslora) if self.lora_rank else 0.0


def adapter_scale(rank: int, alpha: float, use_rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if use_rslora else rank)


@dataclass(frozen=True)
class LoraReference:
    adapter: Literal["start", "base"] = "start"
    """Which adapters the reference uses with LoRA. start = those of ``model.lora_adapter_path``, from which training started;
    base = none, so the reference is the base alone. Both are the same without ``model.lora_adapter_path``."""


NOT_HERE = {
    "use_dora": "magnitudes of adapters (DoRA) are not supported",
    "rank_pattern": "all adapters of a model have one rank here",
    "alpha_pattern": "all adapters of a model have one scale here",
    "modules_to_save": (
        "a module that is trained in full beside the adapters would be needed twice, trained and as the reference has it, "
        "and an engine that shares the base has room for one. Train adapters alone, or all weights (lora_rank=0)"
    ),
    "trainable_token_indices": (
        "rows of the embedding are not trained beside adapters: engine and reference compute with the same embedding. Train "
        "adapters alone, or all weights (lora_rank=0)"
    ),
    "lora_bias": "adapters have no bias here",
    "layers_to_transform": "name layers by a regular expression in target_modules instead",
}
"""Fields of peft's LoraConfig that change what is computed and are not supported, each with its reason. Empty or false values are
accepted."""
PEFT = {
    "r": "lora_rank", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora", "target_modules": "target_modules",
    "exclude_modules": "exclude_modules", "target_parameters": "target_parameters",
}  # fmt: skip
"""Field of peft's LoraConfig -> name of our key below the model's section."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""An ``init_lora_weights`` that begins with one of these also changes the base, so its adapters do not fit the base in the
model's folder."""


ASKS_NOTHING = (
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "bias",
    "lora_dropout", "fan_in_fan_out", "init_lora_weights", "megatron_config", "megatron_core", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying", "layers_pattern",
)  # fmt: skip
"""Other fields of LoraConfig. Trained adapters do not compute with them, or :func:`not_here` checks them one by one."""


def settings_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the LoRA settings of a peft LoraConfig by our names, without those that are null."""
    found = {ours: config[name] for name, ours in PEFT.items() if config.get(name) is not None}
    if found.get("target_parameters"):
        # With these peft adapts no layers of mixtures unless it is told to.
        found.setdefault("target_modules", [])
    return found


def not_here(config: Mapping[str, Any]) -> list[str]:
    """List the settings of a peft LoraConfig that are not supported, each with its reason."""
    found = [f"{name}={config[name]!r:.60}: {reason}" for name, reason in NOT_HERE.items() if config.get(name)]
    handled = {*PEFT, *NOT_HERE, *ASKS_NOTHING}
    found += [f"{name}={value!r:.60}: it is not supported" for name, value in config.items() if value and name not in handled]
    kind, start, bias = (config.get(name) for name in ("peft_type", "init_lora_weights", "bias"))
    if kind is not None and str(getattr(kind, "value", kind)) != "LORA":
        found.append(f"peft_type={getattr(kind, 'value', kind)}: only LORA is supported")
    if isinstance(start, str) and start.startswith(CHANGES_BASE):
        found.append(f"init_lora_weights={start}: it also changes the base. Convert the adapters to plain ones with peft")
    if bias not in (None, "none"):
        found.append(f"bias={bias}: biases of the base stay frozen")
    return found


SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM supports. An adapter of another rank is padded with zeros to the next larger one."""


def slot_rank(rank: int) -> int:
    return next(size for size in SLOT_RANKS if size >= rank)


def base_rests_as_computed(lora_rank: int, fsdp: TrainedFsdp, whole: bool) -> bool:
    """Return whether the frozen base rests in the compute dtype, so that only the adapters rest in ``model_dtype``.

    Nothing updates the base, so it needs no more digits than compute uses. If ``model_dtype`` has fewer digits, the base rests in
    it too. ``whole``: each device holds the whole base, because there is only one device, or because the base is the engine's
    weights. Otherwise FSDP2 casts all parameters of a unit from one dtype.
    """
    masters_have_enough = fsdp.model_dtype in ("fp32", fsdp.dtype)
    return lora_rank > 0 and whole and not fsdp.offload_policy and masters_have_enough


def _adapts(settings: Settings) -> bool:
    return settings.actor_rollout_ref.model.lora_rank > 0


def _has_another_reference(settings: Settings) -> bool:
    roles = settings.actor_rollout_ref
    return _adapts(settings) and needs_reference(settings) and roles.ref.model.path != roles.model.path


EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
"""Names of the weights of all experts of a block, in the order of transformers."""


def matches(name: str, endings: Sequence[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def expert_weights(mixture: MixtureSize, layers: int, weight: str) -> list[str]:
    """Return the names of a weight of experts, one of :data:`EXPERT_WEIGHTS`, in all blocks that have experts."""
    owner = "experts" if mixture.beside else "mlp.experts"
    return [f"model.layers.{layer}.{owner}.{weight}" for layer in range(mixture.dense[0], layers)]


def expert_adapter_params(shapes: Shapes) -> int:
    """Return the number of parameters in the adapters of experts of all blocks."""
    mixture, model = shapes.mixture, shapes.settings.model
    if mixture is None or not model.target_parameters:
        return 0
    sides = (shapes.hidden + 2 * mixture.width, mixture.width + shapes.hidden)
    adapted = sum(
        sum(matches(name, model.target_parameters) for name in expert_weights(mixture, shapes.layers, weight)) * side
        for weight, side in zip(EXPERT_WEIGHTS, sides, strict=True)
    )
    return model.lora_rank * mixture.experts * adapted


def adapter_params(shapes: Shapes) -> int:
    of_experts, model = expert_adapter_params(shapes), shapes.settings.model
    if model.target_parameters and not model.target_modules:
        return of_experts
    if shapes.local is not None:
        in_blocks = sum(adapter_params(replace(of_kind, layers=count)) for count, of_kind in shapes.kinds)
        # The projection that makes the inputs of all layers is outside of the blocks.
        inputs = shapes.hidden + shapes.layers * shapes.layer_inputs if shapes.layer_inputs else 0
        return in_blocks + model.lora_rank * inputs
    h, mlp, query, key = shapes.hidden, shapes.mlp, shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    pairs = 0 if shapes.is_reading else 1 if shapes.keys_are_values else 2
    sides = 2 * (h + query) + pairs * (h + key) + (query if shapes.gated else 0)
    sides += 2 * (h + shapes.layer_inputs) if shapes.layer_inputs else 0
    linear, rule = 0, shapes.rule
    if rule is not None:
        linear = 5 * h + 2 * (rule.keys + rule.value_heads) + 3 * rule.values
    attention_layers = shapes.layers - shapes.linear_layers
    of_mlps = shapes.layers * 3 * (h + mlp)
    if shapes.mixture is not None and not shapes.mixture.beside:
        # Of a mixture the shared expert and its gate have adapters.
        shared, (dense, width) = shapes.mixture.shared, shapes.mixture.dense
        of_shared = (3 * (h + shared) + shapes.mixture.shared_gate * (h + 1)) * (shared > 0)
        of_mlps = (shapes.layers - dense) * of_shared + dense * 3 * (h + width)
    total = attention_layers * sides + shapes.linear_layers * linear + of_mlps
    return int(model.lora_rank * total) + of_experts


KNOB = Knob(
    cost="low-rank updates only",
    settings={"model": Lora, "ref": LoraReference},
    known_as={
        "use_peft": "actor_rollout_ref.model.lora_rank",
        "use_lora": "actor_rollout_ref.model.lora_rank",
        "lora_r": "actor_rollout_ref.model.lora_rank",
        "lora_target_modules": "actor_rollout_ref.model.target_modules",
        "lora_target_parameters": "actor_rollout_ref.model.target_parameters",
        "lora_dropout": "actor_rollout_ref.model.lora_rank (LoRA has no dropout here)",
    },
    refuses=(
        Refusal(
            (_RANK, _REFERENCE),
            _has_another_reference,
            "with LoRA the reference is the policy's own base, with the adapters that training started from",
            f"Leave {_REFERENCE} out, or set {_RANK}=0.",
        ),
        Refusal(
            (_RANK, _QUANTIZATION),
            lambda settings: _adapts(settings) and settings.actor_rollout_ref.ref.quantization != "none",
            "with LoRA the reference is the policy's own base",
            f"Leave {_QUANTIZATION} out.",
        ),
        Refusal(
            (_RANK, _PATH),
            lambda settings: not _adapts(settings) and settings.actor_rollout_ref.model.lora_adapter_path is not None,
            "adapters are given, but rank 0 means that there are none",
            f"Set {_RANK} to their rank, or give a folder with adapter_config.json.",
        ),
    ),
    claims=(
        Claim(
            "update_actor", "params", lambda before, after: before.reference_bytes - after.master_bytes * adapter_params(after)
        ),
        Claim("update_actor", "grads", lambda before, after: before.gradient_bytes * (before.params - adapter_params(after))),
        Claim("update_actor", "optimizer", lambda before, after: before.state_bytes * (before.params - adapter_params(after))),
    ),
    row=LadderRow(210, on=(f"{_RANK}=8",), off=(f"{_RANK}=0",), on_top_of="rollout_memory"),
)
