"""What supervised fine-tuning (``algorithm.adv_estimator=sft``) refuses, and the keys that have no effect in it."""

from __future__ import annotations

from collections.abc import Iterator

from verl_memopt.algorithms.records import SFT
from verl_memopt.config.keys import leaf_types
from verl_memopt.config.reward_rules import ENABLE
from verl_memopt.config.schema import Settings
from verl_memopt.knobs.knob import Predicate, Refusal, UnusedKey
from verl_memopt.recipes.registry import RECIPES

_ESTIMATOR = "algorithm.adv_estimator"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"

OTHER_LOSS, NO_ROLLOUT = "the loss would not be the mean negative log-prob of the responses", "there is no rollout, and no reward"
_ONLY: dict[str, tuple[str, str, Predicate]] = {
    f"{_ACTOR}.use_kl_loss": ("false", OTHER_LOSS, lambda settings: settings.actor_rollout_ref.actor.use_kl_loss),
    "algorithm.use_kl_in_reward": ("false", OTHER_LOSS, lambda settings: settings.algorithm.use_kl_in_reward),
    f"{_ACTOR}.policy_loss.loss_mode": (
        "gpg",
        OTHER_LOSS,
        lambda settings: settings.actor_rollout_ref.actor.policy_loss.loss_mode != "gpg",
    ),
    f"{_ACTOR}.loss_agg_mode": (
        "token-mean",
        OTHER_LOSS,
        lambda settings: settings.actor_rollout_ref.actor.loss_agg_mode != "token-mean",
    ),
    f"{_ACTOR}.entropy_coeff": ("0.0", OTHER_LOSS, lambda settings: settings.actor_rollout_ref.actor.entropy_coeff != 0),
    f"{_ROLLOUT}.temperature": ("1.0", OTHER_LOSS, lambda settings: settings.actor_rollout_ref.rollout.temperature != 1),
    f"{_ROLLOUT}.n": (
        "1",
        "the dataset has one response to a prompt",
        lambda settings: settings.actor_rollout_ref.rollout.n != 1,
    ),
    f"{_ROLLOUT}.skip_rollout": ("false", NO_ROLLOUT, lambda settings: bool(settings.actor_rollout_ref.rollout.skip_rollout)),
    f"{_CORRECTION}.bypass_mode": ("false", NO_ROLLOUT, lambda settings: settings.algorithm.rollout_correction.bypass_mode),
    f"{_CORRECTION}.rollout_is": (
        "null",
        NO_ROLLOUT,
        lambda settings: settings.algorithm.rollout_correction.rollout_is is not None,
    ),
    f"{_CORRECTION}.rollout_rs": (
        "null",
        NO_ROLLOUT,
        lambda settings: settings.algorithm.rollout_correction.rollout_rs is not None,
    ),
    "custom_reward_function.path": ("null", NO_ROLLOUT, lambda settings: settings.custom_reward_function.path is not None),
    "algorithm.filter_groups.enable": ("false", NO_ROLLOUT, lambda settings: settings.algorithm.filter_groups.enable),
    "algorithm.use_pf_ppo": ("false", NO_ROLLOUT, lambda settings: settings.algorithm.use_pf_ppo),
    # The recipe of reward_manager brings the dataset, and a recipe is switched on by the same key as a reward model.
    ENABLE: (
        "false",
        NO_ROLLOUT,
        lambda settings: settings.reward_model.enable and settings.reward_model.reward_manager not in RECIPES,
    ),
    "algorithm.mask_truncated_responses": ("false", NO_ROLLOUT, lambda settings: settings.algorithm.mask_truncated_responses),
}
"""Key -> the one value that makes sense, why, and whether the key has another."""
_MODES = ("rollout_only", "score_only", "train_only", "sync_check")
_READ = ("temperature", "n", "skip_rollout", "name", "mode", "seed", "do_sample")
"""Keys of ``rollout`` that a supervised run reads, or refuses."""


def is_supervised(settings: Settings) -> bool:
    """Return whether the run learns the responses of the dataset."""
    return settings.algorithm.adv_estimator == SFT


def _only(key: str, wanted: str, why: str, differs: Predicate) -> Refusal:
    return Refusal(
        (key, _ESTIMATOR),
        lambda settings: is_supervised(settings) and differs(settings),
        why,
        f"Set {key}={wanted}, or remove it.",
    )


def _unused() -> Iterator[UnusedKey]:
    """Yield the keys of the engine and of its sampling, which nothing reads without one."""
    for key in (key for key in leaf_types() if key.startswith(f"{_ROLLOUT}.")):
        if key.removeprefix(f"{_ROLLOUT}.") not in _READ and ".log_prob_" not in key:
            yield UnusedKey(key, is_supervised, f"{_ESTIMATOR} is {SFT}, which has no engine")


SUPERVISED_RULES: tuple[Refusal, ...] = (
    *(_only(key, wanted, why, differs) for key, (wanted, why, differs) in _ONLY.items()),
    Refusal(
        ("debug.mode", _ESTIMATOR),
        lambda settings: is_supervised(settings) and settings.debug.mode in _MODES,
        "this mode looks at rollouts",
        "Set debug.mode=off, dry, forge, memory or deterministic.",
    ),
)
"""All rules of this file, for :mod:`verl_memopt.config.checks`."""

WITHOUT_ENGINE = {unused.key: unused for unused in _unused()}
"""Key -> why it has no effect in a supervised run."""
