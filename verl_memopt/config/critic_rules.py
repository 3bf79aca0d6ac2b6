"""What the critic's keys must hold together, and when they have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from verl_memopt.algorithms.records import WITH_CRITIC
from verl_memopt.config.keys import leaf_types
from verl_memopt.knobs.conditions import DEVICES
from verl_memopt.knobs.critic_rules import ESTIMATOR, with_critic
from verl_memopt.knobs.knob import Idle, Refusal

_AR, _ENABLE = "actor_rollout_ref", "critic.enable"
_NO_CRITIC = f"{ESTIMATOR} is not gae, the one estimator that reads the values of a critic, so no critic is built"
_WARMUP, _KEPT = "trainer.critic_warmup", "trainer.max_critic_ckpt_to_keep"


def _without_critic(estimator: str) -> bool:
    return estimator not in WITH_CRITIC


def _rules() -> Iterator[Refusal]:
    """Yield the rules of runs with a critic."""
    batch, mini, actors = "data.train_batch_size", "critic.ppo_mini_batch_size", f"{_AR}.actor.ppo_mini_batch_size"
    samples, size = f"{_AR}.rollout.n", "critic.model.fsdp_config.fsdp_size"
    yield Refusal(
        (_ENABLE,),
        lambda enable: enable is False,
        "algorithm.adv_estimator=gae reads the values of a critic",
        f"Remove {_ENABLE}, or set algorithm.adv_estimator=rloo, grpo or another estimator without a critic.",
    )
    yield Refusal(
        (batch, mini),
        lambda prompts, size, actors: size != actors and prompts % max(size, 1) != 0,
        "the prompts of a step do not divide into mini-batches",
        f"Set {mini} to a divisor of {batch}, or leave it out: it follows the actor's.",
        about=(actors,),
    )
    yield Refusal(
        (mini, samples, *DEVICES),
        lambda prompts, n, nodes, devices, actors: prompts != actors and prompts * n % (nodes * devices) != 0,
        "the sequences do not divide over the devices",
        lambda _, n, nodes, devices, actors: f"Make {mini} x {n} a multiple of {nodes * devices}.",
        about=(actors,),
    )
    yield Refusal(
        (size, *DEVICES),
        lambda size, nodes, devices: size > 0 and nodes * devices % size != 0,
        "does not divide the devices",
        lambda _, nodes, devices: f"Set a divisor of {nodes * devices}, or -1.",
    )
    yield Refusal(
        (_KEPT, "trainer.max_actor_ckpt_to_keep"),
        lambda critics, actors: critics != actors,
        "a checkpoint holds policy and critic of one step, and is kept or removed as a whole",
        f"Set trainer.max_actor_ckpt_to_keep alone, or both to one number; {_KEPT} follows it.",
    )
    yield Refusal(
        (_WARMUP, "trainer.total_training_steps"),
        lambda warmup, steps: steps is not None and warmup >= steps > 0,
        "the policy would never be updated",
        f"Set {_WARMUP} below the steps of the run.",
    )


def _idle() -> Iterator[Idle]:
    """Yield when a key of the critic has no effect."""
    yield Idle(_ENABLE, (_ENABLE, ESTIMATOR), lambda enable, name: bool(enable) and _without_critic(name), _NO_CRITIC)
    of_critic = (key for key in leaf_types() if key.startswith("critic.") and key != _ENABLE)
    for key in (*of_critic, _WARMUP, _KEPT):
        yield Idle(key, (ESTIMATOR,), _without_critic, _NO_CRITIC)


CRITIC_RULES: tuple[Refusal, ...] = tuple(map(with_critic, _rules()))
"""Rules of several keys, for :mod:`verl_memopt.config.checks`. They hold in runs with a critic."""

WITHOUT_CRITIC = {idle.key: idle for idle in _idle()}
"""Key -> why it has no effect in a run without a critic."""
