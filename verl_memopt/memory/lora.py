"""Train low-rank adapters on a frozen base (LoRA); the reference is the same model with its adapters off.

Use it when: gradients and optimizer state do not fit, and low-rank training is good enough.
Saves: gradients and optimizer state of all frozen parameters (12 bytes each with fp32 AdamW), and the second model of a KL.
Costs: two thin products per layer. An engine that shares the base computes them too; another gets merged weights, one tensor at
    a time.
Works with: ``rollout.share_weights``, ``model.quantization`` of the base, checkpointing, every packing knob. On one device, and
    on several that share the base with their engines, it rests in the precision that computes. It refuses a reference of another
    path, and ``ref.quantization``. Source: arXiv 2106.09685.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_memopt.memory.formulas import Shapes
from verl_memopt.memory.knob import Claim, Factor, Knob, LadderRow, NaturalInt, PositiveFloat, Refusal, needs_reference

if TYPE_CHECKING:
    from verl_memopt.config.role_settings import TrainedFsdp
    from verl_memopt.config.schema import Settings

_MODEL = "actor_rollout_ref.model"
_RANK, _ALPHA, _TARGETS, _EXCLUDED, _PATH = (
    f"{_MODEL}.{key}" for key in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
)
_SOME = {_RANK: 2, _ALPHA: 8, _TARGETS: ["q_proj", "k_proj", "o_proj"], _EXCLUDED: ["k_proj"]}
_REFERENCE, _QUANTIZATION = "actor_rollout_ref.ref.model.path", "actor_rollout_ref.ref.quantization"


@dataclass(frozen=True)
class Lora:
    """Settings of LoRA."""

    lora_rank: NaturalInt = 0
    """Rank of the adapters of a frozen base; 0 = train every weight. Use it when gradients and optimizer do not fit. If it is not
    given, it comes from the ``adapter_config.json`` of ``lora_adapter_path``, with the other LoRA settings that are not given."""
    lora_alpha: PositiveFloat = 16
    """Adapters are scaled by lora_alpha / lora_rank."""
    target_modules: Any = "all-linear"
    """Layers with an adapter: all-linear (all but the head), a list of name endings, or a regular expression."""
    exclude_modules: Any = None
    """Layers left out: a list of name endings or a regular expression."""
    lora_adapter_path: str | None = None
    """Folder in the peft format to start the adapters from."""


SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM has room. An adapter of another rank is filled up with zeros."""


def slot_rank(rank: int) -> int:
    """Return the rank for which an engine that shares the base makes room: the next one that vLLM has."""
    return next(size for size in SLOT_RANKS if size >= rank)


def base_rests_as_computed(lora_rank: int, fsdp: TrainedFsdp, whole: bool) -> bool:
    """Return whether the frozen base rests in the dtype that computes, and only the adapters in that of the masters.

    Nothing updates the base, so it needs no more digits than compute has. If the masters have fewer digits than compute, the base
    rests as they do. ``whole``: each device holds all of the base, because there is one device, or because the engine's weights
    are the base. Elsewhere FSDP2 casts the masters of a whole unit.
    """
    masters_have_enough = fsdp.model_dtype in ("fp32", fsdp.dtype)
    return lora_rank > 0 and whole and not fsdp.offload_policy and masters_have_enough


def _adapts(settings: Settings) -> bool:
    return settings.actor_rollout_ref.model.lora_rank > 0


def _has_another_reference(settings: Settings) -> bool:
    roles = settings.actor_rollout_ref
    return _adapts(settings) and needs_reference(settings) and roles.ref.model.path != roles.model.path


def adapter_params(shapes: Shapes) -> int:
    """Return the parameters of adapters on every linear layer of Qwen3's blocks."""
    h, mlp, query, key = shapes.hidden, shapes.mlp, shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    sides = 2 * (h + query) + 2 * (h + key) + 3 * (h + mlp)
    return int(shapes.layers * shapes.settings.model.lora_rank * sides)


KNOB = Knob(
    cost="low-rank updates only",
    settings={"model": Lora},
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
            "with LoRA the reference is the base with its adapters off",
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
    factors=(Factor("lora", {"off": {_RANK: 0}, "all": {_RANK: 4}, "some": _SOME}, lossy=True),),
    no_factor={_PATH: "names a file to start from"},
)
