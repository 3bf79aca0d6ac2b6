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

    AdamW of torch.optim is torch's own where all of its state is fp32 and on the device, which is as fast as ours and equal
    to it bit for bit; in every other case it is :class:`BucketedAdamW`. offload: the state rests on the host. seed: of its
    rounding. ``betas`` go to a class that takes them. Errors: ConfigError when the module or class is missing, or it rejects
    an argument.
    """
    parameters = list(parameters)
    try:
        kind = getattr(importlib.import_module(optim.optimizer_impl), optim.optimizer)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{KEY}.optimizer_impl={optim.optimizer_impl}, optimizer={optim.optimizer}: {error}. Name a module that is installed "
            "and an optimizer class in it."
        ) from error
    options: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    optional = {"betas": tuple(optim.betas)} | ({"fused": True} if optim.optimizer_impl == "torch.optim" else {})
    if kind is AdamW and _needs_buckets(parameters, optim, offload):
        kind = BucketedAdamW
        options |= {"state_dtype": optim.state_dtype, "offload": offload, "stochastic_rounding": optim.stochastic_rounding}
        options |= {"bucket_megabytes": optim.bucket_megabytes, "seed": seed}
    try:
        takes = inspect.signature(kind).parameters
        options |= {name: value for name, value in optional.items() if name in takes}
        return kind(parameters, **{**options, **(optim.override_optimizer_config or {})})
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{KEY}.optimizer={optim.optimizer}, override_optimizer_config={optim.override_optimizer_config}: {error}. "
            "Change the arguments, or name another optimizer."
        ) from error


def _needs_buckets(parameters: Iterable[nn.Parameter], optim: Optim, offload: bool) -> bool:
    masters = any(parameter.dtype != torch.float32 for parameter in parameters)
    return offload or masters or optim.state_dtype != "fp32" or optim.stochastic_rounding or optim.in_backward


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
