"""Optimizer and learning-rate schedule from settings."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl_memopt.config.schema import Optim
from verl_memopt.errors import ConfigError
from verl_memopt.memory.bucketed_adamw import BucketedAdamW

KEY = "actor_rollout_ref.actor.optim"


def build_optimizer(parameters: Iterable[nn.Parameter], optim: Optim, offload: bool = False, seed: int = 0) -> Optimizer:
    """Gives the optimizer that ``optim`` names, fused where it can be (no parameter-sized temporaries in its step).

    AdamW of torch.optim is torch's own while nothing is asked of it that only :class:`BucketedAdamW` does. Both are equal bit
    for bit there and equally fast, and torch's is the one that others know. offload: the state rests on the host. seed: of
    the rounding. ``betas`` go to a class that takes them. Errors: ConfigError when the module or class is missing, or it
    rejects an argument.
    """
    parameters = list(parameters)
    kind = _named_class(optim)
    options: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    optional = {"betas": tuple(optim.betas)} | ({"fused": True} if optim.optimizer_impl == "torch.optim" else {})
    buckets = _bucket_options(parameters[0].dtype, optim, offload, seed) if kind is AdamW else None
    if buckets is not None:
        kind, options = BucketedAdamW, options | buckets
    try:
        takes = inspect.signature(kind).parameters
        options |= {name: value for name, value in optional.items() if name in takes}
        return kind(parameters, **{**options, **(optim.override_optimizer_config or {})})
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{KEY}.optimizer={optim.optimizer}, override_optimizer_config={optim.override_optimizer_config}: {error}. "
            "Change the arguments, or name another optimizer."
        ) from error


def _named_class(optim: Optim) -> type[Optimizer]:
    try:
        return getattr(importlib.import_module(optim.optimizer_impl), optim.optimizer)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{KEY}.optimizer_impl={optim.optimizer_impl}, optimizer={optim.optimizer}: {error}. Name a module that is installed "
            "and an optimizer class in it."
        ) from error


def _bucket_options(masters: torch.dtype, optim: Optim, offload: bool, seed: int) -> dict[str, Any] | None:
    """Gives what BucketedAdamW takes besides, or None where torch's AdamW does all that is asked for."""
    theirs = "bfloat16" if masters is torch.bfloat16 else "fp32"
    state_dtype = optim.state_dtype or theirs
    if not (offload or optim.stochastic_rounding or optim.in_backward or state_dtype != theirs):
        return None
    return {
        "state_dtype": state_dtype,
        "offload": offload,
        "stochastic_rounding": optim.stochastic_rounding,
        "bucket_megabytes": optim.bucket_megabytes,
        "seed": seed,
    }


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
