"""Build the optimizer and the learning-rate schedule from the settings."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from verl_memopt.config.schema import Optim
from verl_memopt.errors import ConfigError
from verl_memopt.memory.bucketed_adamw_torch import Bucketed, BucketedAdamW, BucketedSGD

KEY = "actor_rollout_ref.actor.optim"
IN_BUCKETS: dict[type[Optimizer], type[Bucketed]] = {AdamW: BucketedAdamW, SGD: BucketedSGD}
"""Class of torch -> the class of this package that updates bucket by bucket."""
SGD_ALONE = frozenset({"dampening", "maximize", "foreach", "differentiable", "fused"})
"""Arguments of torch's SGD that :class:`BucketedSGD` lacks."""
SAME_SHAPE = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
"""Schedule of transformers with a warm-up or a minimum -> its shape alone. Here every schedule can have both."""


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    optim: Optim,
    offload: bool = False,
    seed: int = 0,
    key: str = KEY,
    masters: torch.dtype | None = None,
    grad_offload: bool = False,
) -> Optimizer:
    """Return the optimizer that ``optim`` names, fused if possible: a fused step allocates no tensors of a parameter's size.

    AdamW is torch's class unless the settings need a feature of :class:`Bucketed`. Both classes give the same bits at the same
    speed, and torch's class is better known. SGD is :class:`BucketedSGD`, because torch's fused SGD does not work with sharded
    parameters. If the settings have arguments that :class:`BucketedSGD` lacks, SGD is torch's class, not fused.

    Args:
        parameters: The trained parameters.
        optim: The settings. ``betas`` and ``momentum`` are passed only to classes that accept them.
        offload: Keep the optimizer state on the host.
        seed: Seed of stochastic rounding.
        key: Section of the settings, for error messages.
        masters: Dtype of the master weights if they are split. None = the parameters are the master weights.
        grad_offload: The step reads gradients from the host.

    Raises:
        ConfigError: The module or class is missing, or rejects an argument.
    """
    parameters = list(parameters)
    try:
        kind: type[Optimizer] = getattr(importlib.import_module(optim.optimizer_impl), optim.optimizer)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{key}.optimizer_impl={optim.optimizer_impl}, optimizer={optim.optimizer}: {error}. Name a module that is installed "
            "and an optimizer class in it."
        ) from error
    if optim.optimizer_impl == "torchao.optim":
        _keep_dtype_of_views()
    options: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    optional = {"betas": tuple(optim.betas), "momentum": optim.momentum}
    optional |= {"fused": True} if optim.optimizer_impl == "torch.optim" and kind is not SGD else {}
    split = masters is not None
    torch_dtype = "bfloat16" if (masters or parameters[0].dtype) is torch.bfloat16 else "fp32"
    state_dtype = optim.state_dtype or torch_dtype
    ours = offload or split or grad_offload or optim.stochastic_rounding or optim.in_backward or state_dtype != torch_dtype
    if kind in IN_BUCKETS and (ours or (kind is SGD and SGD_ALONE.isdisjoint(optim.override_optimizer_config or {}))):
        kind = IN_BUCKETS[kind]
        options |= {
            "state_dtype": state_dtype,
            "offload": offload,
            "stochastic_rounding": optim.stochastic_rounding,
            "bucket_megabytes": optim.bucket_megabytes,
            "seed": seed,
            "split_masters": split,
        }
    try:
        accepted = inspect.signature(kind).parameters
        # Pass only arguments that the class accepts, because an optimizer of another library may lack some of torch's.
        options |= {name: value for name, value in optional.items() if name in accepted}
        return kind(parameters, **{**options, **(optim.override_optimizer_config or {})})
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{key}.optimizer={optim.optimizer}, override_optimizer_config={optim.override_optimizer_config}: {error}. "
            "Change the arguments, or name another optimizer."
        ) from error


def _keep_dtype_of_views() -> None:
    """Let views of torchao's 8-bit states keep their dtype.

    A state has the dtype of its parameter, but in torchao 0.18 a view of it says fp32. With sharded parameters in half precision,
    where each state is a view, torch's compiler then fails in the first step.
    """
    from torchao.optim.subclass_8bit import OptimState8bit

    if OptimState8bit.zeros((256,), dtype=torch.bfloat16).view(-1).dtype == torch.bfloat16:
        return

    @OptimState8bit.implements(torch.ops.aten.view.default)
    def view(_function: Any, _types: Any, arguments: Any, _options: Any) -> Any:
        state, shape = arguments
        return OptimState8bit(state.codes.view(shape), state.scale, state.qmap, state.signed, dtype=state.dtype)


def build_schedule(optimizer: Optimizer, optim: Optim, steps: int, key: str = KEY) -> LambdaLR:
    """Return the schedule: a linear warm-up, then the shape that ``optim.lr_scheduler_type`` names.

    ``steps`` is the length of the whole run in the unit of ``optim.lr_schedule_steps``. ``optim.total_training_steps`` replaces
    it if it is set.

    Raises:
        ConfigError: The schedule rejects an argument.
    """
    total = optim.total_training_steps if optim.total_training_steps > 0 else steps
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps > 0 else int(optim.lr_warmup_steps_ratio * total)
    return LambdaLR(optimizer, learning_rate_factors(warmup, total, optim, key))


def learning_rate_factors(warmup: int, total: int, optim: Optim, key: str = KEY) -> Callable[[int], float]:
    """Return a function that maps a step of the schedule, counted from 0, to the factor on ``lr``.

    A warm-up begins at 0, as in verl and transformers. If the schedule counts optimizer steps, it begins at
    ``1 / (warmup + 1)``, because the first optimizer step must already change the weights. After step ``total`` the rate keeps
    its last value. The cosine of transformers would rise again there.
    """
    steps = max(total - warmup, 1)
    ahead = 1 if optim.lr_schedule_steps == "updates" else 0
    shape = _shape(warmup, steps, optim, key)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + ahead) / (warmup + ahead)
        return optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * shape(min(step - warmup, steps))

    return factor


def _shape(warmup: int, steps: int, optim: Optim, key: str) -> Callable[[int], float]:
    name = SAME_SHAPE.get(optim.lr_scheduler_type, optim.lr_scheduler_type)
    arguments: dict[str, dict[str, Any]] = {
        "cosine": {"num_cycles": optim.num_cycles},
        "cosine_with_restarts": {"num_cycles": optim.num_cycles},
        "inverse_sqrt": {"timescale": warmup or None},
        "polynomial": {"lr_end": 0.0},
    }
    # Only the schedule's lambda is needed. It reads only the step, so any optimizer serves.
    stand_in = SGD([torch.zeros(1, device="cpu")], lr=1.0)
    try:
        if name == "constant" and optim.lr_scheduler_kwargs:
            raise ValueError("it takes no arguments")
        if name == "cosine_with_restarts" and (optim.num_cycles < 1 or optim.num_cycles % 1):
            raise ValueError(f"num_cycles={optim.num_cycles} is not a whole number of cycles")
        schedule = get_scheduler(name, stand_in, 0, steps, {**arguments.get(name, {}), **(optim.lr_scheduler_kwargs or {})})
        # Call it once here, because some schedules raise the error of a wrong argument only when they are called.
        schedule.lr_lambdas[0](steps)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"{key}.lr_scheduler_type={optim.lr_scheduler_type}, lr_scheduler_kwargs={optim.lr_scheduler_kwargs}: {error}. "
            "Change the arguments, or name another schedule."
        ) from error
    return schedule.lr_lambdas[0]
