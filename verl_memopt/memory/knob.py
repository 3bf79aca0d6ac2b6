"""What the index says of a knob; each knob file ends with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from verl_memopt.memory.shapes import Shapes


@dataclass(frozen=True)
class Refusal:
    """A setting this knob cannot be combined with, and why."""

    setting: str
    """``key=value`` of the other side."""
    reason: str
    """Why, and the way out."""


@dataclass(frozen=True)
class Claim:
    """What a knob's *Saves* says, as a number: how far the peak of one kind of bytes falls in one phase."""

    phase: str
    kind: str
    """A kind of device bytes, or ``host buffers``."""
    saves: Callable[[Shapes, Shapes], float]
    """Bytes, from the shapes before and after the knob is switched on."""


@dataclass(frozen=True)
class Knob:
    """A knob's entry. What it saves, costs and pairs with is said once, in the docstring of its file."""

    name: str
    """Short name, in the order of the ladder."""
    keys: tuple[str, ...]
    """Every key of the settings that turns it."""
    besides: tuple[str, ...] = ()
    """What turns it and is no key: a choice of a settings group, or an environment variable."""
    on: tuple[str, ...] = ()
    """Overrides that switch it on in the ladder. ``{pair}`` stands for the tokens of two of its rows."""
    off: tuple[str, ...] = ()
    """Overrides that switch it off in the ladder. ``{all}`` stands for the tokens of all its rows."""
    refuses: tuple[Refusal, ...] = field(default_factory=tuple)
    """What it cannot be combined with."""
    claims: tuple[Claim, ...] = ()
    """What the ladder holds it to."""
