"""Whole weights from a sharded policy, for receivers that cannot take them in slices, such as files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from verl_memopt.memory.rollout.weight_buckets import joined, weight_slices


def full_weights(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_megabytes: int
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, whole tensor in ``dtype``) in the order of ``weights``; every rank gets every tensor.

    weights: named parameters, sharded on their first dimension (DTensor) or plain. All ranks must consume in step. A yielded
    tensor may share memory with the parameter: use it before asking for the next.
    """
    return joined(weight_slices(weights, dtype, bucket_megabytes), dtype)
