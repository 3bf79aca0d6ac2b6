"""Estimators and losses in a user's file. They are tried before a run starts, and every error names file and function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from verl_memopt.algorithms.estimators import AdvantageInputs
from verl_memopt.algorithms.losses import LossAndMetrics, LossTokens, beyond_clamp
from verl_memopt.algorithms.records import CUSTOM, ESTIMATORS, STATISTICS, CustomEstimator, CustomLoss, load
from verl_memopt.algorithms.rows import positions
from verl_memopt.config.schema import Actor, Algorithm, Settings
from verl_memopt.data.plugin import contained, load_from_file, raised
from verl_memopt.errors import ConfigError, TrainingError, UserError
from verl_memopt.memory.knob import uses_kl
from verl_memopt.memory.logit_tiles import Statistic

ESTIMATOR_KEY = "algorithm.custom_estimator"
LOSS_KEY = "actor_rollout_ref.actor.policy_loss.custom"

ESTIMATOR_ARGUMENTS = ("token_level_rewards", "response_mask", "index", "config")
"""Arguments of every estimator that is registered in verl."""

LOSS_ARGUMENTS = ("log_prob", "old_log_prob", "advantages", "response_mask", "config")


@dataclass(frozen=True)
class Extra:
    input: str
    """Name of the statistic or of the field of ``AdvantageInputs`` that fills the argument, fp32 [R]."""
    is_there: Callable[[Settings], bool]
    """Whether a run with these settings computes it."""
    way_out: str
    """How to make a run compute it, for errors."""


def _decoupled(settings: Settings) -> bool:
    return not settings.algorithm.rollout_correction.bypass_mode


def _head_statistic(name: str, key: str | None = None) -> Extra:
    """Return the argument that is filled with the statistic ``name`` of the LM head.

    ``key``: the setting below ``actor`` that makes the head compute the statistic. None = no setting is needed.
    """
    if key is None:
        return Extra(name, _decoupled, "Set algorithm.rollout_correction.bypass_mode=false")
    return Extra(
        name,
        lambda settings: _decoupled(settings) and getattr(settings.actor_rollout_ref.actor, key),
        f"Set actor_rollout_ref.actor.{key}=true, without bypass mode",
    )


EXTRAS: dict[str, Extra] = {
    "old_log_probs": Extra("old_log_probs", _decoupled, "Set algorithm.rollout_correction.bypass_mode=false"),
    "ref_log_probs": Extra(
        "ref_log_probs", uses_kl, "Set actor_rollout_ref.actor.use_kl_loss=true or algorithm.use_kl_in_reward=true"
    ),
    "rollout_log_probs": Extra(
        "rollout_log_probs",
        lambda settings: settings.actor_rollout_ref.rollout.calculate_log_probs,
        "Set actor_rollout_ref.rollout.calculate_log_probs=true",
    ),
    **{statistic.name: _head_statistic(statistic.name, statistic.key) for statistic in STATISTICS.values()},
    "rollout_is_weights": Extra(
        "weights",
        lambda settings: _decoupled(settings) and settings.algorithm.rollout_correction.rollout_is is not None,
        "Set algorithm.rollout_correction.rollout_is=token",
    ),
}
"""Argument, in verl's spelling -> what fills it."""


@dataclass(frozen=True)
class UserFunction:
    function: Callable[..., Any]
    address: str
    """Setting, file and name, for errors."""
    arguments: tuple[str, ...]
    """The offered arguments that the function takes."""
    own: dict[str, Extra] = field(default_factory=dict)
    """The arguments that other functions in the same file compute from each token's distribution."""

    def call(self, offered: Mapping[str, Any], copies: bool = False) -> Any:
        """Call the function with the arguments that it takes.

        ``copies``: The offered tensors are copies, so the function may change them.

        Raises:
            TrainingError: The function raised an error, or changed a tensor that is not a copy. The message names the function's
                line and the shapes.
        """
        given = {name: offered[name] for name in self.arguments}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        before = _versions(tensors)
        try:
            with contained(self.address):
                result = self.function(**given)
        except UserError:
            raise
        except Exception as problem:  # a user's function may raise anything
            shapes = ", ".join(f"{name} {shape(value)}" for name, value in tensors.items())
            raise self.error(f"it raised {raised(problem)}. It was given {shapes}") from problem
        changed = [name for name, version in _versions(tensors).items() if version != before[name]]
        if changed and not copies:
            raise self.error(f"it changes {changed[0]} in place", f"Begin with {changed[0]} = {changed[0]}.clone().")
        return result

    def error(self, what: str, way_out: str = "Correct the function.") -> TrainingError:
        return TrainingError(f"{self.address}: {what}. {way_out}")


