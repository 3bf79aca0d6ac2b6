"""Device memory of vLLM engines in this process: the memory that sleeps, and the memory that a start needs.

vLLM's allocator is read from the loaded modules, so this file does not import vLLM.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from verl_memopt.config import schema
from verl_memopt.distributed.device import empty_cache, is_gpu, memory_info
from verl_memopt.errors import ConfigError, RolloutError
from verl_memopt.observe.device_ledger import Asleep
from verl_memopt.rollout.engine import KEY

KINDS = {"weights": "rollout weights", "kv_cache": "kv"}
"""Part of the engine -> the kind under which its bytes are reported."""


def sleeping_allocator() -> Any:
    """Return vLLM's allocator of memory that can sleep: one per process, None before the first engine that can sleep."""
    module = sys.modules.get("vllm.device_allocator.cumem")
    return None if module is None else module.CuMemAllocator.instance


def asleep_in_vllm() -> Asleep | None:
    """Return the bytes of vLLM's pools that torch counts but the device does not hold. None if vLLM's records are unknown.

    These are the sleeping parts, and the segments that vLLM itself returned to the driver when it trimmed a pool.
    """
    allocator = sleeping_allocator()
    if allocator is None:
        return Asleep()
    try:
        held = {address for address, data in allocator.pointer_to_data.items() if not data.is_asleep}
        pools = [pool for entries in allocator.allocator_and_pools.values() for pool, _ in entries]
        gone = [segment for pool in pools for segment in pool.snapshot() if segment["address"] not in held]
    except (AttributeError, TypeError, ValueError):
        return None
    return Asleep(sum(segment["total_size"] for segment in gone), sum(segment["allocated_size"] for segment in gone))


def bytes_to_wake(part: str) -> int:
    """Return the size of a sleeping part and of all that can only wake with it. 0 if vLLM's records are unknown."""
    allocator = sleeping_allocator()
    entries = [] if allocator is None else allocator.pointer_to_data.values()
    try:
        return sum(data.handle[1] for data in entries if data.is_asleep and (data.tag == part or data.tag not in KINDS))
    except AttributeError:
        return 0


def check_no_other_sleeper() -> None:
    """Check that no other engine of this process uses vLLM's sleeping allocator.

    Raises:
        RolloutError: Another engine holds memory of that allocator.
    """
    allocator = sleeping_allocator()
    held = 0 if allocator is None else allocator.get_current_usage()
    if held:
        raise RolloutError(
            f"rollout engine: another engine of this process holds {held / 2**30:.2f} GiB, and vLLM allows one sleeping engine "
            "per process. Shut the other one down first, or start this one in a new process."
        )


def check_free_memory(utilization: float, rollout: schema.Rollout, device: torch.device) -> None:
    """Check that a GPU has the engine's share free.

    Args:
        utilization: The engine's share of the whole device.
        rollout: Holds the setting that the error names.
        device: The engine's device.

    Raises:
        ConfigError: The device has less free memory than the share.
    """
    if not is_gpu(device):
        return
    empty_cache(device)
    free, total = memory_info(device)
    share = utilization * total
    if free < share:
        raise ConfigError(
            f"{KEY}.gpu_memory_utilization={rollout.gpu_memory_utilization}: that is {share / 2**30:.1f} GiB of the device's "
            f"{total / 2**30:.1f}, but {free / 2**30:.1f} GiB are free. Lower it to at most {int(free / total * 100) / 100}, "
            "or free device memory."
        )


def free_cached_memory(device: torch.device, with_pools: bool = False) -> None:
    # What refers to itself in a circle is freed by the garbage collector only, and until then its blocks cannot be returned.
    """Collect garbage and return the allocator's unused blocks to the driver.

    Args:
        device: The engine's device.
        with_pools: Also release the pools of vLLM's sleeping allocator, after a start that failed.
    """
    gc.collect()
    allocator = sleeping_allocator() if with_pools else None
    if allocator is not None:
        allocator.release_pools()
    empty_cache(device)
