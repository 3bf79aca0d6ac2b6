"""Whole weights of a sharded policy, for receivers such as files that cannot take slices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from verl_memopt.memory.rollout.weight_buckets import joined, weight_slices


def full_weights(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_megabytes: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) in the order of ``weights``. Every rank gets every tensor.

    All ranks must iterate in step. A yielded tensor may share memory with the parameter: use it before the next one.

    Args:
        weights: Named parameters, plain or sharded on their first dimension (DTensor).
        dtype: Dtype of the tensors that are yielded.
        bucket_megabytes: Largest amount that is gathered at once.
    """
    return joined(weight_slices(weights, dtype, bucket_megabytes), dtype)
