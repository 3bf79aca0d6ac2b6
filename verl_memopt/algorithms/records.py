"""One record for each advantage estimator and policy loss, and the settings that these read. Does not import torch.

A record tells the rest of the package about a function: its text on the settings page, the inputs that cost a forward pass, the
keys that it reads, and the settings that it refuses. The functions are in ``estimators.py`` and ``losses.py`` in this folder. To
add an estimator or a loss, write the function there and its record here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from verl_memopt.memory.knob import POSITIVE, Meanings, NaturalFloat, PositiveShare, Refusal, Share, UnusedKey

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

CUSTOM = "custom"
"""Value of ``algorithm.adv_estimator`` and of ``policy_loss.loss_mode`` for a function in a user's file."""

SFT = "sft"
"""Value of ``algorithm.adv_estimator`` for supervised fine-tuning, in which a run learns the responses of the dataset."""

DISTILL = "distill"
"""Value of ``algorithm.adv_estimator`` for distillation, in which a run learns from a teacher alone."""

_HERE = "verl_memopt.algorithms"
_LOSS = "actor_rollout_ref.actor.policy_loss"


@dataclass(frozen=True)
class Estimator:
    name: str
    """Value of ``algorithm.adv_estimator``, in verl's spelling."""
    help: str
    """What the estimator does, for the settings page."""
    inputs: tuple[str, ...]
    """Parameters that are filled from the fields of :class:`verl_memopt.algorithms.estimators.AdvantageInputs`, or with a
    statistic of ``STATISTICS``."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> key below ``algorithm``. Setting the key under another estimator earns a warning."""
    per_token: bool = False
    """The function returns one advantage per token. False = one advantage per row."""
    compares: bool = True
    """The estimator compares responses to the same prompt, so it needs at least two of them."""
    alone: bool = False
    """If a prompt has a single response, the reward itself is the advantage, as in verl."""
    refuses: tuple[Refusal, ...] = ()
    unused_keys: tuple[UnusedKey, ...] = ()
    named: str | None = None
    """Name of the function, as ``file.function`` in this folder; None = ``estimators.<name>_advantages``."""

    @property
    def function(self) -> str:
        """Dotted name of the function. It is called with ``inputs`` and ``options`` by parameter name.

        It returns one advantage per row, [B]. With ``per_token`` it returns one advantage per token, [R], or a pair of advantages
        and returns per token.
        """
        return f"{_HERE}.{self.named or f'estimators.{self.name}_advantages'}"


@dataclass(frozen=True)
class TokenStatistic:
    """A number that describes each token's distribution. The pass for old log-probs computes it if the estimator reads it."""

    name: str
    """Name of the input of estimators, fp32 [R]."""
    help: str
    """What the statistic is, for errors."""
    function: str
    """Dotted name of its :class:`verl_memopt.memory.logit_tiles.Statistic`."""
    key: str | None = None
    """verl's switch below ``actor_rollout_ref.actor`` that must be on if an estimator reads the statistic; None = no switch."""


_ROW = ("rewards", "group", "valid")
_TOKEN = ("token_rewards", "row", "valid")
_BY_STD, _NORMALIZED = {"normalize_by_std": "norm_adv_by_std_in_grpo"}, {"normalize": "normalize_advantages"}
_EPSILON = {"epsilon": "norm_adv_epsilon"}
_TOKEN_BASELINE = (*_TOKEN, "group", "old_log_probs", "sum_pi_squared", "weights")


def _by_name(*records: Any) -> dict[str, Any]:
    return {record.name: record for record in records}


_ESTIMATOR, _GDPO_KEYS, _GDPO_WEIGHTS = "algorithm.adv_estimator", "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"


def _is_gdpo(settings: Settings) -> bool:
    return settings.algorithm.adv_estimator == "gdpo"


def _has_other_weights(settings: Settings) -> bool:
    weights, keys = settings.algorithm.gdpo_reward_weights, settings.algorithm.gdpo_reward_keys
    return _is_gdpo(settings) and weights is not None and len(weights) != len(keys or ())


