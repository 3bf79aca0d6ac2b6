"""The table: what becomes of each script, and how often each setting is the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

COMPOSES, REFUSED, NOT_COUNTED = "composes", "refused", "not counted"


@dataclass(frozen=True)
class Row:
    """One script."""

    script: str
    verdict: str
    reasons: tuple[str, ...] = ()
    """One sentence for each setting that is refused, or why the script is not counted."""


def address(reason: str) -> str:
    """Return the ``key=value`` that a reason opens with."""
    return reason.partition(": ")[0]


def render(rows: Sequence[Row], source: str) -> str:
    """Return the table as text.

    Args:
        rows: every script.
        source: which scripts these are.
    """
    counted = [row for row in rows if row.verdict != NOT_COUNTED]
    composed = sum(row.verdict == COMPOSES for row in counted)
    lines = [f"{source}: {composed} of {len(counted)} scripts compose", ""]
    for row in counted:
        lines.append(f"{row.verdict:10}{row.script}")
        lines += [f"{'':12}{address(reason)}" for reason in row.reasons]
    reasons = [reason for row in counted for reason in dict.fromkeys(row.reasons)]
    scripts_of = Counter(address(reason) for reason in reasons)
    text_of = {address(reason): reason for reason in reversed(reasons)}
    alone = Counter(address(row.reasons[0]) for row in counted if len(row.reasons) == 1)
    lines += ["", f"{'scripts':>8}{'alone':>7}  reason (alone: scripts that nothing else stops)"]
    for key, number in sorted(scripts_of.items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"{number:8}{alone[key]:7}  {text_of[key]}")
    others = [row for row in rows if row.verdict == NOT_COUNTED]
    lines += ["", f"{len(others)} scripts are not counted:"]
    lines += [f"  {row.script}: {row.reasons[0]}" for row in others]
    return "\n".join(lines)
