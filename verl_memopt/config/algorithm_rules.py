"""What estimators, groups, losses, a critic and supervised fine-tuning refuse, and the keys that have no effect with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from verl_memopt.algorithms.records import CUSTOM, RECORDS, SFT, WITHOUT_BASELINE, WITHOUT_GROUPS
from verl_memopt.config.keys import IS_SET, leaf_types, other_than, refused, shown
from verl_memopt.config.reward_rules import ENABLE, even_shards
from verl_memopt.config.schema import Settings
from verl_memopt.memory.critic_rules import has_critic, with_critic
from verl_memopt.memory.knob import DEVICES, Refusal, UnusedKey, data_ranks
from verl_memopt.recipes.registry import RECIPES

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
_ESTIMATOR, _LOSS = "algorithm.adv_estimator", f"{_ACTOR}.policy_loss"


_filters = attrgetter("algorithm.filter_groups.enable")


def _groups() -> Iterator[Refusal]:
    """Yield the rules of groups, and of steps that leave groups out."""
    batch, round_batch, n = "data.train_batch_size", "data.gen_batch_size", f"{_ROLLOUT}.n"
    on, metric, kl = "algorithm.filter_groups.enable", "algorithm.filter_groups.metric", "algorithm.use_kl_in_reward"
    compared = {n: 1, _ESTIMATOR: other_than(*WITHOUT_GROUPS, *WITHOUT_BASELINE)}
    yield refused(compared, "a group of one has no baseline to compare with", f"Set {n} to 2 or more.")
    yield Refusal(
        (round_batch, batch),
        lambda settings: settings.data.gen_batch_size != settings.data.train_batch_size and not _filters(settings),
        "without algorithm.filter_groups a step has one round of generation",
        f"Remove {round_batch}, or set {on}=true.",
    )
    yield refused(
        {on: True, f"{_ROLLOUT}.do_sample": False},
        "greedy samples of one prompt are all alike, so every group would be left out",
        f"Set {_ROLLOUT}.do_sample=true, or {on}=false.",
        lambda settings: settings.actor_rollout_ref.rollout.n > 1,
    )
    filtered = {metric: "seq_final_reward", kl: True}
    yield refused(filtered, "groups are filtered before the KL is known", f"Set {metric}=score.", _filters)


def _losses() -> Iterator[Refusal]:
    """Yield the rules of the policy's loss."""
    mask, bypass = "algorithm.mask_truncated_responses", f"{_CORRECTION}.bypass_mode"
    way_out = f"Set {mask}=false, or {bypass}=false."
    yield refused({mask: True, bypass: True}, "the losses of bypass mode read every token", way_out)
    endless = "no response ends by itself, so nothing would be learned"
    yield refused({mask: True, f"{_ROLLOUT}.ignore_eos": True}, endless, f"Set {mask}=false.")


def _custom(choice: str, section: str) -> Iterator[Refusal]:
    """Yield the rules of a function of the user's own."""
    path = f"{section}.path"
    way_out = f"Set {path}=/path/to/file.py and {section}.name, or choose another {choice}."
    yield refused({choice: CUSTOM, path: None}, "a function of your own needs its file", way_out)
    unchosen, way_out = {choice: other_than(CUSTOM), path: IS_SET}, f"Set {choice}=custom, or remove {path}."
    yield refused(unchosen, "a file is named, but its function is not chosen", way_out)


ALGORITHM_RULES: tuple[Refusal, ...] = (
    *_groups(),
    *_losses(),
    *_custom(_ESTIMATOR, "algorithm.custom_estimator"),
    *_custom(f"{_LOSS}.loss_mode", f"{_LOSS}.custom"),
    *(refusal for record in RECORDS for refusal in record.refuses),
)
"""The rules above and those of the records, for :mod:`verl_memopt.config.checks`."""


# What the critic's keys must hold together, and when they have no effect.


_ENABLE = "critic.enable"
_NO_CRITIC = "algorithm.adv_estimator is not gae, the one estimator that reads the values of a critic, so no critic is built"
_WARMUP, _KEPT = "trainer.critic_warmup", "trainer.max_critic_ckpt_to_keep"


def _without_critic(settings: Settings) -> bool:
    return not has_critic(settings)


def _has_own_mini_batch(settings: Settings) -> bool:
    return settings.critic.ppo_mini_batch_size != settings.actor_rollout_ref.actor.ppo_mini_batch_size


def _sequences(settings: Settings) -> int:
    """Return the sequences of one optimizer step of the critic."""
    return (settings.critic.ppo_mini_batch_size or 0) * settings.actor_rollout_ref.rollout.n


