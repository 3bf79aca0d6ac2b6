"""Choose how weights are loaded: each rank reads its shards, or a frozen model stays in its memory-mapped file.

Use it when: a reference, or the frozen model of a recipe, rests on the host (``param_offload``) and host memory is short.
Saves: with ``mmap``, the host buffer that would hold the frozen model. With either mode no rank loads more of a model than its
    shard.
Costs: the system may drop pages of the file from memory and read them again from disk. Copies to the device are slower, because a
    mapped file is not page-locked.
Works with: ``ref.fsdp_config.param_offload``, which it needs, and a ``ref.fsdp_config.model_dtype`` equal to the dtype of the
    files. It refuses ``ref.quantization``, and mixtures whose files store experts one by one or turned. It also refuses LoRA and
    ``offload_policy``, unless the frozen model of a recipe rests on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from verl_memopt.memory.knob import Claim, Knob, LadderRow, Refusal, has_own_teacher, needs_reference
from verl_memopt.recipes import RECIPES

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

_KEY, _RANK = "actor_rollout_ref.model.load_mode", "actor_rollout_ref.model.lora_rank"
_OFFLOAD, _NATIVE = (f"actor_rollout_ref.ref.fsdp_config.{name}" for name in ("param_offload", "offload_policy"))
_QUANTIZATION = "actor_rollout_ref.ref.quantization"


@dataclass(frozen=True)
class LoadMode:
    load_mode: Literal["stream", "mmap"] = "stream"
    """stream = each rank reads its own shards, tensor by tensor; mmap = a frozen model that rests on the host (a reference, or
    the model of a recipe) stays in its memory-mapped safetensors files and takes no host buffer."""


def _maps(settings: Settings) -> bool:
    return settings.actor_rollout_ref.model.load_mode == "mmap"


def _recipe_rests(settings: Settings) -> bool:
    reward, model = settings.reward_model, settings.reward_model.model
    names_one = reward.enable and reward.reward_manager in RECIPES and model.path is not None
    return names_one and bool(model.fsdp_config.param_offload)


def _adapts(settings: Settings) -> bool:
    return settings.actor_rollout_ref.model.lora_rank > 0


_is_native = attrgetter(_NATIVE)


def _without_frozen(settings: Settings) -> bool:
    # Whether no frozen model rests on the host. LoRA and offload_policy are left out, because rules of their own refuse them.
    offloaded = settings.actor_rollout_ref.ref.fsdp_config.param_offload
    rests = (offloaded and needs_reference(settings)) or _recipe_rests(settings)
    rests = rests or (has_own_teacher(settings) and bool(settings.teacher.fsdp_config.param_offload))
    return _maps(settings) and not (rests or _adapts(settings) or _is_native(settings))


KNOB = Knob(
    cost="reads from disk",
    settings={"policy_model": LoadMode},
    same_numbers=True,
    refuses=(
        Refusal(
            (_KEY, _RANK),
            lambda settings: _maps(settings) and _adapts(settings) and not _recipe_rests(settings),
            "with LoRA the reference is the policy's own base, so no model could stay in a mapped file",
            f"Set {_KEY}=stream.",
        ),
        Refusal(
            (_KEY, _NATIVE),
            lambda settings: _maps(settings) and _is_native(settings) and not _adapts(settings) and not _recipe_rests(settings),
            "with offload_policy the reference stays in a host buffer, so no model could stay in a mapped file",
            f"Set {_OFFLOAD}=true in place of offload_policy, or {_KEY}=stream.",
        ),
        Refusal(
            (_KEY, _OFFLOAD),
            _without_frozen,
            "a mapped file holds a reference that rests on the host, and there is none",
            f"Set {_OFFLOAD}=true and use a KL, which needs a reference, or set {_KEY}=stream.",
        ),
        Refusal(
            (_KEY, _QUANTIZATION),
            lambda settings: _maps(settings) and settings.actor_rollout_ref.ref.quantization != "none",
            "the mapped file holds the unquantised weights",
            f"Set {_KEY}=stream.",
        ),
        Refusal(
            (_KEY, "reward_model.model.quantization"),
            lambda settings: _maps(settings) and settings.reward_model.model.quantization != "none" and _recipe_rests(settings),
            "the model of the recipe would stay in its mapped file, which holds unquantised weights",
            f"Set {_KEY}=stream, or reward_model.model.fsdp_config.param_offload=false.",
        ),
    ),
    claims=(Claim("update_actor", "host buffers", lambda _, after: after.reference_bytes),),
    row=LadderRow(230, on=(f"{_KEY}=mmap",), off=(f"{_KEY}=stream",), on_top_of="param_offload"),
)
