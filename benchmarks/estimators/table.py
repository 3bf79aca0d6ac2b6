"""The comparison of two sides' values, and the table of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

BOUND = 1e-6
"""Largest difference of sides that define the same thing."""

REASONS: dict[tuple[str, str], str] = {
    **{
        ("verl", f"advantages {name}, groups of one"): "a group of one has nothing to compare: 0 here, the reward itself in verl"
        for name in ("rloo", "grpo", "grpo_vectorized", "opo")
    },
    ("verl", "advantages reinforce_plus_plus_baseline, groups of one"): (
        "a group of one is its own mean: 0 here, its reward is whitened in verl"
    ),
    ("verl", "advantages gpg"): "alpha counts rows whose group has a gradient (the paper), in verl rows whose score is not 0",
    ("trl", "advantages grpo"): "TRL adds 1e-4 to the standard deviation, verl and this project 1e-6",
}
"""(peer, case) -> why the two differ by definition."""


@dataclass(frozen=True)
class Row:
    """One case beside one peer."""

    function: str
    peer: str
    version: str
    difference: float
    """Largest absolute difference, over the largest absolute value or 1."""
    where: str
    """The value with that difference."""
    reason: str

    @property
    def holds(self) -> bool:
        """True if the difference is in its bound, or has a reason."""
        return self.difference <= BOUND or bool(self.reason)


def compare(function: str, peer: str, version: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Row:
    """Compares all values of a case. A value that one side lacks is an infinite difference."""
    differences = {name: _difference(ours.get(name), theirs.get(name)) for name in sorted(ours.keys() | theirs.keys())}
    where = max(differences, key=lambda name: differences[name])
    reason = REASONS.get((peer, function), "")
    return Row(function, peer, version, differences[where], where, reason)


def _difference(ours: Any, theirs: Any) -> float:
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return 0.0 if ours == theirs else float("inf")
    if ours.shape != theirs.shape:
        return float("inf")
    gap = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1)
    return float(gap)


def render(rows: Sequence[Row], without_peer: Sequence[str]) -> str:
    """Gives the table as text."""
    lines = [f"{'function':58}{'peer':14}{'difference':>11}  {'value':12} reason"]
    for row in rows:
        mark = row.reason or ("" if row.holds else "NOT THE SAME")
        cells = f"{row.function:58}{row.peer + ' ' + row.version:14}{row.difference:>11.1e}  {row.where:12} {mark}"
        lines.append(cells.rstrip())
    beyond = sum(not row.holds for row in rows)
    explained = sum(bool(row.reason) for row in rows)
    lines.append(f"{len(rows)} comparisons: {explained} with a reason to differ, {beyond} others beyond {BOUND:g}")
    if without_peer:
        lines.append("no peer's function: " + "; ".join(without_peer))
    return "\n".join(lines)