def _versions(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    # Tensors of inference mode have no version counter.
    return {name: value._version for name, value in tensors.items() if not value.is_inference()}


def shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def load_function(
    custom: CustomEstimator | CustomLoss, key: str, arguments: tuple[str, ...], extras: Collection[str] = ()
) -> UserFunction:
    """Load a function from a file.

    ``extras``: further arguments that the function may take. If there are any, an argument may also have the name of another
    function in the same file. That function then computes the argument from each token's distribution.

    Raises:
        ConfigError: The file or the name is missing, or the function asks for an unknown argument.
    """
    assert custom.path is not None, f"{key}.path is checked when settings are loaded"
    function = load_from_file(custom.path, custom.name, key=f"{key}.path", error=ConfigError)
    address = f"{key}.name={custom.name} in {custom.path}"
    if not callable(function) or inspect.isclass(function):
        kind = "class" if inspect.isclass(function) else type(function).__name__
        raise ConfigError(f"{address}: it is a {kind}, not a function. Name a function.")
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = [
        parameter.name for parameter in parameters if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    unknown = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]
    required = [parameter.name for parameter in parameters if parameter.name in named and parameter.default is parameter.empty]
    asked = [name for name in required if name not in (*arguments, *extras)]
    beside = getattr(function, "__globals__", {}) if extras else {}
    own = {name: _head_statistic(name) for name in asked if callable(beside.get(name))}
    unknown += [name for name in asked if name not in own]
    if unknown:
        further = f", and may ask for {', '.join(extras)}" if extras else ""
        raise ConfigError(
            f"{address}: it asks for {', '.join(unknown)}, which no run provides. It is called by name with "
            f"{', '.join(arguments)}{further}. Use these names, or give other arguments a default."
        )
    taken = [name for name in (*arguments, *extras, *own) if name in named or (takes_any and name in arguments)]
    return UserFunction(function, address, tuple(taken), own)


def custom_estimator(algorithm: Algorithm) -> UserFunction:
    return load_function(algorithm.custom_estimator, ESTIMATOR_KEY, ESTIMATOR_ARGUMENTS, EXTRAS)


def inputs_of(algorithm: Algorithm) -> tuple[str, ...]:
    if algorithm.adv_estimator != CUSTOM:
        return ESTIMATORS[algorithm.adv_estimator].inputs
    return tuple(EXTRAS[name].input for name in custom_estimator(algorithm).arguments if name in EXTRAS)


def statistics_of(algorithm: Algorithm) -> dict[str, str]:
    """Return the statistics of the LM head that the estimator reads: name -> address for :func:`load_statistic`."""
    own = custom_estimator(algorithm).own if algorithm.adv_estimator == CUSTOM else ()
    provided = {name: STATISTICS[name].function for name in inputs_of(algorithm) if name in STATISTICS}
    return provided | {name: f"{algorithm.custom_estimator.path}:{name}" for name in own}


def load_statistic(address: str) -> Statistic:
    """Load a statistic of the LM head. The address is a dotted name, or ``path:name`` for a function in a user's file."""
    path, _, name = address.rpartition(":")
    if not path:
        return cast("Statistic", load(address))
    function = load_from_file(path, name, key=f"{ESTIMATOR_KEY}.path", error=ConfigError)
    user = UserFunction(lambda log_probs: function(log_probs), f"{ESTIMATOR_KEY}.path={path}: {name}", ("log_probs",))

    def compute(log_probs: Tensor, scratch: Tensor | None) -> Tensor:
        found = user.call({"log_probs": log_probs})
        _check_tensor(user, "the statistic", found, log_probs[:, 0])
        return found.float()

    return Statistic(compute)


def custom_advantages(inputs: AdvantageInputs, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns of the user's estimator, both fp32 [R].

    The function gets padded tensors [rows, longest response], as verl's estimators do. Rows without a reward are left out of the
    call, and get advantage 0.

    Raises:
        TrainingError: The function raised an error, or returned something else than two such tensors.
    """
    estimator = custom_estimator(algorithm)
    assert inputs.token_rewards is not None
    valid_rows, nothing = inputs.valid, torch.zeros_like(inputs.token_rewards)
    lengths, tokens = inputs.lengths[valid_rows], valid_rows[inputs.row]
    # Number the rows again, without the rows that have no reward.
    row = (valid_rows.long().cumsum(0) - 1)[inputs.row[tokens]]
    if not row.numel():
        return nothing, nothing
    place = positions(row, lengths)
    padded = nothing.new_zeros(lengths.shape[0], int(lengths.max()))

    def pad(values: Tensor | None) -> Tensor | None:
        return None if values is None else padded.index_put((row, place), values[tokens])

    mask, extras = pad(torch.ones_like(nothing)), EXTRAS | estimator.own
    assert mask is not None
    offered = {
        "token_level_rewards": pad(inputs.token_rewards),
        "response_mask": mask.long(),
        "index": inputs.group[valid_rows].numpy(),
        "config": algorithm,
        **{name: pad(inputs.named(extra.input)) for name, extra in extras.items()},
    }
    missing = [name for name in estimator.arguments if offered[name] is None]
    if missing:
        raise estimator.error(f"this run does not compute {missing[0]}", f"{extras[missing[0]].way_out}.")
    result = estimator.call(offered, copies=True)
    if not isinstance(result, tuple) or len(result) != 2:
        found = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise estimator.error(f"it must return (advantages, returns), but it returned {found}")
    per_token = []
    for name, values in zip(("advantages", "returns"), result, strict=True):
        _check_tensor(estimator, name, values, padded)
        flat = values.detach()[row, place].float()
        if not flat.isfinite().all():
            at = int((~flat.isfinite()).nonzero()[0])
            raise estimator.error(
                f"{name} hold {flat[at].item()} at row {int(row[at])}, token {int(place[at])}",
                "Correct the function. The answers to a prompt may all have the same reward, so their deviation may be 0.",
            )
        per_token.append(nothing.masked_scatter(tokens, flat))
    return per_token[0], per_token[1]


def _check_tensor(user: UserFunction, name: str, values: Any, like: Tensor) -> None:
    if not isinstance(values, Tensor) or values.shape != like.shape or not values.is_floating_point():
        raise user.error(f"{name} must be a tensor float32 {list(like.shape)}, but it returned {shape(values)}")


def custom_loss(tokens: LossTokens, actor: Actor) -> LossAndMetrics:
    """Return the user's loss, aggregated by ``actor.loss_agg_mode``.

    Metrics: ``ratio_clamped``, the share of tokens whose log-ratio is beyond plus or minus 20.

    Raises:
        TrainingError: The function raised an error, or returned something else than one loss per token.
    """
    kept = torch.ones_like(tokens.row, dtype=torch.bool) if tokens.kept is None else tokens.kept
    losses = _token_losses(
        load_function(actor.policy_loss.custom, LOSS_KEY, LOSS_ARGUMENTS),
        tokens.log_probs, tokens.old_log_probs, tokens.advantages, kept, actor,
    )  # fmt: skip
    return tokens.aggregated(losses, actor), {"ratio_clamped": tokens.share(beyond_clamp(tokens.log_ratio))}


def _token_losses(
    user: UserFunction, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, kept: Tensor, actor: Actor
) -> Tensor:
    offered = (log_probs, old_log_probs, advantages, kept, actor)
    losses = user.call(dict(zip(LOSS_ARGUMENTS, offered, strict=True)))
    _check_tensor(user, "the loss", losses, log_probs)
    if log_probs.requires_grad and log_probs.numel() and not losses.requires_grad:
        raise user.error("the loss has no gradient", "Compute it from log_prob, without .detach() or .item().")
    return losses


TRIAL_TOKENS = 12
"""Number of made-up tokens on which a loss is tried."""


def check_custom(settings: Settings) -> None:
    """Try the user's own estimator and loss on a few made-up tokens, before anything starts.

    Raises:
        ConfigError: A file, a name or an argument is wrong.
        TrainingError: A function raised an error, or its result cannot be used.
    """
    algorithm, actor = settings.algorithm, settings.actor_rollout_ref.actor
    if algorithm.adv_estimator == CUSTOM:
        _try_estimator(settings, settings.actor_rollout_ref.rollout.n)
    if actor.policy_loss.loss_mode == CUSTOM and _decoupled(settings):
        _try_loss(actor)


def _try_estimator(settings: Settings, samples: int) -> None:
    estimator = custom_estimator(settings.algorithm)
    for name in estimator.arguments:
        extra = (EXTRAS | estimator.own).get(name)
        if extra is not None and not extra.is_there(settings):
            raise ConfigError(f"{estimator.address}: this run does not compute {name}. {extra.way_out}.")
    num_rows = 2 * samples
    lengths = 1 + torch.arange(num_rows) % 3
    row = torch.arange(num_rows).repeat_interleave(lengths)
    rewards = torch.arange(num_rows) % 2 * 1.0
    rewards[samples:] = 1.0  # equal rewards, as in a real step in which all answers to a prompt are right
    last = torch.cat([row[1:] != row[:-1], torch.ones(1, dtype=torch.bool)])
    made_up = {
        extra.input: torch.full(row.shape, -0.5 if "log" in name else 0.5)
        for name, extra in EXTRAS.items() if name not in STATISTICS
    }  # fmt: skip
    log_probs = torch.linspace(0.0, 1.0, 5).log_softmax(-1).repeat(row.shape[0], 1)
    asked = statistics_of(settings.algorithm)
    statistics = {name: load_statistic(address).compute(log_probs, None) for name, address in asked.items()}
    inputs = AdvantageInputs(
        rewards, torch.arange(num_rows) // samples, torch.ones(num_rows, dtype=torch.bool), row, lengths,
        token_rewards=torch.where(last, rewards[row], 0.0), statistics=statistics, **made_up,
    )  # fmt: skip
    custom_advantages(inputs, settings.algorithm)


def _try_loss(actor: Actor) -> None:
    user = load_function(actor.policy_loss.custom, LOSS_KEY, LOSS_ARGUMENTS)
    old = -torch.linspace(0.1, 3.0, TRIAL_TOKENS)
    new = old + torch.linspace(-0.4, 0.4, TRIAL_TOKENS)
    advantages = torch.linspace(1.0, -1.0, TRIAL_TOKENS)
    kept = torch.ones(TRIAL_TOKENS, dtype=torch.bool)

    def losses_and_gradient(part: slice) -> tuple[Tensor, Tensor]:
        leaf = new[part].clone().requires_grad_()
        losses = _token_losses(user, leaf, old[part], advantages[part], kept[part], actor)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf, allow_unused=True)
        if gradient is None:
            raise user.error("the loss has no gradient", "Compute it from log_prob, without .detach() or .item().")
        return losses.detach(), gradient

    whole = losses_and_gradient(slice(None))
    for name, values in zip(("the loss", "its gradient"), whole, strict=True):
        if not values.isfinite().all():
            raise user.error(f"{name} is not finite: {values[~values.isfinite()][0].item()}")
    # The head computes log-probs chunk by chunk and asks for the gradient of each chunk alone.
    for part, what, way_out in (
        (slice(None), "differs from call to call", "Remove everything random from it."),
        (
            slice(3, 7), "depends on the other tokens of the call",
            "Compute it from the numbers of the same token, because tokens come in chunks. Code that combines tokens belongs in "
            "an estimator.",
        ),
    ):  # fmt: skip
        for name, values, alone in zip(("the loss", "the gradient"), whole, losses_and_gradient(part), strict=True):
            if not torch.allclose(values[part], alone, rtol=1e-4, atol=1e-6):
                raise user.error(f"{name} of a token {what}", way_out)
