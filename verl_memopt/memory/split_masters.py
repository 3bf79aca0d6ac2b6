"""Store fp32 masters as the bfloat16 weight they are computed with, and a 16-bit remainder in the optimizer's state.

Use it when: masters are in fp32 and compute in bfloat16, on one device, or on several that share weights with their engines. It
    is what lets the engine share the weights then.
Saves: the bfloat16 copies and reduction buffers that FSDP2 makes on one device, and with ``optimizer_offload`` 2 bytes a
    parameter, since the remainder rests on the host. ``mixed_precision.reduce_dtype=bfloat16`` halves the gradients as well.
Costs: nothing: a master is joined from both halves bit for bit. A weight exactly between two bfloat16 numbers is rounded away
    from zero, where a cast takes the even one.
Works with: ``optimizer_offload``, ``optim.state_dtype``, ``optim.in_backward``, ``rollout.share_weights``. A checkpoint holds
    whole masters, and resumes with or without it. It refuses LoRA, ``offload_policy``, and several devices without
    ``rollout.share_weights=true``. Source: arXiv 2602.23349.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from verl_memopt.memory import shared_weights
from verl_memopt.memory.bucketed_adamw import only_with_adamw
from verl_memopt.memory.critic_rules import is_critic
from verl_memopt.memory.knob import DEVICES, Claim, Knob, LadderRow, Predicate, Refusal, num_devices

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

_FSDP = "actor_rollout_ref.actor.fsdp_config"
KEY = f"{_FSDP}.split_master_weights"
_MASTERS, _COMPUTE, _NATIVE = (f"{_FSDP}.{name}" for name in ("model_dtype", "dtype", "offload_policy"))
_RANK = "actor_rollout_ref.model.lora_rank"


@dataclass(frozen=True)
class SplitMasters:
    split_master_weights: bool = False
    """fp32 masters rest as the bfloat16 weight and a 16-bit remainder in the optimizer's state, bit for bit. No copy is gathered
    for compute, and with ``optimizer_offload`` 2 bytes a parameter leave the device. For ``model_dtype=fp32`` with
    ``dtype=bfloat16``, on one device or with ``rollout.share_weights=true``."""


_splits = attrgetter(KEY)


def _refused(keys: tuple[str, ...], when: Predicate, because: str, way_out: str) -> Refusal:
    return Refusal((KEY, *keys), lambda settings: _splits(settings) and when(settings), because, f"{way_out}, or {KEY}=false.")


def _is_sharded(settings: Settings) -> bool:
    shares = attrgetter(shared_weights.KEY)(settings) is True and not is_critic(settings)
    return num_devices(settings) > 1 and not shares


def _is_other_precision(settings: object) -> bool:
    return (attrgetter(_MASTERS)(settings), attrgetter(_COMPUTE)(settings)) != ("fp32", "bfloat16")


KNOB = Knob(
    cost="ties round away from zero",
    settings={"trained_fsdp": SplitMasters},
    refuses=(
        *only_with_adamw(KEY, _splits),
        _refused(
            (_MASTERS, _COMPUTE),
            _is_other_precision,
            "only fp32 masters of bfloat16 weights have a remainder",
            f"Set {_MASTERS}=fp32 and {_COMPUTE}=bfloat16",
        ),
        _refused(
            (*DEVICES, shared_weights.KEY),
            _is_sharded,
            "over several devices FSDP2 shards masters, and reduces gradients into their dtype, unless the policy shares its "
            "weights with the engines",
            f"Use one device, or for the policy {shared_weights.KEY}=true",
        ),
        _refused((_NATIVE,), attrgetter(_NATIVE), "masters live on the host whole", f"Set {_NATIVE}=false"),
        _refused((_RANK,), lambda settings: bool(attrgetter(_RANK)(settings)), "adapters alone have masters", f"Set {_RANK}=0"),
    ),
    claims=(
        Claim("update_actor", "params", lambda before, after: (before.master_bytes - after.master_bytes) * after.params),
        Claim("update_actor", "optimizer", lambda before, after: (before.state_bytes - after.state_bytes) * after.params),
    ),
    row=LadderRow(
        240, on=(f"{KEY}=true", f"{_COMPUTE}=bfloat16"), off=(f"{KEY}=false", f"{_COMPUTE}=fp32"), on_top_of="bucketed_adamw"
    ),
)
