"""Use FSDP2's own CPU offload: parameters, gradients and optimizer state live on the host, and the optimizer runs there.

Use it when: nothing else makes the model fit. ``param_offload`` with ``optimizer_offload`` copies less and is faster.
Saves: all training state on the device (16 bytes per parameter with fp32 AdamW). Parameters that are gathered for compute still
    take device memory.
Costs: as many bytes of host memory. Every gather copies weights to the device, every gradient is copied back, and the optimizer
    step runs at the speed of the CPU.
Works with: few, large micro-batches. It refuses ``param_offload`` and ``optimizer_offload``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl_memopt.memory.knob import BUILT, Claim, Knob, LadderRow, Predicate, Refusal, fsdp_of

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

_KEYS = tuple(f"actor_rollout_ref.{role}.fsdp_config.offload_policy" for role in ("actor", "ref"))


@dataclass(frozen=True)
class NativeOffload:
    offload_policy: bool = False
    """Use FSDP2's own CPU offload: parameters, gradients and optimizer state live on the host, and the optimizer runs on the CPU.
    It is the last resort, and cannot be combined with ``param_offload`` or ``optimizer_offload``."""


def not_beside_native_offload(role: Literal["actor", "ref", "teacher"], name: str, is_on: Predicate) -> Refusal:
    prefix = "teacher.fsdp_config" if role == "teacher" else f"actor_rollout_ref.{role}.fsdp_config"

    def both(settings: Settings) -> bool:
        both_on = fsdp_of(settings, role).offload_policy and is_on(settings)
        return both_on and (role == "actor" or BUILT[role](settings))

    return Refusal(
        (f"{prefix}.offload_policy", f"{prefix}.{name}"),
        both,
        "offload_policy already keeps parameters and optimizer state on the host",
        f"Set one of the two to false; {name} is faster than offload_policy.",
    )


KNOB = Knob(
    cost="host memory, slow steps",
    settings={"fsdp": NativeOffload},
    refuses=(
        not_beside_native_offload("actor", "param_offload", lambda settings: bool(fsdp_of(settings, "actor").param_offload)),
        not_beside_native_offload("ref", "param_offload", lambda settings: bool(fsdp_of(settings, "ref").param_offload)),
        not_beside_native_offload("teacher", "param_offload", lambda settings: bool(fsdp_of(settings, "teacher").param_offload)),
    ),
    claims=(
        Claim("update_actor", "params", lambda before, _: before.params * before.master_bytes + before.reference_bytes),
        Claim("update_actor", "optimizer", lambda before, _: before.state_bytes * before.params),
    ),
    row=LadderRow(
        200, on=tuple(f"{key}=true" for key in _KEYS), off=tuple(f"{key}=false" for key in _KEYS), on_top_of="rollout_memory"
    ),
)