_SUM = f"{_HERE}.estimators.SUM_PI_SQUARED"
STATISTICS: dict[str, TokenStatistic] = _by_name(
    TokenStatistic("sum_pi_squared", "the sum of squared probabilities", _SUM, "calculate_sum_pi_squared"),
)
"""Name -> record of every statistic of the LM head that estimators read."""

ESTIMATORS: dict[str, Estimator] = _by_name(
    Estimator(
        "gae", "generalised advantage estimation over the values of a critic (PPO), whitened over the batch",
        (*_TOKEN, "values", "lengths"), {"gamma": "gamma", "lam": "lam"}, per_token=True, compares=False,
    ),
    Estimator("rloo", "reward minus the mean of the others in the group", _ROW, _NORMALIZED, alone=True),
    Estimator(
        "grpo", "reward minus the group's mean, divided by the group's standard deviation", _ROW,
        {**_BY_STD, **_EPSILON, "std_of": "norm_adv_std_of"}, alone=True,
    ),
    Estimator("grpo_passk", "the best response of a group gets its lead over the second best, the others get 0", _ROW, _BY_STD),
    Estimator(
        "reinforce_plus_plus", "discounted rewards of each token, whitened over the batch, without groups",
        _TOKEN, {"gamma": "gamma"}, per_token=True, compares=False,
    ),
    Estimator(
        "reinforce_plus_plus_baseline", "reward minus the group's mean, whitened over the batch", (*_ROW, "row"), per_token=True,
        alone=True,
    ),
    Estimator("opo", "reward minus the group's mean, weighted by response length", (*_ROW, "lengths"), alone=True),
    Estimator(
        "gdpo", "weighted sum of grpo's advantages, one for each reward in gdpo_reward_keys, whitened over the batch",
        ("components", "group", "valid", "row"),
        {**_BY_STD, **_EPSILON, "weights": "gdpo_reward_weights", "whiten_over": "gdpo_whiten_over"},
        per_token=True, alone=True,
        refuses=(
            Refusal(
                (_ESTIMATOR, _GDPO_KEYS), lambda settings: _is_gdpo(settings) and not settings.algorithm.gdpo_reward_keys,
                "there is no reward to normalize",
                f"Set {_GDPO_KEYS} to names of numbers that the reward function returns, as [format,accuracy].",
            ),
            Refusal(
                (_GDPO_KEYS, _GDPO_WEIGHTS), _has_other_weights, "each reward needs one weight",
                f"Give {_GDPO_WEIGHTS} as many numbers as {_GDPO_KEYS} has names, or leave it out: each then weighs 1.",
            ),
            Refusal(
                (_ESTIMATOR, "algorithm.use_kl_in_reward"),
                lambda settings: _is_gdpo(settings) and settings.algorithm.use_kl_in_reward,
                "the advantages come from the rewards in gdpo_reward_keys, and the KL is in none of them",
                "Set actor_rollout_ref.actor.use_kl_loss=true and algorithm.use_kl_in_reward=false.",
            ),
            Refusal(
                (_ESTIMATOR, "algorithm.reward_clip_range"),
                lambda settings: _is_gdpo(settings) and settings.algorithm.reward_clip_range is not None,
                "the advantages come from the rewards in gdpo_reward_keys, and not from their sum",
                "Set algorithm.reward_clip_range=null, and clip in the reward functions.",
            ),
        ),
        unused_keys=(UnusedKey(_GDPO_KEYS, lambda settings: not _is_gdpo(settings), "it belongs to gdpo"),),
    ),
    Estimator(
        "gpg", "reward minus the group's mean, scaled up to make up for rows without a signal", _ROW, {"counts": "gpg_counts"},
        alone=True,
    ),
    Estimator(
        "remax", "reward minus the reward of a greedy response to the same prompt, which is generated in addition",
        (*_TOKEN, "baselines"), per_token=True, compares=False,
    ),
    Estimator(
        "optimal_token_baseline",
        "rewards from each token on, minus a baseline for each position in the response, "
        "weighted by the size of the gradients so far",
        _TOKEN_BASELINE, per_token=True,
    ),
    Estimator(
        "tir_optimal_token_baseline", "the same, because responses have one turn", _TOKEN_BASELINE, per_token=True,
        named="estimators.optimal_token_baseline_advantages",
    ),
    Estimator(
        SFT, "1 for every token of the dataset's own responses: supervised fine-tuning, without rollouts and rewards",
        ("rewards",), compares=False,
    ),
    Estimator(
        DISTILL, "0 for every token: rewards are not learned from, only the teacher of the section distill", ("rewards",),
        compares=False,
    ),
    Estimator(CUSTOM, "the function that custom_estimator names", (), compares=False, named="custom.custom_advantages"),
)  # fmt: skip
"""Name -> record of every estimator."""


