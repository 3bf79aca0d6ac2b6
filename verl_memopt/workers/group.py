"""The interface of a group of workers. It answers calls in rank order, wherever its members live."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Placement:
    """The place of a member in its group."""

    rank: int
    world_size: int
    local_rank: int
    """Rank of the member on its node, and the index of its device among the devices that its process sees."""
    master_addr: str
    """Address of rank 0's node, where process groups meet."""
    master_port: int
    """A port that was free there when the group started."""
    device: str
    """Kind of device, as :func:`verl_memopt.distributed.device.resolve_device` names it."""


WorkerFactory = Callable[[Placement], Any]
"""Builds a worker inside the process that will hold it. Must be picklable."""


class WorkerGroup(Protocol):
    """Members that are called by method name, one call at a time, and that answer together."""

    world_size: int

    def all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Make the same call on each member and return the results in rank order.

        After an error the group is gone.

        Raises:
            UserError: As a member raised it.
            WorkerError: A member raised any other error. The message carries its traceback. A group in this process raises the
                error itself.
        """

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call member ``rank`` with ``arguments[rank]`` and return the results in rank order.

        Raises:
            UserError: As in :meth:`all`.
        """

    def shutdown(self) -> None:
        """End the members and all that was started for them. May be called again."""


def process_environment(placement: Placement, local_world_size: int) -> dict[str, str]:
    """Return the environment variables from which torch.distributed and vLLM read their place."""
    return {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(placement.master_port),
    }


def free_port(address: str) -> int:
    """Return a port that is free on this node at this moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
