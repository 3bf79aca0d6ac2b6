"""The precision of parameters at rest, of compute, and of the reduction of gradients.

Bytes saved: ``model_dtype=bfloat16`` halves masters and gradients at rest, (4 + 4) x N / W bytes with fp32. The optimizer's
moments have a precision of their own, ``optim.state_dtype``. ``dtype=bfloat16`` halves activations and gathered parameters.
``reduce_dtype=bfloat16`` halves the input of the largest unit's reduction, and so saves 2 x N_u x (1 - 1/W) bytes.
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
