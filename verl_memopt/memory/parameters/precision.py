"""In which precision parameters rest, are computed with and have their gradients reduced.

Saves: ``model_dtype`` bfloat16 in place of fp32 halves masters and gradients at rest, (4 + 4) * N / W bytes (the optimizer's
    moments have a precision of their own, ``optim.state_dtype``). ``dtype`` bfloat16 halves activations and gathered
    parameters, b_c * N_u for each copy of the unit in use. ``reduce_dtype`` bfloat16 halves the input of the largest unit's
    reduction: 2 * N_u * (1 - 1/W) bytes, as its output is cast into the gradient.
Costs: rounding. On a tiny Qwen3 with random weights, against fp32: ``dtype`` bfloat16 moves log-probs by 0.0034 nats at most and
    the gradient by 0.94 % of its norm, masters in bfloat16 alone by 0.0019 nats and 0.51 %, both together no more than
    ``dtype``; ``reduce_dtype`` bfloat16 rounds a gradient at each reduction (under 2^-8 of its norm), and not at all where a
    model stays plain on one device.
Pairs with: stochastic rounding, without which masters in bfloat16 lose every update below 1/256 of a weight; the engine's own
    ``rollout.dtype``, which should be the compute dtype, or old log-probs differ from the engine's.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from verl_memopt.memory.knob import Claim, Knob


def mixed_precision(masters: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> MixedPrecisionPolicy:
    """Return FSDP2's policy for the three dtypes. Equal ones are left out, so that nothing is cast needlessly."""
    return MixedPrecisionPolicy(
        param_dtype=None if compute == masters else compute,
        reduce_dtype=None if reduce == compute else reduce,
    )


_KEYS = ("model_dtype", "dtype", "mixed_precision.reduce_dtype")

KNOB = Knob(
    name="precision",
    keys=tuple(f"actor_rollout_ref.{role}.fsdp_config.{key}" for role in ("actor", "ref") for key in _KEYS),
    on=tuple(f"actor_rollout_ref.{role}.fsdp_config.{key}=bfloat16" for role in ("actor", "ref") for key in _KEYS),
    off=tuple(f"actor_rollout_ref.{role}.fsdp_config.{key}=fp32" for role in ("actor", "ref") for key in _KEYS),
    claims=(
        Claim("update_actor", "params", lambda before, after: (before.master_bytes - after.master_bytes) * after.params),
        Claim("update_actor", "grads", lambda before, after: (before.master_bytes - after.master_bytes) * after.params),
    ),
)
