"""FSDP2 sharding of a model, unit by unit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard


def stays_plain(mesh: DeviceMesh, precision: MixedPrecisionPolicy, offload: OffloadPolicy) -> bool:
    """Whether a model needs no sharding: one device, no cast between rest and compute, and parameters that live on it."""
    return mesh.size() == 1 and precision.param_dtype is None and type(offload) is OffloadPolicy


def shard_model(
    root: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard_after_forward: bool | int,
    prefetch: bool,
) -> None:
    """Shards ``units`` and then what is left of ``root`` over the mesh, in place.

    precision: of compute and of the gradient reduction. offload: where the shards live. prefetch: gather the next unit while
    the present one computes. On one device there is nothing to share, and a model whose parameters are computed with as they
    rest stays plain: FSDP2 would gather a copy of every unit.
    """
    if stays_plain(mesh, precision, offload):
        return
    options: dict[str, Any] = {
        "mesh": mesh, "mp_policy": precision, "offload_policy": offload, "reshard_after_forward": reshard_after_forward,
    }  # fmt: skip
    # Building the sub-mesh of an integer reshard reads tensor values, which fake tensors do not have.
    with unset_fake_temporarily():
        for unit in units:
            fully_shard(unit, **options)
        # The root's parameters are in use to the end of the forward and again from the start of the backward.
        fully_shard(root, **{**options, "reshard_after_forward": False})
    if prefetch:
        for unit, following in pairwise(units):
            if isinstance(unit, FSDPModule) and isinstance(following, FSDPModule):
                unit.set_modules_to_forward_prefetch([following])
