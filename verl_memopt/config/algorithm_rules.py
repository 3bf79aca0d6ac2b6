"""Combinations of estimators, groups and losses that are refused."""

from __future__ import annotations

from collections.abc import Iterator

from verl_memopt.algorithms.records import CUSTOM, RECORDS, WITHOUT_BASELINE, WITHOUT_GROUPS
from verl_memopt.config.schema import Settings
from verl_memopt.knobs.knob import Predicate, Refusal

_ROLLOUT, _LOSS = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.policy_loss"


def _filters(settings: Settings) -> bool:
    return settings.algorithm.filter_groups.enable


def _masks(settings: Settings) -> bool:
    return settings.algorithm.mask_truncated_responses


def _groups() -> Iterator[Refusal]:
    """Yield the rules of groups, and of steps that leave groups out."""
    batch, round_batch, n = "data.train_batch_size", "data.gen_batch_size", f"{_ROLLOUT}.n"
    on, metric, kl = "algorithm.filter_groups.enable", "algorithm.filter_groups.metric", "algorithm.use_kl_in_reward"
    yield Refusal(
        (n, "algorithm.adv_estimator"),
        lambda settings: (
            settings.actor_rollout_ref.rollout.n < 2
            and settings.algorithm.adv_estimator not in (*WITHOUT_GROUPS, *WITHOUT_BASELINE)
        ),
        "a group of one has no baseline to compare with",
        f"Set {n} to 2 or more.",
    )
    yield Refusal(
        (round_batch, batch),
        lambda settings: settings.data.gen_batch_size != settings.data.train_batch_size and not _filters(settings),
        "without algorithm.filter_groups a step has one round of generation",
        f"Remove {round_batch}, or set {on}=true.",
    )
    yield Refusal(
        (on, f"{_ROLLOUT}.do_sample"),
        lambda settings: (
            _filters(settings) and not settings.actor_rollout_ref.rollout.do_sample and settings.actor_rollout_ref.rollout.n > 1
        ),
        "greedy samples of one prompt are all alike, so every group would be left out",
        f"Set {_ROLLOUT}.do_sample=true, or {on}=false.",
    )
    yield Refusal(
        (metric, kl),
        lambda settings: (
            _filters(settings)
            and settings.algorithm.use_kl_in_reward
            and settings.algorithm.filter_groups.metric == "seq_final_reward"
        ),
        "groups are filtered before the KL is known",
        f"Set {metric}=score.",
    )


def _losses() -> Iterator[Refusal]:
    """Yield the rules of the policy's loss."""
    mask, bypass = "algorithm.mask_truncated_responses", "algorithm.rollout_correction.bypass_mode"
    yield Refusal(
        (mask, bypass),
        lambda settings: _masks(settings) and settings.algorithm.rollout_correction.bypass_mode,
        "the losses of bypass mode read every token",
        f"Set {mask}=false, or {bypass}=false.",
    )
    yield Refusal(
        (mask, f"{_ROLLOUT}.ignore_eos"),
        lambda settings: _masks(settings) and settings.actor_rollout_ref.rollout.ignore_eos,
        "no response ends by itself, so nothing would be learned",
        f"Set {mask}=false.",
    )


def _custom(choice: str, section: str, is_chosen: Predicate, has_file: Predicate) -> Iterator[Refusal]:
    """Yield the rules of a function of the user's own.

    Args:
        choice: the key whose word ``custom`` chooses it.
        section: the keys that name its file and the function in it.
        is_chosen: tells whether it is chosen.
        has_file: tells whether a file is named.
    """
    keys = (choice, f"{section}.path")
    yield Refusal(
        keys,
        lambda settings: is_chosen(settings) and not has_file(settings),
        "a function of your own needs its file",
        f"Set {section}.path=/path/to/file.py and {section}.name, or choose another {choice}.",
    )
    yield Refusal(
        keys,
        lambda settings: not is_chosen(settings) and has_file(settings),
        "a file is named, but its function is not chosen",
        f"Set {choice}=custom, or remove {section}.path.",
    )


ALGORITHM_RULES: tuple[Refusal, ...] = (
    *_groups(),
    *_losses(),
    *_custom(
        "algorithm.adv_estimator",
        "algorithm.custom_estimator",
        lambda settings: settings.algorithm.adv_estimator == CUSTOM,
        lambda settings: settings.algorithm.custom_estimator.path is not None,
    ),
    *_custom(
        f"{_LOSS}.loss_mode",
        f"{_LOSS}.custom",
        lambda settings: settings.actor_rollout_ref.actor.policy_loss.loss_mode == CUSTOM,
        lambda settings: settings.actor_rollout_ref.actor.policy_loss.custom.path is not None,
    ),
    *(refusal for record in RECORDS for refusal in record.refuses),
)
"""All rules of this file and of the records, for :mod:`verl_memopt.config.checks`."""