@dataclass(frozen=True)
class Loss:
    name: str
    """Value of ``policy_loss.loss_mode``, in verl's spelling."""
    help: str
    """What the loss does, for the settings page."""
    ratio: str
    """The ratios of the loss, for the log line that describes what a run trains."""
    options: tuple[str, ...] = ()
    """Keys below ``actor_rollout_ref.actor`` that the loss reads. Setting a key that only other losses read earns a warning."""
    token_local: bool = True
    """Loss and gradient of a token do not depend on log-probs of other tokens. So the LM head can compute its gradient in the
    forward."""
    is_ratio: bool = True
    """The gradient depends on log-probs only through the ratio. If the ratio is 1, it is known before any log-prob."""
    by_sequence: bool = False
    """The loss averages over sequences, whatever ``loss_agg_mode`` says."""
    selects: str | None = None
    """Dotted name of the function that selects the tokens on which the loss acts, from the old log-probs of a whole
    mini-batch."""
    refuses: tuple[Refusal, ...] = ()
    unused_keys: tuple[UnusedKey, ...] = ()
    named: str | None = None
    """Name of the function, as ``file.function`` in this folder; None = ``losses.<name>_loss``."""

    @property
    def function(self) -> str:
        """Dotted name of the function. It takes a :class:`verl_memopt.algorithms.losses.LossTokens` and the settings ``actor``.

        It returns the micro-batch's share of the loss, and metrics.
        """
        return f"{_HERE}.{self.named or f'losses.{self.name}_loss'}"


_CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")


def _has_empty_bounds(settings: Settings) -> bool:
    loss = settings.actor_rollout_ref.actor.policy_loss
    return loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub


def _has_flat_penalty(settings: Settings) -> bool:
    actor = settings.actor_rollout_ref.actor
    one_step = settings.data.train_batch_size == actor.ppo_mini_batch_size and actor.ppo_epochs == 1
    return actor.policy_loss.loss_mode == "kl_cov" and one_step


