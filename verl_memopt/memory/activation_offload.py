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
from typing import Annotated

from verl_memopt.memory.knob import (
    NOT_NEGATIVE,
    Advice,
    Claim,
    Knob,
    LadderRow,
    NaturalInt,
    PositiveInt,
    UnusedKey,
    activation_saving,
)

_MODEL = "actor_rollout_ref.model"
_ON = f"{_MODEL}.enable_activation_offload"
_LEAST, _IN_FLIGHT, _STAYS = (f"{_MODEL}.activation_offload_{key}" for key in ("min_bytes", "in_flight", "device_gb"))


@dataclass(frozen=True)
class ActivationOffloadSettings:
    enable_activation_offload: bool = False
    """What a forward saves for its backward rests in host buffers in between, with or without gradient checkpointing."""
    activation_offload_min_bytes: NaturalInt = 1048576
    """Smaller tensors stay on the device: a copy of its own would cost more than they take."""
    activation_offload_in_flight: PositiveInt = 2
    """Tensors whose copies may be under way at once, either way; more hides copies better and holds as many on the device."""
    activation_offload_device_gb: Annotated[float, NOT_NEGATIVE] = 0
    """GiB of what each forward saves that stays on the device: the first tensors that fit. Each of them saves as much host memory
    and its two copies over the bus, so set it to what the device has to spare."""

    @property
    def in_flight(self) -> int | None:
        return self.activation_offload_in_flight if self.enable_activation_offload else None


KNOB = Knob(
    cost="host memory, copies",
    settings={"model": ActivationOffloadSettings},
    same_numbers=True,
    known_as={"activation_offloading": "actor_rollout_ref.model.enable_activation_offload"},
    unused_keys=tuple(
        UnusedKey(
            key, lambda settings: settings.actor_rollout_ref.model.in_flight is None, "model.enable_activation_offload is false"
        )
        for key in (_LEAST, _IN_FLIGHT, _STAYS)
    ),
    advice=(
        Advice("activations", _ON, True, phases=("update_actor",)),
        Advice("activations", _STAYS, 0, lambda s: s.actor_rollout_ref.model.in_flight is not None, ("update_actor",)),
    ),
    claims=(Claim("update_actor", "activations", activation_saving),),
    row=LadderRow(90, on=(f"{_ON}=true",), off=(f"{_ON}=false",)),
)
