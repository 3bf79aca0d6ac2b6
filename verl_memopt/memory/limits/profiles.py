"""Profiles: sets of ordinary keys under one name, for a machine with little memory, with some, or with many devices.

Saves: what the keys it sets save; ``verl-memopt train memory=constrained --cfg job`` prints them all, and a run logs which ones a
    profile has set.
Costs: what those keys cost; a key given on the command line or in a recipe's ``debug=`` group wins over the profile's.
Pairs with: both trainers, every recipe and every key: a profile has no effect of its own.
"""

from __future__ import annotations

from verl_memopt.memory.knob import Knob

PROFILES = ("constrained", "balanced", "large_multi_gpu")

KNOB = Knob(name="profiles", keys=(), besides=tuple(f"memory={name}" for name in PROFILES))
