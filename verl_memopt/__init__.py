"""Reinforcement-learning post-training of language models when device memory is the bottleneck."""

from typing import Any

__version__ = "0.1.0"

_LAZY = ("train", "Run")


def __getattr__(name: str) -> Any:
    """Import the Python API on use, since reward processes import this package too."""
    if name in _LAZY:
        from verl_memopt import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
