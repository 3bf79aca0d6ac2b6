"""Optimizer and learning-rate schedule from settings."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl_memopt.config.schema import Optim
from verl_memopt.errors import ConfigError

KEY = "actor_rollout_ref.actor.optim"


def build_optimizer(parameters: Iterable[nn.Parameter], optim: Optim) -> Optimizer:
    """Gives the optimizer that ``optim`` names, fused where it can be (no parameter-sized temporaries in its step).

    Errors: ConfigError when the module or class is missing, or it rejects an argument.
    """
    try:
        kind = getattr(importlib.import_module(optim.optimizer_impl), optim.optimizer)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{KEY}.optimizer_impl={optim.optimizer_impl}, optimizer={optim.optimizer}: {error}.") from error
    options: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay, "betas": tuple(optim.betas)}
    if optim.optimizer_impl == "torch.optim":
        options["fused"] = True
    try:
        return kind(parameters, **{**options, **(optim.override_optimizer_config or {})})
    except TypeError as error:
        raise ConfigError(f"{KEY}.override_optimizer_config: {optim.optimizer} rejects it: {error}.") from error


def build_schedule(optimizer: Optimizer, optim: Optim, optimizer_steps: int) -> LambdaLR:
    """Gives the schedule: linear warm-up, then constant or cosine.

    optimizer_steps: of the whole run; ``optim.total_training_steps`` replaces it when given.
    """
    total = optim.total_training_steps if optim.total_training_steps > 0 else optimizer_steps
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total)
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, warmup, total, optim))


def learning_rate_factor(step: int, warmup: int, total: int, optim: Optim) -> float:
    """Gives the share of ``lr`` in force at an optimizer step, counted from 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if optim.lr_scheduler_type == "constant":
        return 1.0
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * optim.num_cycles * progress))
    return optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * wave
