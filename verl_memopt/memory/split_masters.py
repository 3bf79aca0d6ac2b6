"""Store each fp32 master weight as the bfloat16 weight that computes, and a 16-bit remainder in the optimizer's state.

Use it when: master weights are in fp32 and compute is in bfloat16, on one device, or on several devices that share weights with
    their engines. An engine can share the weights of such a run only with this knob.
Saves: the bfloat16 copies of the units that compute. With ``optimizer_offload`` also 2 bytes per parameter, because the
    remainder rests on the host. ``mixed_precision.reduce_dtype=bfloat16`` halves the gradients as well.
Costs: nothing: both halves together give the fp32 master weight bit for bit. A weight exactly between two bfloat16 numbers
    computes as the one farther from zero; a cast would take the even one.
Works with: ``optimizer_offload``, ``optim.state_dtype``, ``optim.in_backward``, ``rollout.share_weights``. A checkpoint holds
    whole master weights, so a run may resume with or without it. It refuses LoRA, ``offload_policy``, and several devices without
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
    """Store each fp32 master weight as its bfloat16 weight and a 16-bit remainder in the optimizer's state, bit for bit. Compute
    then needs no gathered copy, and with ``optimizer_offload`` 2 bytes per parameter leave the device. For ``model_dtype=fp32``
    with ``dtype=bfloat16``, on one device or with ``rollout.share_weights=true``."""


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
            "only fp32 master weights that compute in bfloat16 have a remainder",
            f"Set {_MASTERS}=fp32 and {_COMPUTE}=bfloat16",
        ),
        _refused(
            (*DEVICES, shared_weights.KEY),
            _is_sharded,
            "on several devices FSDP2 shards master weights and reduces gradients into their dtype, unless the policy shares "
            "its weights with the engines",
            f"Use one device, or for the policy {shared_weights.KEY}=true",
        ),
        _refused((_NATIVE,), attrgetter(_NATIVE), "master weights live whole on the host", f"Set {_NATIVE}=false"),
        _refused(
            (_RANK,),
            lambda settings: bool(attrgetter(_RANK)(settings)),
            "with LoRA only adapters have master weights",
            f"Set {_RANK}=0",
        ),
    ),
    claims=(
        Claim("update_actor", "params", lambda before, after: (before.master_bytes - after.master_bytes) * after.params),
        Claim("update_actor", "optimizer", lambda before, after: (before.state_bytes - after.state_bytes) * after.params),
    ),
    row=LadderRow(
        240, on=(f"{KEY}=true", f"{_COMPUTE}=bfloat16"), off=(f"{KEY}=false", f"{_COMPUTE}=fp32"), on_top_of="bucketed_adamw"
    ),
)
