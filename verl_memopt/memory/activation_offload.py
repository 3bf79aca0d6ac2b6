"""Copy what a forward saves for backward to host memory, and copy it back before backward needs it (activation offload).

Use it when: activations set the memory peak although checkpointing is on, and the host has free memory.
Saves: with checkpointing, the inputs of all blocks except those whose copies are under way. It saves nothing where micro-batches
    are so small that gradients set the peak, and not activations.
Costs: as much host memory as it saves on the device, and one copy in each direction. With checkpointing the copies run while the
    device computes. Without checkpointing the device has to wait for them.
Works with: activation checkpointing, several micro-batches per optimizer step, and ``memory.host_limit_gb``, which limits the
    host memory.
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
    """Keep the tensors that a forward saves for backward in host memory until backward needs them, with or without gradient
    checkpointing."""
    activation_offload_min_bytes: NaturalInt = 1048576
    """Tensors smaller than this many bytes stay on the device, because copying them would cost more than it saves."""
    activation_offload_in_flight: PositiveInt = 2
    """How many tensors may be copied at once, in each direction. A larger number hides the copies better, but keeps that many
    tensors on the device."""
    activation_offload_device_gb: Annotated[float, NOT_NEGATIVE] = 0
    """GiB of the saved tensors of each forward that stay on the device: the first tensors, up to the first one that does not fit.
    They take no host memory and need no copies, so set this to the memory that the device has to spare."""

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
