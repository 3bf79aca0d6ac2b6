"""Reward managers: how the rows of a step reach the reward function."""

from __future__ import annotations

import os
from dataclasses import dataclass

from verl_memopt.recipes.registry import RECIPES

MOST_PROCESSES = 64
"""Most processes of ``prime``, as in verl."""


@dataclass(frozen=True)
class Manager:
    """How rows are handed to the reward processes."""

    whole_batch: bool = False
    """The function is called once, with the lists of all rows."""
    row_by_row: bool = False
    """A process gets one row at a time, so that a slow row delays no other."""
    uses_every_core: bool = False
    """There is one process per core at least."""
    calls_function: bool = True
    """There is a reward function. False = a recipe's model in the workers scores, and there are no reward processes."""


MANAGERS = {
    "naive": Manager(),
    "batch": Manager(whole_batch=True),
    "dapo": Manager(),
    "prime": Manager(row_by_row=True, uses_every_core=True),
    **dict.fromkeys(RECIPES, Manager(calls_function=False)),
}
"""Managers by the value of ``reward_model.reward_manager``. DAPO's penalty is subtracted by the trainer, which knows lengths."""


def num_processes(manager: str, num_workers: int) -> int:
    """Return how many reward processes a manager has.

    Args:
        manager: ``reward_model.reward_manager``.
        num_workers: ``reward_model.num_workers``.
    """
    if not MANAGERS[manager].calls_function:
        return 0
    if not MANAGERS[manager].uses_every_core:
        return num_workers
    return max(num_workers, min(MOST_PROCESSES, len(os.sched_getaffinity(0))))
