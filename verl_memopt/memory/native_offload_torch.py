"""FSDP2's own CPU offload: shards, gradients and optimizer state live on the host, and the optimizer steps there.

Bytes saved: all of (b_w + b_o + b_g) x N / W bytes of the device, 16 x N / W with fp32 AdamW. The device holds only the units
that are gathered.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from verl_memopt.distributed.device import fsdp_params, fsdp_units, is_gpu
from verl_memopt.memory.host_buffers import host_allocator, host_buffer

KIND = "params"


def native_offload(wanted: bool) -> OffloadPolicy:
    """Return FSDP2's policy: shards on the host or, unless ``wanted``, on the device."""
    # FSDP2 would page-lock copies of its own; allocate_on_host decides what is locked.
    return CPUOffloadPolicy(False) if wanted else OffloadPolicy()


def allocate_on_host(model: nn.Module, device: torch.device) -> None:
    """Allocate one host buffer for the shards of a model without storage, uninitialised. The model's buffers go to the device.

    The buffer holds each shard in the padded size that FSDP2 gathers, so FSDP2 copies none out of it. On a GPU the host memory of
    the gradients is counted too. Where the limits allow it is page-locked, so that neither gathers nor gradients wait for their
    copies.

    Args:
        model: The model, sharded, without storage.
        device: The device to compute on.
    """
    sharded = {id(param.sharded_param): param for unit in fsdp_units(model) for param in fsdp_params(unit)}
    sizes = {id(parameter): _shard(parameter).numel() * parameter.itemsize for parameter in model.parameters()}
    sizes |= {key: param.padded_sharded_param_size.numel() * param.sharded_param.itemsize for key, param in sharded.items()}
    locked_before = host_allocator().pinned_bytes
    buffer = host_buffer(sum(sizes.values()), device, KIND)
    locked = host_allocator().pinned_bytes > locked_before
    slots = dict(zip(sizes, buffer.split(list(sizes.values())), strict=True))
    for key, param in sharded.items():
        typed = slots[key].view(param.sharded_param.dtype)
        # Only the padding is cleared. FSDP2 gathers it with the shard, and the weights' files fill the rest.
        typed[_shard(param.sharded_param).numel() :].zero_()
        # FSDP2 gathers from this tensor. It would copy and pad a shard that lies elsewhere.
        param._sharded_param_data = typed

    def place(tensor: Tensor) -> Tensor:
        if id(tensor) not in slots:
            return torch.empty_like(tensor, device=device)
        shard = _shard(tensor)
        local = slots[id(tensor)].view(shard.dtype)[: shard.numel()].view(shard.shape)
        # DTensor.from_local would copy the host tensor to the device of the mesh.
        return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local

    if is_gpu(device):
        trained = [param for param in sharded.values() if param.sharded_param.requires_grad]
        _count_gradients(model, trained, locked)
    model._apply(place)


def _count_gradients(model: nn.Module, trained: list[FSDPParam], shards_are_locked: bool) -> None:
    """Count the host memory of gradients as long as the model lives, and let FSDP2 lock it where there is room for that."""
    sizes = [param.sharded_size.numel() * param.sharded_param.itemsize for param in trained]
    # torch's allocator of page-locked memory rounds each gradient up to a power of two.
    rounded = sum(1 << (size - 1).bit_length() for size in sizes if size)
    locks = shards_are_locked and host_allocator().may_pin(rounded)
    weakref.finalize(model, host_allocator().count_elsewhere(rounded if locks else sum(sizes), locks, "grads"))
    for param in trained:
        param.pin_memory = locks


def _shard(parameter: Tensor) -> Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter
