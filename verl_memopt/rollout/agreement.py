"""How the ranks of one engine agree on when to stop. All of them must take the same engine steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist

STEPS_PER_AGREEMENT = 8
"""Engine steps between two agreements."""


def agreed(stopped: Callable[[], bool], group: dist.ProcessGroup) -> Callable[[], bool]:
    """Return a function that says whether any rank wants to stop. Without it some ranks would wait for the others for ever.

    All ranks call it before each engine step. They exchange their answers once every ``STEPS_PER_AGREEMENT`` calls. The other
    calls return False.

    Args:
        stopped: Whether this rank wants to stop.
        group: The ranks of the engine, in a process group for host tensors.
    """
    calls = itertools.count(1)

    def any_stopped() -> bool:
        if next(calls) % STEPS_PER_AGREEMENT:
            return False
        any_rank = torch.tensor(int(stopped()))
        dist.all_reduce(any_rank, op=dist.ReduceOp.MAX, group=group)
        return bool(any_rank)

    return any_stopped
