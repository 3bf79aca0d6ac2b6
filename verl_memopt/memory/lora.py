"""Train low-rank adapters on a frozen base (LoRA); the reference is the same model with the adapters it started from.

Use it when: gradients and optimizer state do not fit, and low-rank training is good enough.
Saves: gradients and optimizer state of all frozen parameters (12 bytes each with fp32 AdamW), and the second model of a KL.
Costs: two thin products per layer. An engine that shares the base computes them too; another gets merged weights, one tensor at
    a time.
Works with: ``rollout.share_weights``, ``model.quantization`` of the base, checkpointing, every packing knob. On one device, and
    on several that share the base with their engines, it rests in the precision that computes. It refuses a reference of another
    path, and ``ref.quantization``. Source: arXiv 2106.09685.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from verl_memopt.memory.knob import Claim, Knob, LadderRow, NaturalInt, PositiveFloat, Refusal, needs_reference

if TYPE_CHECKING:
    from verl_memopt.config.role_settings import TrainedFsdp
    from verl_memopt.config.schema import Settings
    from verl_memopt.plan.formulas import Shapes

_MODEL = "actor_rollout_ref.model"
_RANK, _PATH = f"{_MODEL}.lora_rank", f"{_MODEL}.lora_adapter_path"
_REFERENCE, _QUANTIZATION = "actor_rollout_ref.ref.model.path", "actor_rollout_ref.ref.quantization"


@dataclass(frozen=True)
class Lora:
    lora_rank: NaturalInt = 0
    """Rank of the adapters of a frozen base; 0 = train every weight. Use it when gradients and optimizer do not fit. If it is not
    given, it comes from the ``adapter_config.json`` of ``lora_adapter_path``, with the other LoRA settings that are not given."""
    lora_alpha: PositiveFloat = 16
    """Adapters are scaled by lora_alpha / lora_rank."""
    use_rslora: bool = False
    """Scale adapters by lora_alpha / sqrt(lora_rank) instead, so that a large rank learns as fast as a small one (rsLoRA, arXiv
    2312.03732)."""
    target_modules: Any = "all-linear"
    """Layers with an adapter: all-linear (all but the head), a list of name endings, or a regular expression. A name that no
    layer has is an error."""
    exclude_modules: Any = None
    """Layers left out: a list of name endings or a regular expression. A name that no part of the model has is an error."""
    lora_adapter_path: str | None = None
    """Folder in the peft format to start the adapters from. A KL's reference starts from it too (``ref.adapter``)."""

    @property
    def lora_scale(self) -> float:
        return adapter_scale(self.lora_rank, self.lora_alpha, self.use_rslora) if self.lora_rank else 0.0


def adapter_scale(rank: int, alpha: float, use_rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if use_rslora else rank)


@dataclass(frozen=True)
class LoraReference:
    adapter: Literal["start", "base"] = "start"
    """With LoRA, the reference is the base with the adapters of ``model.lora_adapter_path`` as training began (start), or the
    base alone (base). Both are the same where training starts without a folder of adapters."""


NOT_HERE = {
    "use_dora": "adapters have no magnitude of their own (DoRA) here",
    "rank_pattern": "all adapters of a model have one rank here",
    "alpha_pattern": "all adapters of a model have one scale here",
    "modules_to_save": (
        "a module that is trained as a whole beside the adapters would be needed twice, as it is and as the reference has it, "
        "and an engine that shares the base has one place for it. Train adapters alone, or all weights (lora_rank=0)"
    ),
    "trainable_token_indices": (
        "rows of the embedding are not trained beside adapters: engine and reference compute with the same embedding. Train "
        "adapters alone, or all weights (lora_rank=0)"
    ),
    "lora_bias": "adapters have no bias here",
    "layers_to_transform": "name layers by a regular expression in target_modules instead",
}
"""Fields of peft's LoraConfig that change what is computed and have no equal here, and why. Empty or false asks for nothing."""
PEFT = {
    "r": "lora_rank", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora", "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
}  # fmt: skip
"""Field of peft's LoraConfig -> name of our key below the model's section."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""How the names of those ``init_lora_weights`` begin that also change the base, so that the adapters belong to other weights."""


ASKS_NOTHING = (
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "bias",
    "lora_dropout", "fan_in_fan_out", "init_lora_weights", "megatron_config", "megatron_core", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying", "layers_pattern",
)  # fmt: skip
"""Other fields, which trained adapters do not compute with, or which are looked at by themselves."""


def not_here(config: Mapping[str, Any]) -> list[str]:
    """List what a peft LoraConfig asks for that is not supported, each with its reason."""
    found = [f"{name}={config[name]!r:.60}: {reason}" for name, reason in NOT_HERE.items() if config.get(name)]
    handled = {*PEFT, *NOT_HERE, *ASKS_NOTHING}
    found += [f"{name}={value!r:.60}: it has no equal here" for name, value in config.items() if value and name not in handled]
    kind, start, bias = (config.get(name) for name in ("peft_type", "init_lora_weights", "bias"))
    if kind is not None and str(getattr(kind, "value", kind)) != "LORA":
        found.append(f"peft_type={getattr(kind, 'value', kind)}: LORA is the one kind")
    if isinstance(start, str) and start.startswith(CHANGES_BASE):
        found.append(f"init_lora_weights={start}: it changes the base too. Convert the adapters to plain ones with peft")
    if bias not in (None, "none"):
        found.append(f"bias={bias}: biases of the base stay frozen")
    return found


SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM has room. An adapter of another rank is filled up with zeros."""


def slot_rank(rank: int) -> int:
    return next(size for size in SLOT_RANKS if size >= rank)


def base_rests_as_computed(lora_rank: int, fsdp: TrainedFsdp, whole: bool) -> bool:
    """Return whether the frozen base rests in the compute dtype, and only the adapters in the masters' dtype.

    Nothing updates the base, so it needs no more digits than compute uses. If the masters have fewer, the base rests as they do.
    ``whole``: each device holds all of the base, because there is one device, or because the engine's weights are the base.
    Elsewhere FSDP2 casts the masters of a whole unit.
    """
    masters_have_enough = fsdp.model_dtype in ("fp32", fsdp.dtype)
    return lora_rank > 0 and whole and not fsdp.offload_policy and masters_have_enough


def _adapts(settings: Settings) -> bool:
    return settings.actor_rollout_ref.model.lora_rank > 0


def _has_another_reference(settings: Settings) -> bool:
    roles = settings.actor_rollout_ref
    return _adapts(settings) and needs_reference(settings) and roles.ref.model.path != roles.model.path


def adapter_params(shapes: Shapes) -> int:
    h, mlp, query, key = shapes.hidden, shapes.mlp, shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    sides = 2 * (h + query) + 2 * (h + key) + 3 * (h + mlp)
    return int(shapes.layers * shapes.settings.model.lora_rank * sides)


KNOB = Knob(
    cost="low-rank updates only",
    settings={"model": Lora, "ref": LoraReference},
    known_as={
        "use_peft": "actor_rollout_ref.model.lora_rank",
        "use_lora": "actor_rollout_ref.model.lora_rank",
        "lora_r": "actor_rollout_ref.model.lora_rank",
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
            "adapters are given and none are asked for",
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
