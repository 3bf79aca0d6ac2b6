"""Update each FSDP unit inside backward, as soon as its gradient is reduced, and free the gradient at once.

Use it when: gradients are the peak, one micro-batch holds a whole mini-batch, and you can train without gradient clipping.
Saves: all gradients but those of the largest unit.
Costs: gradient clipping, which needs the norm of all gradients first (the norm is still reported), and gradient accumulation. A
    gradient that is not finite stops the run once parameters have moved; without this knob the step is skipped.
Works with: ``optimizer_offload``, ``optim.state_dtype`` and ``optim.stochastic_rounding``; a token budget that takes a whole
    mini-batch at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_memopt.knobs.bucketed_adamw import only_with_adamw
from verl_memopt.knobs.conditions import DEVICES
from verl_memopt.knobs.knob import Claim, Knob, LadderRow, Refusal, switch
from verl_memopt.knobs.shapes import Shapes

_ACTOR = "actor_rollout_ref.actor"
_KEY, _CLIP = f"{_ACTOR}.optim.in_backward", f"{_ACTOR}.optim.clip_grad"
_ROWS, _MINI = f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_mini_batch_size"
_BATCHING = (f"{_ACTOR}.use_dynamic_bsz", "actor_rollout_ref.rollout.n", *DEVICES)


@dataclass(frozen=True)
class OptimizerInBackward:
    """Settings of the update inside backward."""

    in_backward: bool = False
    """Update each FSDP unit as soon as its gradient is reduced and free the gradient at once. Needs ``clip_grad=null`` and
    one micro-batch per optimizer step. A gradient that is not finite stops the run, unless it is the first of its step."""


def _saved(_: Shapes, after: Shapes) -> float:
    """Return the bytes saved on one device, where a unit is one parameter and the vocabulary's matrix the largest."""
    largest = after.vocab * after.hidden * (2 if after.tied else 1)
    return after.master_bytes * (after.params - largest)


def _sequences(prompts: int, n: int, nodes: int, devices: int) -> int:
    """Return the sequences of one device per optimizer step."""
    return prompts * n // (nodes * devices)


def _accumulates(on: bool, rows: int | None, prompts: int, by_tokens: bool, *rest: int) -> bool:
    return on and not by_tokens and 0 < (rows or 0) < _sequences(prompts, *rest)


def _too_many(on: bool, rows: int, prompts: int, by_tokens: bool, *rest: int) -> str:
    return f"a device has {_sequences(prompts, *rest)} sequences per optimizer step, so gradients would have to accumulate"


def _take_all_rows(on: bool, rows: int, prompts: int, by_tokens: bool, *rest: int) -> str:
    return f"Set {_ROWS}={_sequences(prompts, *rest)}, lower ppo_mini_batch_size, or set {_KEY}=false."


KNOB = Knob(
    name="optimizer_in_backward",
    place=130,
    cost="no clipping, no accumulation",
    settings={"optim": OptimizerInBackward},
    shared_keys=(_CLIP,),
    refuses=(
        *only_with_adamw(_KEY),
        Refusal(
            (_KEY, _CLIP),
            lambda on, clip: on and clip is not None,
            "clipping needs the norm of all gradients, and each is gone once it is used",
            f"Set {_CLIP}=null, or {_KEY}=false.",
        ),
        Refusal(
            (_KEY, _ROWS, _MINI),
            _accumulates,
            "gradients of several micro-batches would have to accumulate",
            _take_all_rows,
            _too_many,
            about=_BATCHING,
        ),
    ),
    claims=(Claim("update_actor", "grads", _saved),),
    row=LadderRow(190, on=(f"{_KEY}=true", f"{_CLIP}=null"), off=(f"{_KEY}=false",), on_top_of="bucketed_adamw"),
    factors=(switch("in backward", _KEY, off=False, on=True), switch("clip", _CLIP, lossy=True, one=1.0, none=None)),
)
