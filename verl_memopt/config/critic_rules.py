"""What the critic's keys must hold together, and when they have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from verl_memopt.config.keys import leaf_types
from verl_memopt.config.schema import Settings
from verl_memopt.knobs.critic_rules import has_critic, with_critic
from verl_memopt.knobs.knob import Refusal, UnusedKey
from verl_memopt.knobs.values import DEVICES, num_devices, uneven_shards

_AR, _ENABLE = "actor_rollout_ref", "critic.enable"
_NO_CRITIC = "algorithm.adv_estimator is not gae, the one estimator that reads the values of a critic, so no critic is built"
_WARMUP, _KEPT = "trainer.critic_warmup", "trainer.max_critic_ckpt_to_keep"


def _without_critic(settings: Settings) -> bool:
    return not has_critic(settings)


def _has_own_mini_batch(settings: Settings) -> bool:
    return settings.critic.ppo_mini_batch_size != settings.actor_rollout_ref.actor.ppo_mini_batch_size


def _sequences(settings: Settings) -> int:
    """Return the sequences of one optimizer step of the critic."""
    return (settings.critic.ppo_mini_batch_size or 0) * settings.actor_rollout_ref.rollout.n


def _never_updates_policy(settings: Settings) -> bool:
    steps = settings.trainer.total_training_steps
    return steps is not None and settings.trainer.critic_warmup >= steps > 0


def _rules() -> Iterator[Refusal]:
    """Yield the rules of runs with a critic."""
    batch, mini, samples = "data.train_batch_size", "critic.ppo_mini_batch_size", f"{_AR}.rollout.n"
    yield Refusal(
        (_ENABLE,),
        lambda settings: settings.critic.enable is False,
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
        lambda settings: _has_own_mini_batch(settings) and _sequences(settings) % num_devices(settings) != 0,
        "the sequences do not divide over the devices",
        lambda settings: f"Make {mini} x {settings.actor_rollout_ref.rollout.n} a multiple of {num_devices(settings)}.",
    )
    yield Refusal(
        ("critic.model.fsdp_config.fsdp_size", *DEVICES),
        lambda settings: uneven_shards(settings, settings.critic.model.fsdp_config),
        "does not divide the devices",
        lambda settings: f"Set a divisor of {num_devices(settings)}, or -1.",
    )
    yield Refusal(
        (_KEPT, "trainer.max_actor_ckpt_to_keep"),
        lambda settings: settings.trainer.max_critic_ckpt_to_keep != settings.trainer.max_actor_ckpt_to_keep,
        "a checkpoint holds policy and critic of one step, and is kept or removed as a whole",
        f"Set trainer.max_actor_ckpt_to_keep alone, or both to one number; {_KEPT} follows it.",
    )
    yield Refusal(
        (_WARMUP, "trainer.total_training_steps"),
        _never_updates_policy,
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
