"""Keep optimizer state in host memory; it passes over the device bucket by bucket inside the optimizer step.

Use it when: optimizer state is the peak, before you lower its precision.
Saves: the whole optimizer state (8 bytes a parameter in fp32) outside the step, and all but three buckets in it.
Costs: as many bytes of host memory, and the state over the bus both ways once per optimizer step.
Works with: ``optim.state_dtype`` (fewer bytes to carry), ``param_offload``, ``optim.in_backward``; large mini-batches, since it
    is paid once per optimizer step.
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
    """Optimizer state rests in one host buffer and streams through the device inside the optimizer step only: 8 bytes a
    parameter (fp32 moments) leave the device."""


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
