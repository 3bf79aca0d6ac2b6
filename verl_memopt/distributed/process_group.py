"""Process groups and device meshes of the training ranks."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_memopt.distributed.device import backend


def join_process_group(device: torch.device, rank: int, world_size: int, address: str, port: int, timeout_seconds: float) -> None:
    """Join the default process group.

    Does nothing where this process is already in one, such as the fake group of a planner or a test.

    Args:
        device: Decides the backend.
        rank: This process's rank.
        world_size: Number of processes. One process needs neither address nor port.
        address: Address of rank 0's node.
        port: Free port on that node.
        timeout_seconds: Longest wait for a collective.
    """
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if world_size == 1:
        dist.init_process_group(backend(device), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout)
    dist.init_process_group(backend(device), store=store, rank=rank, world_size=world_size, timeout=timeout)


def leave_process_group() -> None:
    """Leave the default process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def training_mesh(device_type: str, world_size: int, fsdp_size: int) -> DeviceMesh:
    """Return the mesh to shard over: flat for ``fsdp_size`` -1 or the whole world, else replicate x shard (HSDP)."""
    if fsdp_size in (-1, world_size):
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    shape = (world_size // fsdp_size, fsdp_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
