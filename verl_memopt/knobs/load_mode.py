"""Choose how weights come from their files: streamed shard by shard, or left in the mapped file until the device needs them.

Use it when: a reference rests on the host (``param_offload``) and host memory is short.
Saves: with ``mmap``, the host buffer in which the reference would rest. Either way no rank holds more of a model than its shard.
Costs: the system may drop pages of the file and read them again, and copies cannot come from page-locked memory.
Works with: ``ref.fsdp_config.param_offload``, which it needs, and a ``ref.fsdp_config.model_dtype`` that is the file's. It
    refuses LoRA, ``ref.quantization`` and ``offload_policy``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_memopt.knobs.conditions import KL, needs_reference
from verl_memopt.knobs.knob import Claim, Knob, LadderRow, Refusal, switch

_KEY, _RANK = "actor_rollout_ref.model.load_mode", "actor_rollout_ref.model.lora_rank"
_OFFLOAD, _NATIVE = (f"actor_rollout_ref.ref.fsdp_config.{name}" for name in ("param_offload", "offload_policy"))
_QUANTIZATION = "actor_rollout_ref.ref.quantization"


@dataclass(frozen=True)
class LoadMode:
    """Settings of loading."""

    load_mode: Literal["stream", "mmap"] = "stream"
    """stream = each rank reads its own shards, tensor by tensor; mmap = the reference that rests on the host rests in its
    safetensors file, mapped, and takes no host memory of its own."""


def _without_reference(mode: str, offloaded: bool, rank: int, native: bool, in_reward: bool, in_loss: bool) -> bool:
    """Return whether no reference rests on the host for another reason than LoRA or offload_policy, which are refused above."""
    rests = offloaded and needs_reference(in_reward, in_loss)
    return mode == "mmap" and not (rests or rank > 0 or native)


KNOB = Knob(
    name="load_mode",
    place=230,
    cost="reads from disk",
    settings={"policy_model": LoadMode},
    same_numbers=True,
    refuses=(
        Refusal(
            (_KEY, _RANK),
            lambda mode, rank: mode == "mmap" and rank > 0,
            "with LoRA the reference is the policy's own base, and no other rests in a file",
            f"Set {_KEY}=stream.",
        ),
        Refusal(
            (_KEY, _NATIVE),
            lambda mode, native, rank: mode == "mmap" and native and rank == 0,
            "with offload_policy the reference never leaves its host buffer, and none rests in a file",
            f"Set {_OFFLOAD}=true in place of offload_policy, or {_KEY}=stream.",
            about=(_RANK,),
        ),
        Refusal(
            (_KEY, _OFFLOAD),
            _without_reference,
            "a mapped file is where a reference rests, and no reference rests on the host",
            f"Set {_OFFLOAD}=true (with a KL), or {_KEY}=stream.",
            about=(_RANK, _NATIVE, *KL),
        ),
        Refusal(
            (_KEY, _QUANTIZATION),
            lambda mode, quantization: mode == "mmap" and quantization != "none",
            "the mapped file holds the unquantised weights",
            f"Set {_KEY}=stream.",
        ),
    ),
    claims=(Claim("update_actor", "host buffers", lambda _, after: after.reference_bytes),),
    row=LadderRow(230, on=(f"{_KEY}=mmap",), off=(f"{_KEY}=stream",), on_top_of="param_offload"),
    factors=(switch("load", _KEY, stream="stream", mmap="mmap"),),
)
