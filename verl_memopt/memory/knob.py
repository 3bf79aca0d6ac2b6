"""What the index says of a knob; each knob file ends with one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Refusal:
    """A setting this knob cannot be combined with, and why."""

    setting: str
    """``key=value`` of the other side."""
    reason: str
    """Why, and the way out."""


@dataclass(frozen=True)
class Knob:
    """A knob's entry. What it saves, costs and pairs with is said once, in the docstring of its file."""

    name: str
    """Short name, in the order of the ladder."""
    keys: tuple[str, ...]
    """Every key of the settings that turns it."""
    on: tuple[str, ...] = ()
    """Overrides that switch it on; nothing for a knob that is on by default."""
    off: tuple[str, ...] = ()
    """Overrides that switch it off, where a run can do without it."""
    refuses: tuple[Refusal, ...] = field(default_factory=tuple)
    """What it cannot be combined with."""
