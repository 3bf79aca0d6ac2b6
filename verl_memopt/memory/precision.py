"""In which precision parameters rest, are computed with and have their gradients reduced.

Saves: ``model_dtype`` bfloat16 in place of fp32 halves masters, optimizer state and gradients: (4 + 8 + 4) * N / W bytes become
    (2 + 4 + 2) * N / W. ``dtype`` bfloat16 halves gathered parameters (b_c * N_u) and activations. ``reduce_dtype`` bfloat16
    halves what the reduction of a unit holds, b_r * N_u * (1 + 1/W) bytes.
Costs: rounding. PRECISION_COSTS
Pairs with: stochastic rounding, without which masters in bfloat16 lose every update below 1/256 of a weight; the engine's own
    ``rollout.dtype``, which should be the compute dtype, or old log-probs differ from the engine's.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from verl_memopt.memory.knob import Knob


def mixed_precision(masters: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> MixedPrecisionPolicy:
    """Gives FSDP2's policy for the three dtypes; equal ones are left out, so that nothing is cast needlessly."""
    return MixedPrecisionPolicy(
        param_dtype=None if compute == masters else compute,
        reduce_dtype=None if reduce == compute else reduce,
    )


_KEYS = ("model_dtype", "dtype", "mixed_precision.reduce_dtype")

KNOB = Knob(
    name="precision",
    keys=tuple(f"actor_rollout_ref.{role}.fsdp_config.{key}" for role in ("actor", "ref") for key in _KEYS),
    on=("actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",),
    off=("actor_rollout_ref.actor.fsdp_config.dtype=fp32",),
)
