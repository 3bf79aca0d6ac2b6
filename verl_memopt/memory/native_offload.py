"""FSDP2's own CPU offload: shards, gradients and optimizer state live on the host, and the optimizer steps there.

Saves: all of (b_w + b_o + b_g) * N / W bytes of the device, 16 * N / W with fp32 AdamW: what is left is what is gathered.
Costs: as many bytes of host memory; b_w * N / W over the bus at every gather of the model (two a micro-batch with checkpointing
    or resharding) and b_r * N / W back in every backward; an optimizer step at the host's speed, 28 * N / W bytes through its
    memory. ``param_offload`` with ``optimizer_offload`` moves less and is faster; this is for what fits in no other way.
Pairs with: few, large micro-batches; ``gradient_sync=last`` where whole gradients fit. Checkpoints are written, and weights are
    gathered for the engine, from the host.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from verl_memopt.memory.host_buffers import host_buffer
from verl_memopt.memory.knob import Claim, Knob, Refusal

KIND = "params"


def native_offload(wanted: bool) -> OffloadPolicy:
    """Gives FSDP2's policy: shards on the host or, unless ``wanted``, on the device."""
    # The shards lie in a host buffer, which is page-locked where it can be: FSDP2 need not do it once more.
    return CPUOffloadPolicy(False) if wanted else OffloadPolicy()


def allocate_on_host(model: nn.Module, device: torch.device) -> None:
    """Gives a sharded model without storage one host buffer for its shards; buffers of the model go to the device.

    device: where it computes. Values are uninitialised. A shard that FSDP2 pads to an even size is copied out of it.
    """
    shards = {id(parameter): _shard(parameter) for parameter in model.parameters()}
    sizes = [shard.numel() * shard.itemsize for shard in shards.values()]
    slots = dict(zip(shards, host_buffer(sum(sizes), device, KIND).split(sizes), strict=True))

    def place(tensor: Tensor) -> Tensor:
        if id(tensor) not in slots:
            return torch.empty_like(tensor, device=device)
        shard = _shard(tensor)
        local = slots[id(tensor)].view(shard.dtype).view(shard.shape)
        return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local

    model._apply(place)


def _shard(parameter: Tensor) -> Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


_WHY = "parameters and optimizer state never leave the host then; set one of the two to false"

KNOB = Knob(
    name="native_offload",
    keys=("actor_rollout_ref.actor.fsdp_config.offload_policy", "actor_rollout_ref.ref.fsdp_config.offload_policy"),
    on=("actor_rollout_ref.actor.fsdp_config.offload_policy=true", "actor_rollout_ref.ref.fsdp_config.offload_policy=true"),
    off=("actor_rollout_ref.actor.fsdp_config.offload_policy=false", "actor_rollout_ref.ref.fsdp_config.offload_policy=false"),
    claims=(
        Claim("update_actor", "params", lambda before, _: before.params * before.master_bytes + before.reference_bytes),
        Claim("update_actor", "optimizer", lambda before, _: before.state_bytes * before.params),
    ),
    refuses=(Refusal("fsdp_config.param_offload=true", _WHY), Refusal("fsdp_config.optimizer_offload=true", _WHY)),
)
