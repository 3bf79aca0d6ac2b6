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
    """Return whether a model needs no sharding: one device, one dtype for storage and compute, and no offloading."""
    return mesh.size() == 1 and precision.param_dtype is None and type(offload) is OffloadPolicy


def shard_model(
    root: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard_after_forward: bool | int,
    exact: Sequence[nn.Module] = (),
) -> None:
    """Shard ``units``, then the rest of ``root``, over the mesh, in place.

    On one device there is nothing to shard, and a model whose storage dtype is its compute dtype stays plain: FSDP2 would gather
    a copy of every unit.

    Args:
        root: The model.
        units: The modules that are gathered together, such as decoder blocks, in the order of the forward.
        mesh: The mesh of :func:`verl_memopt.distributed.process_group.training_mesh`.
        precision: Dtypes of compute and of the gradient reduction.
        offload: Where the shards are stored.
        reshard_after_forward: As in FSDP2.
        exact: Small units that compute in the dtype in which they rest.
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
        for unit in exact:
            in_own_dtype = MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype)
            fully_shard(unit, **{**options, "mp_policy": in_own_dtype, "reshard_after_forward": False})
        # The root's parameters are used until the end of the forward, and again from the start of the backward.
        fully_shard(root, **{**options, "reshard_after_forward": False})


def prefetch_forward(units: Sequence[nn.Module]) -> None:
    """Let each sharded unit gather the next one while it computes. Units that are not sharded are left alone.

    Args:
        units: In the order of the forward.
    """
    for unit, following in pairwise(units):
        if isinstance(unit, FSDPModule) and isinstance(following, FSDPModule):
            unit.set_modules_to_forward_prefetch([following])
