"""Store the frozen base under LoRA adapters in 8 or 4 bits (QLoRA). Trainer and vLLM compute with the same bytes.

Use it when: the frozen base takes most of the device memory, and rounding its weights is acceptable.
Saves: most bytes of the blocks' linear layers and experts, in update and rollout. They take 1.03 bytes per parameter with int8,
    and 0.56 with nf4.
Costs: each matrix product decodes its layer or expert again, in rollouts too. The quantised base differs from the model's base;
    the error is measured when the model is loaded, and logged.
Works with: ``rollout.share_weights`` and every knob of blocks. Embedding, norms, head, routers, small gates and convolutions
    are not quantised. Experts of a folder in MXFP4 keep its bytes. On several devices each device has the whole base, which
    policy and engine share; vLLM shares no experts. On one device, an engine that does not share gets whole weights, decoded
    and with the adapters merged in, and ``param_offload`` can move the quantised bytes. A saved model has the adapters merged
    into the unquantised weights. It refuses ``offload_policy``, training without LoRA, mixtures of experts that transformers
    computes, and several devices that do not share the base. Source: arXiv 2305.14314.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl_memopt.memory import shared_weights
from verl_memopt.memory.knob import DEVICES, Claim, Knob, LadderRow, Refusal, num_devices

if TYPE_CHECKING:
    from verl_memopt.config.schema import Fsdp, Settings
    from verl_memopt.plan.formulas import Shapes

KEY = "actor_rollout_ref.model.quantization"
_RANK, _LOAD = "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.rollout.load_format"
_NATIVE = "actor_rollout_ref.actor.fsdp_config.offload_policy"


@dataclass(frozen=True)
class QuantizedBase:
    quantization: Literal["none", "int8", "nf4"] = "none"
    """Format in which the linear layers and experts of the base rest under LoRA adapters: none, int8 or nf4 (4 bits). It loses
    precision: the error is measured when the model is loaded, and logged."""


def _where(also: Callable[[Settings], bool]) -> Callable[[Settings], bool]:
    return lambda settings: settings.actor_rollout_ref.model.quantization != "none" and also(settings)


def _would_be_sharded(settings: Settings) -> bool:
    devices = num_devices(settings)
    return devices > 1 and shared_weights.why_not(settings.actor_rollout_ref, devices, sleeps=True) is not None


def _packed(shapes: Shapes) -> int:
    return shapes.packed_bytes(shapes.settings.model.quantization)


def experts_stay_packed(lora_rank: int, fsdp: Fsdp, devices: int, shares: bool) -> bool:
    """Return whether experts that a folder stores in MXFP4 rest in these bytes, because they are a frozen base.

    FSDP2 would shard and cast the bytes like weights, so there must be one device without ``offload_policy``, or each device has
    the whole base: ``shares``, the engine computes with the trainer's weights.
    """
    return lora_rank > 0 and (devices == 1 or shares) and not fsdp.offload_policy


KNOB = Knob(
    cost="inexact base, slower products",
    settings={"policy_model": QuantizedBase},
    known_as={
        **dict.fromkeys(("use_qlora", "qlora"), f"{KEY}=nf4"),
        **{
            f"load_in_{bits}bit": f"{KEY}={kind} (or actor_rollout_ref.ref.quantization)"
            for bits, kind in ((4, "nf4"), (8, "int8"))
        },
    },
    refuses=(
        Refusal(
            (KEY, _RANK),
            _where(lambda settings: settings.actor_rollout_ref.model.lora_rank == 0),
            "training steps are too small to change a quantised weight, so a quantised base is frozen and needs adapters",
            f"Set {_RANK}=16, or {KEY}=none.",
        ),
        Refusal(
            (KEY, *DEVICES),
            _where(_would_be_sharded),
            "on several devices FSDP2 would shard the quantised bytes, unless trainer and engines share the weights",
            f"Set {shared_weights.KEY}=true (an error says what prevents it, if anything), use one device, or set {KEY}=none.",
        ),
        Refusal(
            (KEY, _NATIVE),
            _where(lambda settings: settings.actor_rollout_ref.actor.fsdp_config.offload_policy),
            "FSDP2 would copy the quantised bytes from the host as if they had another dtype",
            f"Set {_NATIVE}=false (fsdp_config.param_offload moves the bytes), or {KEY}=none.",
        ),
        Refusal(
            (KEY, _LOAD),
            _where(lambda settings: settings.actor_rollout_ref.rollout.load_format != "dummy"),
            "vLLM would load unquantised weights from the folder, where the trainer fills in quantised bytes",
            f"Set {_LOAD}=dummy.",
        ),
    ),
    claims=(
        Claim("update_actor", "params", lambda before, after: before.compute_bytes * before.quantized_params - _packed(after)),
    ),
    row=LadderRow(211, on=(f"{KEY}=nf4",), off=(f"{KEY}=none",), on_top_of="lora"),
)
