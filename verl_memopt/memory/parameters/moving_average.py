"""Move the weights of one model towards those of another, shard by shard, where they rest.

Bytes on the device: none where the target rests on the host, or where both models lie on the device in fp32. Otherwise two pieces
of at most ``PIECE`` elements. No copy of a whole model exists at any time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_memopt.observe.byte_tracker import HOST, scope

PIECE = 2**22
"""Elements that are copied or converted at a time: 16 MiB in fp32."""
KIND = "moving average"


def move_towards(pairs: Iterable[tuple[Tensor, Tensor]], alpha: float, on_host: bool) -> None:
    """Set each target to ``alpha * source + (1 - alpha) * target``, in place.

    The sum is computed in fp32 and rounded once, to the dtype of the target.

    Args:
        pairs: (target, source) of each parameter. Both have the same shape, and above one rank the same shards. They may lie on
            different devices.
        alpha: Weight of the source, above 0 and at most 1.
        on_host: The targets rest on the host. The sum is then computed there.
    """
    with torch.no_grad(), scope(KIND, HOST if on_host else None):
        for target, source in pairs:
            _mix(_flat_shard(target), _flat_shard(source), alpha)


def _mix(target: Tensor, source: Tensor, alpha: float) -> None:
    assert target.shape == source.shape, (target.shape, source.shape)
    for start in range(0, target.numel(), PIECE):
        into, piece = target[start : start + PIECE], source[start : start + PIECE]
        mixed = into if into.dtype == torch.float32 else into.float()
        mixed.mul_(1 - alpha).add_(piece.to(into.device).float(), alpha=alpha)
        if mixed is not into:
            into.copy_(mixed)


def _flat_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard as a flat view."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    return local.view(-1)
