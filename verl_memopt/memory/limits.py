"""Limit the device and host memory that a worker may use, to rehearse a smaller card or to protect the machine.

Use it when: you want to know whether a run fits a smaller card, or offloads might use more host memory than the machine has.
Saves: nothing by itself. A run that needs more than a limit stops with an error that names the limit; without a limit the system
    may kill the process.
Costs: nothing within the limits. Copies from and to memory beyond the pinned limit are slower, because it is not page-locked.
Works with: every offload, because all offloaded bytes rest in host buffers that are counted.
    ``PYTORCH_ALLOC_CONF=expandable_segments:True`` keeps the memory that torch reserves close to what its tensors use. In the
    example scripts, ``ALLOCATOR=tcmalloc`` or ``ALLOCATOR=jemalloc`` preloads that host allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from verl_memopt.memory.knob import POSITIVE, Knob


@dataclass(frozen=True)
class MemoryLimits:
    device_limit_gb: Annotated[float | None, POSITIVE] = None
    """Most GiB of device memory that a worker may use, its engine included; null = all of it. Use it to rehearse a smaller card.
    On a CPU the limit holds only in phases whose bytes are counted (``trainer.track_memory_every_steps``)."""
    card_gb: Annotated[float | None, POSITIVE] = None
    """Size of each card in GB; the profile of a card sets it. A run that cannot fit on such a card is refused before anything
    starts, and ``verl-memopt fit`` and ``debug=dry`` say whether it fits. null = unknown: nothing is refused."""
    host_limit_gb: Annotated[float | None, POSITIVE] = None
    """Most GiB of host memory that all offloads of a worker may use together; null = no limit. Set it below the machine's memory
    divided by the number of workers: an error that names the limit is better than a killed process."""
    pinned_limit_gb: Annotated[float | None, POSITIVE] = None
    """Most GiB of this host memory that may be page-locked; null = no limit. The rest is ordinary memory, and copies from and to
    it block."""


KNOB = Knob(
    cost="nothing",
    settings={"memory": MemoryLimits},
    besides=("ALLOCATOR=tcmalloc", "ALLOCATOR=jemalloc", "PYTORCH_ALLOC_CONF"),
)