def _rules() -> Iterator[Refusal]:
    """Yield the rules of runs with a critic."""
    batch, mini, samples = "data.train_batch_size", "critic.ppo_mini_batch_size", f"{_ROLLOUT}.n"
    yield refused(
        {_ENABLE: False},
        "algorithm.adv_estimator=gae reads the values of a critic",
        f"Remove {_ENABLE}, or set algorithm.adv_estimator=rloo, grpo or another estimator without a critic.",
    )
    yield Refusal(
        (batch, mini),
        lambda settings: (
            _has_own_mini_batch(settings)
            and settings.data.train_batch_size % max(settings.critic.ppo_mini_batch_size or 0, 1) != 0
        ),
        "the prompts of a step do not divide into mini-batches",
        f"Set {mini} to a divisor of {batch}, or leave it out: it follows the actor's.",
    )
    yield Refusal(
        (mini, samples, *DEVICES),
        lambda settings: _has_own_mini_batch(settings) and _sequences(settings) % data_ranks(settings, "critic") != 0,
        "the sequences do not divide over the devices",
        lambda settings: f"Make {mini} x {settings.actor_rollout_ref.rollout.n} a multiple of {data_ranks(settings, 'critic')}.",
    )
    yield even_shards("critic.model.fsdp_config")
    yield Refusal(
        (_KEPT, "trainer.max_actor_ckpt_to_keep"),
        lambda settings: settings.trainer.max_critic_ckpt_to_keep != settings.trainer.max_actor_ckpt_to_keep,
        "a checkpoint holds policy and critic of one step, and is kept or removed as a whole",
        f"Set trainer.max_actor_ckpt_to_keep alone, or both to one number; {_KEPT} follows it.",
    )
    yield Refusal(
        (_WARMUP, "trainer.total_training_steps"),
        lambda settings: settings.trainer.critic_warmup >= (settings.trainer.total_training_steps or math.inf),
        "the policy would never be updated",
        f"Set {_WARMUP} below the steps of the run.",
    )


def _unused() -> Iterator[UnusedKey]:
    """Yield when a key of the critic has no effect."""
    yield UnusedKey(_ENABLE, lambda settings: bool(settings.critic.enable) and _without_critic(settings), _NO_CRITIC)
    of_critic = (key for key in leaf_types() if key.startswith("critic.") and key != _ENABLE)
    for key in (*of_critic, _WARMUP, _KEPT):
        yield UnusedKey(key, _without_critic, _NO_CRITIC)


CRITIC_RULES: tuple[Refusal, ...] = tuple(map(with_critic, _rules()))
"""Rules of several keys, for :mod:`verl_memopt.config.checks`. They hold in runs with a critic."""

WITHOUT_CRITIC = {unused.key: unused for unused in _unused()}
"""Key -> why it has no effect in a run without a critic."""


# What supervised fine-tuning (``algorithm.adv_estimator=sft``) refuses, and the keys that have no effect in it.


OTHER_LOSS, NO_ROLLOUT = "the loss would not be the mean negative log-prob of the responses", "there is no rollout, and no reward"
_ONLY: dict[str, tuple[tuple[str, Any], ...]] = {
    OTHER_LOSS: (
        (f"{_ACTOR}.use_kl_loss", False), ("algorithm.use_kl_in_reward", False), (f"{_LOSS}.loss_mode", "gpg"),
        (f"{_ACTOR}.loss_agg_mode", "token-mean"), (f"{_ACTOR}.entropy_coeff", 0.0), (f"{_ROLLOUT}.temperature", 1.0),
    ),
    "the dataset has one response to a prompt": ((f"{_ROLLOUT}.n", 1),),
    NO_ROLLOUT: (
        (f"{_ROLLOUT}.skip_rollout", False), (f"{_CORRECTION}.bypass_mode", False), (f"{_CORRECTION}.rollout_is", None),
        (f"{_CORRECTION}.rollout_rs", None), ("custom_reward_function.path", None), ("algorithm.filter_groups.enable", False),
        ("algorithm.use_pf_ppo", False), (ENABLE, False), ("algorithm.mask_truncated_responses", False),
    ),
}  # fmt: skip
"""Why a key has but one value that makes sense -> each such key with its value."""
_MODES = ("rollout_only", "score_only", "train_only", "sync_check")
_READ = ("temperature", "n", "skip_rollout", "name", "mode", "seed", "do_sample")
"""Keys of ``rollout`` that a supervised run reads, or refuses."""


def is_supervised(settings: Settings) -> bool:
    """Return whether the run learns the responses of the dataset."""
    return settings.algorithm.adv_estimator == SFT


def _brings_no_dataset(settings: Settings) -> bool:
    """Return whether no recipe brings the dataset. A recipe is switched on by the same key as a reward model."""
    return settings.reward_model.reward_manager not in RECIPES


def _without_engine() -> Iterator[UnusedKey]:
    """Yield the keys of the engine and of its sampling, which nothing reads without one."""
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
        "this mode looks at rollouts",
        "Set debug.mode=off, dry, forge, memory or deterministic.",
    ),
)
"""What a supervised run refuses, for :mod:`verl_memopt.config.checks`."""

WITHOUT_ENGINE = {unused.key: unused for unused in _without_engine()}
"""Key -> why it has no effect in a supervised run."""
