"""The arms of the study: which expansion, which prompt and which update, at which group size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

EXPANSIONS = ("token", "lazy", "repeat_sampler", "string")
"""Ways to give a prompt k rows, as in ``algorithm.expansion``."""
FULL, TRUNCATED = "full", "truncated"
TRUNCATED_TOKENS = 1024
"""Tokens that a truncated prompt keeps: the first ones, as the published tokenizer call did."""

LEGACY = "legacy"
SAVINGS = ("no_retention", "response_only", "chunked", "shared_prompt", "shared_prompt_checkpointing")
"""Updates that save memory with the whole prompt and the same loss, each on top of the one before."""
WHOLE_RUN = "whole_run"
"""A whole step of this project: rollout, log-probs, update, weight sync. It samples its own answers."""
UPDATES = (LEGACY, *SAVINGS, WHOLE_RUN)

KS = (2, 4, 8)
"""The published group sizes."""
MORE_KS = (16, 32)
"""Further group sizes. One is run where the next smaller one completed."""
MOST_KS = (*MORE_KS, 64)
"""The same for this project's default update, with and without checkpointing."""
FIXED_ROWS = 2
"""Rows of one forward in the main table, whatever the group size."""


@dataclass(frozen=True)
class Arm:
    """One program to measure, at one group size."""

    name: str
    """Names the program. Together with ``k`` it is unique."""
    expansion: str
    """One of EXPANSIONS."""
    prompt: str
    """``full``, or ``truncated`` to TRUNCATED_TOKENS. Each dropped token is counted."""
    update: str
    """One of UPDATES."""
    k: int
    """Answers to a prompt."""
    micro_batch: int
    """Rows of one forward; it divides ``k``. Gradients accumulate over ``k / micro_batch`` forwards. The published coupling is
    ``micro_batch = k``. A shared prompt takes its ``micro_batch`` answers together, in as many packed forwards as the project's
    default token budget makes of them."""

    @property
    def cell(self) -> str:
        """A name for files, unique in the study."""
        return f"{self.name}_k{self.k}"

    @property
    def coupled(self) -> bool:
        """Whether the rows of a forward grow with the group, as in the published runs."""
        return self.name.endswith(COUPLED)


COUPLED = "_coupled"
"""Ending of the names of the published runs: micro-batch = k."""
ONE_ROW = "_one_row"
"""Ending of the name of the chunked update with one row in a forward."""


def main_arms(ks: Iterable[int] = KS) -> list[Arm]:
    """Return the main table: each expansion, whole and truncated prompt, the published update, FIXED_ROWS rows in a forward."""
    return [
        Arm(f"{expansion}_{prompt}_{LEGACY}", expansion, prompt, LEGACY, k, FIXED_ROWS)
        for k in ks
        for prompt in (FULL, TRUNCATED)
        for expansion in EXPANSIONS
    ]


def coupled_arms(ks: Iterable[int] = KS) -> list[Arm]:
    """Return the same with the published coupling: all k rows in one forward."""
    return [dataclasses.replace(arm, name=arm.name + COUPLED, micro_batch=arm.k) for arm in main_arms(ks)]


def saving_arms(ks: Iterable[int] = KS) -> list[Arm]:
    """Return what saves memory with the whole prompt, from the least to the most."""
    arms = []
    for k in ks:
        for update in SAVINGS:
            arms.append(Arm(f"token_{FULL}_{update}", "token", FULL, update, k, k))
            if update == "chunked":
                arms.append(Arm(f"token_{FULL}_{update}{ONE_ROW}", "token", FULL, update, k, 1))
    return arms


def whole_run_arms() -> list[Arm]:
    """Return the whole step of this project at the largest published group size."""
    return [Arm(f"token_{FULL}_{WHOLE_RUN}", "token", FULL, WHOLE_RUN, KS[-1], KS[-1])]


ARMS: tuple[Arm, ...] = (*main_arms(), *coupled_arms(), *saving_arms(), *whole_run_arms())
"""What the study runs at the published group sizes. The larger ones follow from it: see ``larger``."""


def larger(completed: Iterable[Arm]) -> list[Arm]:
    """Return the arms to try next: those that completed at their largest group size, at the one that follows it.

    The published coupling ends at the published sizes, and so do arms with a truncated prompt: nothing new is seen there.
    """
    largest: dict[str, int] = {}
    for arm in completed:
        if not arm.coupled and arm.prompt == FULL:
            largest[arm.name] = max(arm.k, largest.get(arm.name, 0))
    sizes = (KS[-1], *MOST_KS)
    following = dict(zip(sizes, MOST_KS, strict=False))
    next_k = {name: following.get(k) for name, k in largest.items()}
    arms = [arm for k in MOST_KS for arm in (*main_arms([k]), *saving_arms([k])) if next_k.get(arm.name) == k]
    return [arm for arm in arms if arm.k in MORE_KS or arm.update.startswith("shared_prompt")]


def quick_arms() -> tuple[Arm, ...]:
    """Return what ``--quick`` runs: every method at every published group size, once, and none of the larger sizes."""
    return ARMS


def select(arms: Iterable[Arm], expansions: Iterable[str] = (), names: Iterable[str] = (), ks: Iterable[int] = ()) -> list[Arm]:
    """Return the arms with one of the given expansions, names and group sizes. No values = all."""
    expansions, names, ks = set(expansions), set(names), set(ks)
    return [
        arm
        for arm in arms
        if (not expansions or arm.expansion in expansions) and (not names or arm.name in names) and (not ks or arm.k in ks)
    ]
