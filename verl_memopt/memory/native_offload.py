"""FSDP2's own CPU offload: parameters, gradients and optimizer state live on the host, and the optimizer steps there.

Use it when: nothing else makes the model fit. ``param_offload`` with ``optimizer_offload`` moves less and is faster.
Saves: all training state (16 bytes a parameter with fp32 AdamW). What is gathered for compute stays on the device.
Costs: as many bytes of host memory, the weights over the bus at every gather, the gradients back, and an optimizer step at the
    host's speed.
Works with: few, large micro-batches. It refuses ``param_offload`` and ``optimizer_offload``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl_memopt.memory.knob import Claim, Knob, LadderRow, Predicate, Refusal, fsdp_of, needs_reference

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

_KEYS = tuple(f"actor_rollout_ref.{role}.fsdp_config.offload_policy" for role in ("actor", "ref"))


@dataclass(frozen=True)
class NativeOffload:
    offload_policy: bool = False
    """FSDP2's own offload: parameters, gradients and optimizer state live on the host, and a CPU optimizer steps there.
    The last resort; not together with ``param_offload`` or ``optimizer_offload``."""


def not_beside_native_offload(role: Literal["actor", "ref"], name: str, is_on: Predicate) -> Refusal:
    prefix = f"actor_rollout_ref.{role}.fsdp_config"

    def both(settings: Settings) -> bool:
        both_on = fsdp_of(settings, role).offload_policy and is_on(settings)
        return both_on and (role == "actor" or needs_reference(settings))

    return Refusal(
        (f"{prefix}.offload_policy", f"{prefix}.{name}"),
        both,
        "with offload_policy parameters and optimizer state never leave the host",
        f"Set one of the two to false; {name} is the faster one.",
    )


KNOB = Knob(
    cost="host memory, slow steps",
    settings={"fsdp": NativeOffload},
    refuses=(
        not_beside_native_offload("actor", "param_offload", lambda settings: bool(fsdp_of(settings, "actor").param_offload)),
        not_beside_native_offload("ref", "param_offload", lambda settings: bool(fsdp_of(settings, "ref").param_offload)),
    ),
    claims=(
        Claim("update_actor", "params", lambda before, _: before.params * before.master_bytes + before.reference_bytes),
        Claim("update_actor", "optimizer", lambda before, _: before.state_bytes * before.params),
    ),
    row=LadderRow(
        200, on=tuple(f"{key}=true" for key in _KEYS), off=tuple(f"{key}=false" for key in _KEYS), on_top_of="rollout_memory"
    ),
)
