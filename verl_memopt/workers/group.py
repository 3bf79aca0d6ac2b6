"""What the driver knows of its workers: a group answers calls in rank order, wherever its members live."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Placement:
    """A member's place in its group."""

    rank: int
    world_size: int
    local_rank: int
    """The member's rank among those of its node, and the index of its device among the devices that its process sees."""
    master_addr: str
    """Address of rank 0's node, where process groups meet."""
    master_port: int
    """A port that was free there when the group started."""
    device: str
    """Kind of device, as :func:`verl_memopt.distributed.device.resolve_device` names it."""


WorkerFactory = Callable[[Placement], Any]
"""Builds a worker inside the process that will hold it; must be picklable."""


class WorkerGroup(Protocol):
    """Members that are called by method name, one call at a time, and answer together."""

    world_size: int

    def all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Makes the same call on each member and gives the results in rank order.

        Errors: a UserError raised in a member comes back as it was; anything else a launcher with processes of its own
        reports as WorkerError with the member's traceback. After an error the group is gone.
        """

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls member ``rank`` with ``arguments[rank]`` and gives the results in rank order. Errors: as :meth:`all`."""

    def shutdown(self) -> None:
        """Ends the members and whatever was started for them; may be called again."""


def process_environment(placement: Placement, local_world_size: int) -> dict[str, str]:
    """Gives the variables by which torch.distributed and vLLM find their place."""
    return {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(placement.master_port),
    }


def free_port(address: str) -> int:
    """Gives a port that is free on this node at this moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