LOSSES: dict[str, Loss] = _by_name(
    Loss("vanilla", "clipped ratio per token (PPO)", "one clipped ratio per token", (*_CLIP, "clip_ratio_c")),
    Loss(
        "sequence", "clipped ratio per sequence, exp of the summed log-ratio, averaged over sequences (RLOO)",
        "one clipped ratio per sequence", _CLIP, token_local=False, by_sequence=True,
    ),
    Loss(
        "gspo", "clipped ratio per sequence, exp of the mean log-ratio (GSPO); as in the paper with "
        "loss_agg_mode=seq-mean-token-mean",
        "one clipped ratio per sequence, length-normalised",
        _CLIP, token_local=False,
    ),
    Loss(
        "geo_mean", "geometric mean of a sequence's ratios, each clipped, averaged over sequences (GMPO)",
        "one ratio per sequence, the geometric mean of clipped ones", _CLIP, token_local=False, by_sequence=True,
    ),
    Loss(
        "cispo", "the clipped ratio of a token weighs its log-prob and has no gradient",
        "log-probs weighted by one clipped ratio per token", (*_CLIP, "policy_loss.cispo_max_ratio"),
    ),
    Loss(
        "dppo_tv", "log-prob weighted by a ratio, without the tokens whose probability moved further than the clips (DPPO)",
        "log-probs weighted by one ratio per token, without tokens that moved far", (*_CLIP, "clip_ratio_c"),
    ),
    Loss(
        "dppo_kl", "as dppo_tv, but measured by a KL divergence",
        "log-probs weighted by one ratio per token, without tokens that moved far",
        (*_CLIP, "clip_ratio_c"),
    ),
    Loss("gpg", "log-prob times advantage, without a ratio (REINFORCE, GPG)", "log-probs without a ratio"),
    Loss(
        "sapo", "a smooth gate on the ratio of a token instead of the clip, averaged over sequences (SAPO)",
        "one gated ratio per token", ("tau_pos", "tau_neg"), by_sequence=True,
    ),
    Loss(
        "vespo", "log-prob weighted by a smooth function of the ratio of its sequence, without a gradient (VESPO)",
        "log-probs weighted by one ratio per sequence",
        tuple(f"policy_loss.vespo_{name}" for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")), token_local=False,
    ),
    Loss(
        "clip_cov", "clipped ratio per token, without the gradient of some tokens whose log-prob and advantage vary together",
        "one clipped ratio per token, some tokens without a gradient",
        (*_CLIP, "policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb", "policy_loss.clip_cov_ub"),
        selects=f"{_HERE}.losses.select_clip_cov",
        refuses=(
            Refusal(
                (f"{_LOSS}.clip_cov_lb", f"{_LOSS}.clip_cov_ub"), _has_empty_bounds,
                "no covariance lies between the bounds", f"Set {_LOSS}.clip_cov_lb below clip_cov_ub.",
            ),
        ),
    ),
    Loss(
        "kl_cov", "unclipped ratio per token, and a KL penalty on the tokens whose log-prob and advantage vary together most",
        "one ratio per token, a KL penalty on some",
        ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"),
        selects=f"{_HERE}.losses.select_kl_cov",
        unused_keys=(
            UnusedKey(
                f"{_LOSS}.loss_mode", _has_flat_penalty,
                "with one optimizer step per rollout every ratio is 1, where its penalty has no gradient",
            ),
        ),
    ),
    Loss(
        CUSTOM, "the function that custom names, per token", "a function of the user's own",
        is_ratio=False, named="custom.custom_loss",
    ),
)  # fmt: skip
"""Name -> record of every policy loss."""

RECORDS: tuple[Estimator | Loss, ...] = (*ESTIMATORS.values(), *LOSSES.values())

if TYPE_CHECKING:
    EstimatorName = str
    LossName = str
else:  # the allowed values are the names of the records
    EstimatorName = Literal[tuple(ESTIMATORS)]
    LossName = Literal[tuple(LOSSES)]


@dataclass(frozen=True)
class CustomEstimator:
    path: str | None = None
    """Python file of the estimator."""
    name: str = "compute_advantages"
    """Name of the function in the file. It takes the arguments of an estimator that is registered in verl."""


@dataclass(frozen=True)
class CustomLoss:
    path: str | None = None
    """Python file of the loss."""
    name: str = "compute_loss"
    """Name of the function in the file. It gets log-probs and advantages of some tokens, and returns the loss of each token."""


@dataclass(frozen=True)
class EstimatorSettings:
    adv_estimator: Annotated[
        EstimatorName, Meanings(tuple((estimator.name, estimator.help) for estimator in ESTIMATORS.values()))
    ] = "gae"
    """How rewards become advantages."""
    gamma: Share = 1.0
    """Discount per token; gae and reinforce_plus_plus only."""
    lam: Share = 1.0
    """gae: how far an advantage looks ahead. 1 = to the end of the response, the return minus the value; 0 = one token."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo, grpo_passk and gdpo: divide by the group's standard deviation."""
    norm_adv_std_of: Literal["group", "batch"] = "group"
    """grpo: the rewards whose standard deviation divides. group = the rewards of the same prompt; batch = all rewards of the
    step, so that easy and hard prompts have the same weight."""
    norm_adv_epsilon: NaturalFloat = 1e-6
    """grpo and gdpo: added to the standard deviation. verl has 1e-6, TRL has 1e-4."""
    gdpo_reward_keys: list[str] | None = None
    """gdpo: names of the rewards. Each is a number in the dict that the reward function returns; score is the dict's score."""
    gdpo_reward_weights: list[float] | None = None
    """gdpo: weight of each reward in gdpo_reward_keys; null = 1 each."""
    gdpo_whiten_over: Literal["tokens", "rows"] = "tokens"
    """gdpo: where the weighted sum gets mean 0 and standard deviation 1. tokens = over all tokens of the step, as in verl, so
    that long responses count more; rows = over all responses of the step, with 1e-4 added to the standard deviation, as in
    TRL."""
    gpg_counts: Literal["scored", "informative"] = "scored"
    """gpg: advantages are multiplied by the number of rows, divided by the number of counted rows. scored = count rows whose
    reward is not 0, as verl; informative = count rows of groups whose rewards differ, as the paper."""
    normalize_advantages: bool = False
    """rloo: subtract the mean of the advantages and divide by (standard deviation + 1e-4), both over the valid rows of the
    step."""
    custom_estimator: CustomEstimator = field(default_factory=CustomEstimator)
    """The user's own estimator."""


@dataclass(frozen=True)
class PolicyLoss:
    loss_mode: Annotated[LossName, Meanings(tuple((loss.name, loss.help) for loss in LOSSES.values()))] = "vanilla"
    """The loss of the policy."""
    clip_cov_ratio: PositiveShare = 0.0002
    """clip_cov: share of the tokens of a mini-batch that lose their gradient, at least one token."""
    clip_cov_lb: float = 1.0
    """clip_cov: only tokens whose covariance of log-prob and advantage is above this lose their gradient."""
    clip_cov_ub: float = 5.0
    """clip_cov: only tokens whose covariance of log-prob and advantage is below this lose their gradient."""
    kl_cov_ratio: PositiveShare = 0.0002
    """kl_cov: share of the tokens of a mini-batch that get the penalty, at least one token. They have the largest covariance of
    log-prob and advantage."""
    ppo_kl_coef: NaturalFloat = 0.1
    """kl_cov: weight of the penalty, the absolute log-ratio of a token."""
    cispo_max_ratio: Annotated[float | None, POSITIVE] = None
    """cispo: upper bound of the ratio that weighs a log-prob, instead of both clips; ScaleRL (arXiv 2510.13786) has 5. null = the
    clips."""
    vespo_k_pos: NaturalFloat = 2.0
    """vespo: k in the weight ratio^k * exp(lambda * (1 - ratio)) of a response with an advantage of at least 0. Larger = less
    weight for ratios below 1."""
    vespo_lambda_pos: NaturalFloat = 3.0
    """vespo: lambda in the same weight, for an advantage of at least 0. Larger = less weight for ratios above 1."""
    vespo_k_neg: NaturalFloat = 3.0
    """vespo: k for negative advantages."""
    vespo_lambda_neg: NaturalFloat = 2.0
    """vespo: lambda for negative advantages."""
    custom: CustomLoss = field(default_factory=CustomLoss)
    """The user's own loss."""


def with_input(name: str) -> tuple[str, ...]:
    return tuple(estimator.name for estimator in ESTIMATORS.values() if name in estimator.inputs)


def with_option(key: str) -> tuple[str, ...]:
    estimators = (estimator.name for estimator in ESTIMATORS.values() if key in estimator.options.values())
    return (*estimators, *(loss.name for loss in LOSSES.values() if key in loss.options))


WITH_CRITIC = with_input("values")
"""Estimators that read the values of a critic. With any other no critic is built."""

WITH_GREEDY_RESPONSES = with_input("baselines")
"""Estimators that read the score of a greedy response to each prompt."""

WITH_STATISTICS = tuple(name for statistic in STATISTICS for name in with_input(statistic))
"""Estimators that read a statistic of the LM head, which the pass for old log-probs computes."""

WITHOUT_GROUPS = tuple(estimator.name for estimator in ESTIMATORS.values() if not estimator.compares)
"""Estimators that do not compare responses to the same prompt, so that one response per prompt is enough."""

WITHOUT_BASELINE = tuple(estimator.name for estimator in ESTIMATORS.values() if estimator.alone)
"""Estimators that take the reward itself as advantage if a prompt has a single response, as verl does."""

LOSSES_OF_SEQUENCES = tuple(loss.name for loss in LOSSES.values() if not loss.token_local)
"""Losses with one ratio per sequence: a token's gradient depends on its whole sequence."""


def load(function: str) -> Callable[..., Any]:
    module, _, name = function.rpartition(".")
    return getattr(importlib.import_module(module), name)
