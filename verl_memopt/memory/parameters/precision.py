"""In which precision parameters rest, are computed with and have their gradients reduced.

Bytes saved: ``model_dtype`` bfloat16 in place of fp32 halves masters and gradients at rest, (4 + 4) * N / W bytes (the
optimizer's moments have a precision of their own, ``optim.state_dtype``). ``dtype`` bfloat16 halves activations and gathered
parameters, b_c * N_u for each copy of the unit in use. ``reduce_dtype`` bfloat16 halves the input of the largest unit's
reduction: 2 * N_u * (1 - 1/W) bytes, as its output is cast into the gradient.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy


def mixed_precision(masters: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> MixedPrecisionPolicy:
    """Return FSDP2's policy for the three dtypes. Equal ones are left out, so that nothing is cast needlessly."""
    return MixedPrecisionPolicy(
        param_dtype=None if compute == masters else compute,
        reduce_dtype=None if reduce == compute else reduce,
    )
