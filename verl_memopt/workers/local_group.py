"""A group of one member in this process: for a debugger, and for machines without Ray."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from verl_memopt.workers.group import Placement, WorkerFactory, free_port, process_environment

LOOPBACK = "127.0.0.1"


class LocalGroup:
    """One worker in the driver's process. Its environment variables are set for as long as the group lives.

    The worker's errors come through unchanged, so a debugger stops at their cause.

    Args:
        factory: Builds the worker.
        device: Kind of its device.
    """

    world_size = 1

    def __init__(self, factory: WorkerFactory, device: str) -> None:
        """Set the environment variables and build the worker."""
        port = free_port(LOOPBACK)
        placement = Placement(rank=0, world_size=1, local_rank=0, master_addr=LOOPBACK, master_port=port, device=device)
        variables = process_environment(placement, local_world_size=1)
        self._before = {name: os.environ.get(name) for name in variables}
        self._worker: Any = None
        os.environ.update(variables)
        try:
            self._worker = factory(placement)
        except BaseException:
            self._restore_environment()
            raise

    def all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the worker and return its result as a list of one."""
        assert self._worker is not None, "the group was shut down"
        return [getattr(self._worker, method)(*args, **kwargs)]

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the worker with the only tuple of ``arguments``."""
        (only_arguments,) = arguments
        return self.all(method, *only_arguments)

    def shutdown(self) -> None:
        """Close the worker, if it has a ``close``, and drop it."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            if hasattr(worker, "close"):
                worker.close()
        finally:
            self._restore_environment()

    def _restore_environment(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
