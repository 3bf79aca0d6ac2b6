"""Rules of the algorithm's settings: which combinations are refused, and which keys have no effect.

They cover estimators, losses, the critic, supervised fine-tuning and the rollout correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from verl_memopt.algorithms.records import (
    CUSTOM,
    RECORDS,
    SFT,
    STATISTICS,
    WITH_STATISTICS,
    WITHOUT_BASELINE,
    WITHOUT_GROUPS,
    with_input,
)
from verl_memopt.config.keys import IS_SET, above, belongs, idle, leaf_types, other_than, refused, shown
from verl_memopt.config.reward_rules import ENABLE, even_shards, own_pool
from verl_memopt.config.schema import Settings
from verl_memopt.errors import ConfigError
from verl_memopt.memory.critic_rules import has_critic, with_critic
from verl_memopt.memory.knob import DEVICES, Refusal, UnusedKey, num_devices
from verl_memopt.memory.quantized_base import KEY as QUANTIZATION
from verl_memopt.recipes import RECIPES

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
KEY = "algorithm.rollout_correction"
REPLAY_MODE = f"{_ACTOR}.router_replay.mode"
_ESTIMATOR, _LOSS = "algorithm.adv_estimator", f"{_ACTOR}.policy_loss"


_filters = attrgetter("algorithm.filter_groups.enable")


def _groups() -> Iterator[Refusal]:
    batch, round_batch, n = "data.train_batch_size", "data.gen_batch_size", f"{_ROLLOUT}.n"
    on, metric, kl = "algorithm.filter_groups.enable", "algorithm.filter_groups.metric", "algorithm.use_kl_in_reward"
    compared = {n: 1, _ESTIMATOR: other_than(*WITHOUT_GROUPS, *WITHOUT_BASELINE)}
    yield refused(compared, "a group of one has no baseline", f"Set {n} to 2 or more.")
    yield Refusal(
        (round_batch, batch),
        lambda settings: settings.data.gen_batch_size != settings.data.train_batch_size and not _filters(settings),
        "without algorithm.filter_groups a step has one round of generation",
        f"Remove {round_batch}, or set {on}=true.",
    )
    yield refused(
        {on: True, f"{_ROLLOUT}.do_sample": False},
        "greedy responses to one prompt are identical, so every group would be dropped",
        f"Set {_ROLLOUT}.do_sample=true, or {on}=false.",
        lambda settings: settings.actor_rollout_ref.rollout.n > 1,
    )
    filtered = {metric: "seq_final_reward", kl: True}
    yield refused(filtered, "groups are filtered before the KL is computed", f"Set {metric}=score.", _filters)


def _has_no_weight(settings: Settings) -> bool:
    control = settings.actor_rollout_ref.actor.entropy_ctrl
    return control.target is not None and control.min > control.max


def _losses() -> Iterator[Refusal]:
    mask, bypass = "algorithm.mask_truncated_responses", f"{KEY}.bypass_mode"
    way_out = f"Set {mask}=false, or {bypass}=false."
    yield refused({mask: True, bypass: True}, "the losses of bypass mode always use all tokens", way_out)
    quantile, entropies = (
        "algorithm.top_entropy_quantile",
        "the entropies come from the pass for old log-probs, which bypass mode skips",
    )
    yield refused({quantile: other_than(1.0), bypass: True}, entropies, f"Set {quantile}=1.0, or {bypass}=false.")
    lowest, highest = (f"{_ACTOR}.entropy_ctrl.{name}" for name in ("min", "max"))
    yield Refusal((lowest, highest), _has_no_weight, "the smallest weight is above the largest", f"Lower {lowest}.")
    yield from _router_replay()
    endless = "with ignore_eos every response is truncated, so nothing would be learned"
    yield refused({mask: True, f"{_ROLLOUT}.ignore_eos": True}, endless, f"Set {mask}=false.")


def _router_replay() -> Iterator[Refusal]:
    mode, skip = REPLAY_MODE, f"{_ROLLOUT}.skip_rollout"
    way_out = f"Set {mode}=R3, or disabled."
    recorded = "R2 records experts in the pass for old log-probs, which bypass mode skips"
    yield refused({mode: "R2", f"{KEY}.bypass_mode": True}, recorded, way_out)
    spread = "each of these ranks would record a part of the tokens"
    yield refused({mode: "R2", f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": above(1)}, spread, way_out)
    stored, off = "stored and forged rollouts have no record of experts", f"Set {mode}=R2, or disabled."
    yield refused({mode: "R3", skip: True}, stored, off)
    yield refused({mode: "R3", "debug.mode": "forge"}, stored, off)


def _custom(choice: str, section: str) -> Iterator[Refusal]:
    path = f"{section}.path"
    way_out = f"Set {path}=/path/to/file.py and {section}.name, or choose another {choice}."
    yield refused({choice: CUSTOM, path: None}, "custom needs the file of your function", way_out)
    unchosen, way_out = {choice: other_than(CUSTOM), path: IS_SET}, f"Set {choice}=custom, or remove {path}."
    yield refused(unchosen, "the function of this file is not chosen", way_out)


ALGORITHM_RULES: tuple[Refusal, ...] = (
    *_groups(),
    *_losses(),
    *_custom(_ESTIMATOR, "algorithm.custom_estimator"),
    *_custom(f"{_LOSS}.loss_mode", f"{_LOSS}.custom"),
    *(refusal for record in RECORDS for refusal in record.refuses),
)
"""The rules above, and the rules that estimators and losses declare in their records."""


# The critic: refused combinations of its keys, and when its keys have no effect.


_ENABLE = "critic.enable"
_NO_CRITIC = "algorithm.adv_estimator is not gae, the one estimator that reads the values of a critic, so no critic is built"
_WARMUP, _KEPT = "trainer.critic_warmup", "trainer.max_critic_ckpt_to_keep"


def _without_critic(settings: Settings) -> bool:
    return not has_critic(settings)


def _has_own_mini_batch(settings: Settings) -> bool:
    return settings.critic.ppo_mini_batch_size != settings.actor_rollout_ref.actor.ppo_mini_batch_size


def _critic_rules() -> Iterator[Refusal]:
    batch, mini = "data.train_batch_size", "critic.ppo_mini_batch_size"
    yield refused(
        {_ENABLE: False},
        "algorithm.adv_estimator=gae needs a critic",
        f"Remove {_ENABLE}, or set algorithm.adv_estimator=rloo, grpo or another estimator without a critic.",
    )
    yield Refusal(
        (batch, mini),
        lambda settings: (
            _has_own_mini_batch(settings)
            and settings.data.train_batch_size % max(settings.critic.ppo_mini_batch_size or 0, 1) != 0
        ),
        "the prompts of a step do not divide into mini-batches",
        f"Set {mini} to a divisor of {batch}, or remove it: then it follows {_ACTOR}.ppo_mini_batch_size.",
    )
    yield from even_shards("critic.model.fsdp_config", "critic")
    yield from own_pool("critic")
    yield Refusal(
        (_KEPT, "trainer.max_actor_ckpt_to_keep"),
        lambda settings: settings.trainer.max_critic_ckpt_to_keep != settings.trainer.max_actor_ckpt_to_keep,
        "a checkpoint holds policy and critic of one step, and is kept or removed as a whole",
        f"Set trainer.max_actor_ckpt_to_keep only, which {_KEPT} follows, or set both to the same number.",
    )
    yield Refusal(
        (_WARMUP, "trainer.total_training_steps"),
        lambda settings: settings.trainer.critic_warmup > (settings.trainer.total_training_steps or math.inf),
        "the policy would never be updated",
        f"Set {_WARMUP} to at most the number of training steps.",
    )


def _unused_critic() -> Iterator[UnusedKey]:
    yield UnusedKey(_ENABLE, lambda settings: bool(settings.critic.enable) and _without_critic(settings), _NO_CRITIC)
    critic_keys = (key for key in leaf_types() if key.startswith("critic.") and key != _ENABLE)
    for key in (*critic_keys, _WARMUP, _KEPT):
        yield UnusedKey(key, _without_critic, _NO_CRITIC)


CRITIC_RULES: tuple[Refusal, ...] = tuple(map(with_critic, _critic_rules()))
"""The rules of the critic. They apply only to runs with a critic."""

WITHOUT_CRITIC = {unused.key: unused for unused in _unused_critic()}
"""Key -> why it has no effect in a run without a critic."""


# Supervised fine-tuning (``algorithm.adv_estimator=sft``): what it refuses, and which keys have no effect in it.


OTHER_LOSS = "the loss would not be the mean negative log-prob of the responses"
NO_ROLLOUT = "supervised fine-tuning has no rollout and no reward"
_ONLY: dict[str, tuple[tuple[str, Any], ...]] = {
    OTHER_LOSS: (
        (f"{_ACTOR}.use_kl_loss", False), ("algorithm.use_kl_in_reward", False), (f"{_LOSS}.loss_mode", "gpg"),
        (f"{_ACTOR}.loss_agg_mode", "token-mean"), (f"{_ACTOR}.entropy_coeff", 0.0), (f"{_ACTOR}.entropy_ctrl.target", None),
        (f"{_ROLLOUT}.temperature", 1.0),
        (f"{_ACTOR}.off_policy_mask_threshold", None), ("algorithm.top_entropy_quantile", 1.0),
    ),
    "the dataset has one response per prompt": ((f"{_ROLLOUT}.n", 1),),
    NO_ROLLOUT: (
        (f"{_ROLLOUT}.skip_rollout", False), (f"{KEY}.bypass_mode", False), (f"{KEY}.rollout_is", None),
        (REPLAY_MODE, "disabled"),
        (f"{KEY}.rollout_rs", None), ("custom_reward_function.path", None), ("algorithm.filter_groups.enable", False),
        ("algorithm.use_pf_ppo", False), (ENABLE, False), ("algorithm.mask_truncated_responses", False),
        ("algorithm.reward_clip_range", None),
    ),
}  # fmt: skip
"""Reason -> the keys that allow only one value for this reason, each with that value."""
_MODES = ("rollout_only", "score_only", "train_only", "sync_check")
_READ = ("temperature", "n", "skip_rollout", "name", "mode", "seed", "do_sample")
"""Keys of ``rollout`` that a supervised run uses or refuses. The others have no effect in it."""


def is_supervised(settings: Settings) -> bool:
    return settings.algorithm.adv_estimator == SFT


def _brings_no_dataset(settings: Settings) -> bool:
    # `reward_model.enable` also switches on a recipe. A recipe has a dataset that a supervised run can train on.
    return settings.reward_model.reward_manager not in RECIPES


def _without_engine() -> Iterator[UnusedKey]:
    for key in (key for key in leaf_types() if key.startswith(f"{_ROLLOUT}.")):
        if key.removeprefix(f"{_ROLLOUT}.") not in _READ and ".log_prob_" not in key:
            yield UnusedKey(key, is_supervised, f"{_ESTIMATOR} is {SFT}, which has no engine")


SUPERVISED_RULES: tuple[Refusal, ...] = (
    *(
        refused(
            {key: other_than(wanted), _ESTIMATOR: SFT},
            why,
            f"Set {key}={shown(wanted)}, or remove it.",
            _brings_no_dataset if key == ENABLE else None,
        )
        for why, rows in _ONLY.items()
        for key, wanted in rows
    ),
    refused(
        {"debug.mode": _MODES.__contains__, _ESTIMATOR: SFT},
        "this debug mode needs rollouts, and supervised fine-tuning has none",
        "Set debug.mode=off, dry, forge, memory or deterministic.",
    ),
    refused(
        {QUANTIZATION: other_than("none"), _ESTIMATOR: SFT, **dict.fromkeys(DEVICES, above(0))},
        "on several devices FSDP2 would shard the quantised bytes unless they belong to an engine, and there is no engine",
        f"Use one device, or set {QUANTIZATION}=none.",
        lambda settings: num_devices(settings) > 1,
    ),
)
"""What a supervised run refuses."""

WITHOUT_ENGINE = {unused.key: unused for unused in _without_engine()}
"""Key -> why it has no effect in a supervised run."""


# The rollout correction, ReMax, the optimal token baselines and PF-PPO.

REJECTIONS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
)  # fmt: skip
"""The names that ``rollout_rs`` accepts, separated by commas."""


def importance_bounds(threshold: float | str) -> tuple[float | None, float]:
    """Parse ``rollout_is_threshold`` into (lower bound, upper bound). One number is an upper bound, and the lower bound is None.

    Raises:
        ConfigError: A bound cannot be read.
    """
    bounds = _numbers(threshold)
    if len(bounds) not in (1, 2) or bounds[0] > bounds[-1]:
        raise ConfigError(
            f"{KEY}.rollout_is_threshold={threshold}: give one positive number, or two as lower_upper with lower <= upper, "
            "such as 0.5_5.0."
        )
    return (bounds[0] if len(bounds) == 2 else None), bounds[-1]


def rejection_bounds(names: str, threshold: float | str | None) -> dict[str, tuple[float, float]]:
    """Return name of a rejection -> (lower bound, upper bound) of its divergence.

    k1 takes ``lower_upper``, two bounds of a ratio, or one upper bound whose reciprocal is the lower bound. Its divergence is the
    log-ratio, so the logarithms of these bounds are returned. k2 and k3 take one upper bound; their lower bound is minus
    infinity.

    Args:
        names: Names of rejections, separated by commas.
        threshold: One threshold for all rejections, or one for each, separated by commas.

    Raises:
        ConfigError: A name or a threshold cannot be read.
    """
    rejections = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in rejections if name not in REJECTIONS]
    if unknown or not rejections:
        raise ConfigError(f"{KEY}.rollout_rs={names}: give names out of {', '.join(REJECTIONS)}, separated by commas.")
    specs = [part.strip() for part in str(threshold).split(",") if part.strip()]
    if threshold is None or len(specs) not in (1, len(rejections)):
        raise ConfigError(
            f"{KEY}.rollout_rs_threshold={threshold}: give one threshold for all of {names}, or one for each, "
            "separated by commas."
        )
    specs = specs * len(rejections) if len(specs) == 1 else specs
    return {name: _bounds(name, spec) for name, spec in zip(rejections, specs, strict=True)}


def _numbers(text: float | str) -> list[float]:
    # Return [] if a part of the text is not a finite number above 0.
    try:
        numbers = [float(part) for part in str(text).split("_")]
    except ValueError:
        return []
    return numbers if all(0 < number < math.inf for number in numbers) else []


def _bounds(name: str, spec: str) -> tuple[float, float]:
    numbers, ratio = _numbers(spec), name.endswith("k1")
    if (
        len(numbers) not in ((1, 2) if ratio else (1,))
        or numbers[0] > numbers[-1]
        or (ratio and len(numbers) == 1 and numbers[0] < 1)
    ):
        form = "lower_upper with lower <= upper, such as 0.5_2.0, or one number of at least 1" if ratio else "one positive number"
        raise ConfigError(f"{KEY}.rollout_rs_threshold={spec}: {name} needs {form}.")
    if not ratio:
        return -math.inf, numbers[0]
    lower = numbers[0] if len(numbers) == 2 else 1 / numbers[0]
    return math.log(lower), math.log(numbers[-1])


_WEIGHTS, _WEIGHTS_BOUND = f"{KEY}.rollout_is", f"{KEY}.rollout_is_threshold"
_REJECTION, _REJECTION_BOUND = f"{KEY}.rollout_rs", f"{KEY}.rollout_rs_threshold"
_BYPASS, _BYPASS_LOSS = f"{KEY}.bypass_mode", f"{KEY}.loss_type"
_SWITCHED = tuple((f"{_ACTOR}.{row.key}", with_input(row.name), row.help) for row in STATISTICS.values() if row.key)
"""(key, estimators that need it, name of the statistic that the pass for old log-probs then computes)."""


def _fault(read: Callable[..., Any], *values: Any) -> str | None:
    try:
        read(*values)
    except ConfigError as error:
        # Cut off the address: the rule that reports the fault adds its own.
        return str(error).partition(": ")[2].rstrip(".")
    return None


def _weights_fault(settings: Settings) -> str | None:
    correction = settings.algorithm.rollout_correction
    return None if correction.rollout_is is None else _fault(importance_bounds, correction.rollout_is_threshold)


def _rejection_fault(settings: Settings) -> str | None:
    given = settings.algorithm.rollout_correction
    return None if given.rollout_rs is None else _fault(rejection_bounds, given.rollout_rs, given.rollout_rs_threshold)


def _corrects(settings: Settings) -> bool:
    correction = settings.algorithm.rollout_correction
    return bool(correction.rollout_is or correction.rollout_rs or correction.bypass_mode)


_bypasses = attrgetter(_BYPASS)


def _correction_rules() -> Iterator[Refusal]:
    yield Refusal(
        (_WEIGHTS_BOUND,),
        lambda settings: _weights_fault(settings) is not None,
        "expected one bound or two",
        "",
        lambda settings: str(_weights_fault(settings)),
    )
    yield Refusal(
        (_REJECTION, _REJECTION_BOUND),
        lambda settings: _rejection_fault(settings) is not None,
        "a rejection is unknown, or its threshold cannot be read",
        "",
        lambda settings: str(_rejection_fault(settings)),
    )
    returned, mode, temperature = (f"{_ROLLOUT}.{key}" for key in ("calculate_log_probs", "logprobs_mode", "temperature"))
    compared, way_out = f"{KEY} needs the engine's log-probs", f"Set {returned}=true, or remove the correction."
    yield refused({returned: False}, compared, way_out, _corrects)
    yield refused(
        {mode: "raw_logprobs", temperature: other_than(1)},
        f"{KEY} needs log-probs at the sampling temperature, and raw log-probs are at temperature 1",
        f"Set {mode}=processed_logprobs.",
        _corrects,
    )
    for switch, estimators, what in _SWITCHED:
        reads = {_ESTIMATOR: estimators.__contains__, switch: False}
        yield refused(reads, f"this estimator needs {what} at each token", f"Set {switch}=true.")
    left_out = "this estimator needs the pass for old log-probs, which bypass mode skips"
    yield refused({_ESTIMATOR: WITH_STATISTICS.__contains__, _BYPASS: True}, left_out, f"Set {_BYPASS}=false.")


def _reports_weights_alone(settings: Settings) -> bool:
    correction = settings.algorithm.rollout_correction
    return correction.rollout_is is not None and correction.bypass_mode and correction.loss_type == "ppo_clip"


def _unused_corrections() -> Iterator[UnusedKey]:
    yield from idle(_WEIGHTS, None, _WEIGHTS_BOUND, f"{KEY}.rollout_is_batch_normalize")
    yield from idle(_REJECTION, None, _REJECTION_BOUND)
    yield from idle(_BYPASS, False, _BYPASS_LOSS)
    yield UnusedKey(
        _WEIGHTS,
        _reports_weights_alone,
        f"with {_BYPASS} the ratio of {_BYPASS_LOSS}=ppo_clip already is the correction, so weights are only reported",
    )
    for key in ("calculate_entropy", "old_log_prob_pass"):
        yield UnusedKey(f"{_ACTOR}.{key}", _bypasses, f"{_BYPASS} skips the pass for old log-probs")
    for switch, estimators, _ in _SWITCHED:
        yield belongs(switch, _ESTIMATOR, estimators, f"it belongs to {' and '.join(estimators)}")
    yield from idle("algorithm.use_pf_ppo", False, "algorithm.pf_ppo.reweight_method", "algorithm.pf_ppo.weight_pow")


CORRECTION_RULES: tuple[Refusal, ...] = tuple(_correction_rules())
"""What the rollout correction refuses, alone and together with estimators."""

CORRECTION_UNUSED: tuple[UnusedKey, ...] = tuple(_unused_corrections())
"""When a key of the rollout correction or of PF-PPO has no effect."""
