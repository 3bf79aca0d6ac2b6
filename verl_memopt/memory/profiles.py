"""Set many knobs under one name, for a machine with little memory, with some, or with many devices.

Use it when: you start on a new machine. Take the profile of your card's size (``memory=24g``). ``memory=constrained`` is the
    place to begin when a model does not fit.
Saves: what the keys it sets save. A run logs them, and ``verl-memopt train memory=constrained --cfg job`` prints them.
Costs: what those keys cost.
Works with: every recipe and every key. A key on the command line wins over the profile's.
"""

from __future__ import annotations

from verl_memopt.memory.knob import Knob

CARDS = ("12g", "16g", "24g", "32g", "48g", "80g", "141g")
"""Profiles for one card of so many GB. Each file says which models fit it."""
PROFILES = ("constrained", "balanced", "large_multi_gpu", *CARDS)

KNOB = Knob(cost="what its keys cost", besides=tuple(f"memory={name}" for name in PROFILES))
