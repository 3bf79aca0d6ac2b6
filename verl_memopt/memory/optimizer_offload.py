"""Keep optimizer state in host memory. Inside the optimizer step it passes over the device bucket by bucket.

Use it when: optimizer state sets the memory peak. Try this before you lower the precision of the state.
Saves: the whole optimizer state (8 bytes per parameter in fp32) outside the optimizer step, and all but three buckets of it
    inside the step.
Costs: as many bytes of host memory, and two copies of the state per optimizer step: to the device and back.
Works with: ``optim.state_dtype`` (fewer bytes to copy), ``param_offload``, ``optim.in_backward``, and large mini-batches, because
    the state is copied once per optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from verl_memopt.memory.bucketed_adamw import only_with_adamw
from verl_memopt.memory.knob import Advice, Claim, Knob, LadderRow
from verl_memopt.memory.native_offload import not_beside_native_offload

_KEY = "actor_rollout_ref.actor.fsdp_config.optimizer_offload"


@dataclass(frozen=True)
class OptimizerOffload:
    optimizer_offload: bool = False
    """Keep optimizer state in one host buffer, and stream it through the device only inside the optimizer step. This saves 8
    bytes per parameter (fp32 moments) on the device."""


_offloads = attrgetter(_KEY)


KNOB = Knob(
    cost="host memory, copies per step",
    settings={"trained_fsdp": OptimizerOffload},
    known_as={"offload_optimizer": "actor_rollout_ref.actor.fsdp_config.optimizer_offload"},
    refuses=(*only_with_adamw(_KEY, _offloads), not_beside_native_offload("actor", "optimizer_offload", _offloads)),
    advice=(Advice("optimizer", _KEY, True),),
    claims=(Claim("update_actor", "optimizer", lambda before, _: before.state_bytes * before.params),),
    row=LadderRow(110, on=(f"{_KEY}=true",), off=(f"{_KEY}=false",)),
)
