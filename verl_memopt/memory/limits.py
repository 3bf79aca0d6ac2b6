"""Limit the device and host memory that a worker may take, to rehearse a smaller card or to protect the machine.

Use it when: you want to know whether a run fits a smaller card, or offloads might take more host memory than the machine has.
Saves: nothing by itself. A run that needs more stops with an error that names the limit, in place of a killed process.
Costs: nothing within the limits. Beyond the pinned limit copies are slower, because their memory is not page-locked.
Works with: every offload, whose bytes rest in host buffers. ``PYTORCH_ALLOC_CONF=expandable_segments:True`` keeps reserved memory
    near what is allocated; ``ALLOCATOR=tcmalloc`` or ``jemalloc`` preloads a host allocator in the example scripts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from verl_memopt.memory.knob import POSITIVE, Knob


@dataclass(frozen=True)
class MemoryLimits:
    device_limit_gb: Annotated[float | None, POSITIVE] = None
    """Most GiB of device memory a worker may take, engine included, so that a smaller card can be rehearsed; null = all of it.
    On a CPU it is held in the phases whose bytes are counted (``trainer.track_memory_every_steps``)."""
    card_gb: Annotated[float | None, POSITIVE] = None
    """Size of each card in GB, as a profile for a card sets it. A run that cannot fit on such a card is refused before anything
    starts, and ``verl-memopt fit`` and ``debug=dry`` say whether it fits. null = unknown: nothing is refused."""
    host_limit_gb: Annotated[float | None, POSITIVE] = None
    """Most GiB of host memory a worker's offloads may take together; null = no limit. Set it below the machine's memory
    divided by its workers: an error that names it is better than a killed process."""
    pinned_limit_gb: Annotated[float | None, POSITIVE] = None
    """Most GiB of those that may be page-locked; what goes beyond is ordinary memory, whose copies wait; null = no limit."""


KNOB = Knob(
    cost="nothing",
    settings={"memory": MemoryLimits},
    besides=("ALLOCATOR=tcmalloc", "ALLOCATOR=jemalloc", "PYTORCH_ALLOC_CONF"),
)
