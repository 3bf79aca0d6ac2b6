"""State of the process that an engine must leave unchanged, because training continues in the same process."""

from __future__ import annotations

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

from verl_memopt.distributed.device import device_rng_state, set_device_rng_state


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
    precision, default dtype, exception hook, signal handlers and warning filters.

    Args:
        device: The engine's device.
        own_prefix: Variables that begin with this belong to the engine and stay.
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

    with attribute_replaced(dist, "destroy_process_group", only_named if keep else destroy):
        yield


@contextmanager
def attribute_replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside the body."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


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
