"""What vLLM engines share with this process: device memory that sleeps, memory that a start needs, and logs.

vLLM's allocator is read from the loaded modules, so this file does not import vLLM.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from verl_memopt.config import schema
from verl_memopt.distributed.device import device_rng_state, empty_cache, is_gpu, memory_info, set_device_rng_state
from verl_memopt.errors import ConfigError, RolloutError
from verl_memopt.memory.rollout_memory import host_bytes_asleep
from verl_memopt.observe.device_ledger import Asleep
from verl_memopt.rollout.engine import KEEP_WEIGHTS, KEY

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


ALWAYS_BACKED_UP = ("runtime", "cudagraph")
"""Tags of what an engine keeps on the host at every level of sleep. Source: ``CuMemBackend.suspend`` of vLLM 0.32."""


def host_bytes_to_sleep(level: int) -> int:
    """Return the page-locked host bytes that the engine copies to when it sleeps. 0 if vLLM's records are unknown."""
    tags = (*ALWAYS_BACKED_UP, "weights") if level == KEEP_WEIGHTS else ALWAYS_BACKED_UP
    allocator = sleeping_allocator()
    entries = [] if allocator is None else allocator.pointer_to_data.values()
    try:
        return host_bytes_asleep(data.handle[1] for data in entries if data.tag in tags)
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

    ``utilization`` is the engine's share of the whole device.

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
    """Collect garbage and return the allocator's unused blocks to the driver.

    With ``with_pools`` also release the pools of vLLM's sleeping allocator, after a start that failed.
    """
    # What refers to itself in a circle is freed by the garbage collector only, and until then its blocks cannot be returned.
    gc.collect()
    allocator = sleeping_allocator() if with_pools else None
    if allocator is not None:
        allocator.release_pools()
    empty_cache(device)


# State of the process that an engine must leave unchanged, because training continues in the same process.


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the random generators of torch, its device, Python and numpy at the end.

    An engine seeds them when it starts and draws from them when it samples. Without this, training would depend on the length of
    the rollouts.
    """
    import numpy as np

    states = torch.get_rng_state(), device_rng_state(device), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            set_device_rng_state(device, states[1])
        random.setstate(states[2])
        np.random.set_state(states[3])


@contextmanager
def process_state_kept(device: torch.device, own_prefix: str) -> Iterator[None]:
    """Restore, besides the random state, all process-wide state that the start of an engine changes.

    These are environment variables (child processes inherit them), the number of threads and the function that sets it, matmul
    precision, default dtype, exception hook, signal handlers and warning filters. Variables that begin with ``own_prefix``
    belong to the engine and stay.
    """
    environment = dict(os.environ)
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    precision, dtype, hook = torch.get_float32_matmul_precision(), torch.get_default_dtype(), sys.excepthook
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with random_state_kept(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            torch.set_default_dtype(dtype)
            sys.excepthook = hook
            _restore_handlers(handlers)
            _restore_environment(environment, own_prefix)


@contextmanager
def default_group_kept(keep: bool) -> Iterator[None]:
    """Make ``destroy_process_group()`` without arguments do nothing, if ``keep``. Groups passed by handle are still destroyed."""
    destroy = dist.destroy_process_group

    def only_named(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    dist.destroy_process_group = only_named if keep else destroy
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


def _restore_handlers(handlers: dict[signal.Signals, Callable[..., Any] | int | None]) -> None:
    for number, handler in handlers.items():
        # A handler of None was not set from Python, and signal.signal() cannot set it again.
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _restore_environment(before: dict[str, str], own_prefix: str) -> None:
    for name in set(os.environ) - set(before):
        if not name.startswith(own_prefix):
            del os.environ[name]
    for name, value in before.items():
        if not name.startswith(own_prefix):
            os.environ[name] = value


# What vLLM logs: errors alone while an engine starts, and warnings afterwards. A log level that the user sets wins.


LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"
"""Environment variable with the level of vLLM's loggers. A user who sets it decides, and nothing here changes a level."""

NOISY_LOGGERS = ("vllm.renderers.base", "vllm.model_executor.model_loader.reload.layerwise")
"""Loggers that warn of a missing tokenizer, which is not needed, and of tied weights, which are intended."""


@contextmanager
def quiet_start() -> Iterator[None]:
    """Show vLLM's errors alone while an engine starts, and its warnings afterwards, except those of ``NOISY_LOGGERS``."""
    if LEVEL_VARIABLE in os.environ:
        yield
        return
    os.environ[LEVEL_VARIABLE] = logging.getLevelName(logging.ERROR)
    _set_level(logging.ERROR)
    try:
        yield
    finally:
        del os.environ[LEVEL_VARIABLE]
        _set_level(logging.WARNING)
        for name in NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)


def _set_level(level: int) -> None:
    """Set the level of vLLM's loggers and of the handler that vLLM created. Other handlers stay unchanged."""
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.setLevel(level)
    for handler in vllm_logger.handlers:
        if type(handler.formatter).__module__.startswith("vllm"):
            handler.setLevel(level)
