"""Split fp32 masters into the bfloat16 weight and a 16-bit remainder, and join them again, bit for bit.

Bytes saved: 4 bytes of a master become 2 of the weight, which computes, and 2 of the remainder, which rests with the optimizer's
state: b_w falls from 4 to 2, and b_o grows by 2 where the state rests. Without a cast the model needs no FSDP2 on one device.

The high half is the bits rounded half up in magnitude, ``(bits + 0x8000) >> 16``, and the remainder what is left, a signed 16-bit
number. Rounding half to even could not be undone: two remainders would stand for a tie. All arithmetic is of 32-bit integers that
wrap around, so every pattern comes back, also those of infinities. A finite number above the largest bfloat16 computes as
infinity, as with a cast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_memopt.memory.optimizer_state_dtype_torch import Plane

REMAINDER = Plane("remainder", torch.int16, 1)
"""Where the remainders lie in the optimizer's state."""
HALF = 1 << 15
BITS = 16


def join_(weights: Sequence[Tensor], remainder: Tensor, masters: Tensor) -> None:
    """Fill ``masters`` from both halves.

    Args:
        weights: bfloat16, each flat, one after another as in ``masters``.
        remainder: int16 [n].
        masters: fp32 [n], overwritten.
    """
    bits = masters.view(torch.int32)
    parts = bits.split([weight.numel() for weight in weights])
    torch._foreach_copy_(list(parts), [weight.view(torch.int16) for weight in weights])
    bits.bitwise_left_shift_(BITS).add_(remainder)


def split_(masters: Tensor, room: Tensor, weights: Sequence[Tensor], remainder: Tensor) -> None:
    """Write both halves of ``masters`` to their places.

    Args:
        masters: fp32 [n], overwritten.
        room: fp32 [n], overwritten.
        weights: bfloat16, each flat, one after another as in ``masters``.
        remainder: int16 [n].
    """
    bits, high = masters.view(torch.int32), room.view(torch.int32)
    torch.add(bits, HALF, out=high).bitwise_right_shift_(BITS)
    parts = high.split([weight.numel() for weight in weights])
    torch._foreach_copy_([weight.view(torch.int16) for weight in weights], list(parts))
    bits.sub_(high.bitwise_left_shift_(BITS))
    remainder.copy_(bits)
