"""Move what a forward saves for its backward to host memory, and fetch it back in time (activation offload).

Use it when: activations are the peak although checkpointing is on, and host memory is free.
Saves: with checkpointing, the inputs of all blocks but those whose copies are under way. Nothing is saved where a micro-batch is
    so small that gradients, and not activations, set the peak.
Costs: as many bytes of host memory, and a copy each way. Copies hide behind compute where blocks are checkpointed; without
    checkpointing they do not.
Works with: activation checkpointing, several micro-batches per optimizer step, and ``memory.host_limit_gb``.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_memopt.memory.formulas import activation_saving
from verl_memopt.memory.knob import Advice, Claim, Factor, Knob, LadderRow, NaturalInt, PositiveInt, UnusedKey

_MODEL = "actor_rollout_ref.model"
_ON, _LEAST, _IN_FLIGHT = (
    f"{_MODEL}.{key}" for key in ("enable_activation_offload", "activation_offload_min_bytes", "activation_offload_in_flight")
)


@dataclass(frozen=True)
class ActivationOffload:
    """Settings of activation offload."""

    enable_activation_offload: bool = False
    """What a forward saves for its backward rests in host buffers in between, with or without gradient checkpointing."""
    activation_offload_min_bytes: NaturalInt = 1048576
    """Smaller tensors stay on the device: a copy of its own would cost more than they take."""
    activation_offload_in_flight: PositiveInt = 2
    """Tensors whose copies may be under way at once, either way; more hides copies better and holds as many on the device."""

    @property
    def in_flight(self) -> int | None:
        """Tensors whose copies may be under way at once; None where activations stay on the device."""
        return self.activation_offload_in_flight if self.enable_activation_offload else None


KNOB = Knob(
    cost="host memory, copies",
    settings={"model": ActivationOffload},
    same_numbers=True,
    known_as={"activation_offloading": "actor_rollout_ref.model.enable_activation_offload"},
    unused_keys=tuple(
        UnusedKey(
            key, lambda settings: settings.actor_rollout_ref.model.in_flight is None, "model.enable_activation_offload is false"
        )
        for key in (_LEAST, _IN_FLIGHT)
    ),
    advice=(Advice("activations", _ON, True, phases=("update_actor",)),),
    claims=(Claim("update_actor", "activations", activation_saving),),
    row=LadderRow(90, on=(f"{_ON}=true",), off=(f"{_ON}=false",)),
    factors=(
        Factor(
            "activation offload",
            {"off": {}, "on": {_ON: True, _LEAST: 64}, "one in flight": {_ON: True, _LEAST: 1024, _IN_FLIGHT: 1}},
        ),
    ),
)
