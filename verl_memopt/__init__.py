"""Reinforcement-learning post-training of language models when device memory is the bottleneck."""

from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "train": "api", "Run": "api", "session": "primitives", "EarlyStopping": "trainer.listener", "Progress": "trainer.listener",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Import on first use: reward processes import this package too, and must not import torch.
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
