"""Update each FSDP unit inside backward, as soon as its gradients are reduced, and free these gradients at once.

Use it when: gradients set the memory peak, and one micro-batch holds a whole mini-batch. With ``optim.clip_grad=null`` it costs
    no time.
Saves: all gradients except those of the largest unit, on the device and on the host. A tied embedding and head have two gradients
    at once in backward, so a model with few layers can hold more gradients than without the knob.
Costs: gradients cannot accumulate over micro-batches. Clipping needs the norm of all gradients before the first weight changes,
    so with ``optim.clip_grad`` forward and backward run twice: first for the norm, then for the update. A gradient that is not
    finite makes clipping skip the step. Without clipping it stops the run if parameters have already changed.
Works with: ``optimizer_offload``, ``optim.state_dtype``, ``optim.stochastic_rounding``, clipping, and a token budget that holds a
    whole mini-batch at once. LOMO clips in the same way (arXiv 2306.09782).
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from verl_memopt.memory.bucketed_adamw import only_with_adamw
from verl_memopt.memory.knob import Claim, Knob, LadderRow, Refusal, data_ranks

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings
    from verl_memopt.plan.formulas import Shapes

_ACTOR = "actor_rollout_ref.actor"
_KEY, _CLIP = f"{_ACTOR}.optim.in_backward", f"{_ACTOR}.optim.clip_grad"
_ROWS, _MINI = f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_mini_batch_size"


@dataclass(frozen=True)
class OptimizerInBackward:
    in_backward: bool = False
    """Update each FSDP unit inside backward, as soon as its gradients are reduced, and free them at once. An optimizer step must
    be one micro-batch. With ``clip_grad``, forward and backward run twice, the first time only for the norm. With
    ``clip_grad=null``, a gradient that is not finite stops the run, unless it is the first gradient of its step."""


def _saved(_: Shapes, after: Shapes) -> float:
    # On one device each gradient is freed by itself, and that of the vocabulary matrix is the largest. If embedding and head
    # share the matrix, two gradients of it exist at once.
    largest = after.vocab * after.hidden * (2 if after.tied else 1)
    return after.gradient_bytes * (after.params - largest)


_in_backward = attrgetter(_KEY)


def _sequences(settings: Settings) -> int:
    roles = settings.actor_rollout_ref
    return -(-roles.actor.ppo_mini_batch_size * roles.rollout.n // data_ranks(settings, "actor"))


def _accumulates(settings: Settings) -> bool:
    actor = settings.actor_rollout_ref.actor
    rows = actor.ppo_micro_batch_size_per_gpu or 0
    return _in_backward(settings) and not actor.use_dynamic_bsz and 0 < rows < _sequences(settings)


KNOB = Knob(
    cost="no accumulation; with clipping, forward and backward twice",
    settings={"optim": OptimizerInBackward},
    shared_keys=(_CLIP,),
    refuses=(
        *only_with_adamw(_KEY, _in_backward),
        Refusal(
            (_KEY, _ROWS, _MINI),
            _accumulates,
            "gradients of several micro-batches would have to accumulate, which in_backward cannot do",
            lambda settings: f"Set {_ROWS}={_sequences(settings)}, lower ppo_mini_batch_size, or set {_KEY}=false.",
            lambda settings: (
                f"a device has {_sequences(settings)} sequences per optimizer step, so gradients would have to accumulate"
            ),
        ),
    ),
    claims=(Claim("update_actor", "grads", _saved),),
    row=LadderRow(190, on=(f"{_KEY}=true", f"{_CLIP}=null"), off=(f"{_KEY}=false",), on_top_of="bucketed_adamw"),
)
