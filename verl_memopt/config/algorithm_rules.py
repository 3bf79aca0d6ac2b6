"""Combinations of estimators, groups and losses that are refused."""

from __future__ import annotations

from collections.abc import Iterator

from verl_memopt.algorithms.records import CUSTOM, RECORDS, WITHOUT_BASELINE, WITHOUT_GROUPS
from verl_memopt.knobs.knob import Refusal

_ROLLOUT, _LOSS = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.policy_loss"


def _groups() -> Iterator[Refusal]:
    """Yield the rules of groups, and of steps that leave groups out."""
    batch, round_batch, n = "data.train_batch_size", "data.gen_batch_size", f"{_ROLLOUT}.n"
    on, metric, kl = "algorithm.filter_groups.enable", "algorithm.filter_groups.metric", "algorithm.use_kl_in_reward"
    yield Refusal(
        (n, "algorithm.adv_estimator"),
        lambda samples, estimator: samples < 2 and estimator not in (*WITHOUT_GROUPS, *WITHOUT_BASELINE),
        "a group of one has no baseline to compare with",
        f"Set {n} to 2 or more.",
    )
    yield Refusal(
        (round_batch, batch),
        lambda round_prompts, prompts, filters: round_prompts != prompts and not filters,
        "without algorithm.filter_groups a step has one round of generation",
        f"Remove {round_batch}, or set {on}=true.",
        about=(on,),
    )
    yield Refusal(
        (on, f"{_ROLLOUT}.do_sample"),
        lambda filters, samples, responses: filters and not samples and responses > 1,
        "greedy samples of one prompt are all alike, so every group would be left out",
        f"Set {_ROLLOUT}.do_sample=true, or {on}=false.",
        about=(n,),
    )
    yield Refusal(
        (metric, kl),
        lambda name, in_reward, filters: filters and in_reward and name == "seq_final_reward",
        "groups are filtered before the KL is known",
        f"Set {metric}=score.",
        about=(on,),
    )


def _losses() -> Iterator[Refusal]:
    """Yield the rules of the policy's loss."""
    mask, bypass = "algorithm.mask_truncated_responses", "algorithm.rollout_correction.bypass_mode"
    yield Refusal(
        (mask, bypass),
        lambda masks, on: masks and on,
        "the losses of bypass mode read every token",
        f"Set {mask}=false, or {bypass}=false.",
    )
    yield Refusal(
        (mask, f"{_ROLLOUT}.ignore_eos"),
        lambda masks, ignores: masks and ignores,
        "no response ends by itself, so nothing would be learned",
        f"Set {mask}=false.",
    )
    of_custom = ("algorithm.adv_estimator", "algorithm.custom_estimator"), (f"{_LOSS}.loss_mode", f"{_LOSS}.custom")
    for choice, section in of_custom:
        yield Refusal(
            (choice, f"{section}.path"),
            lambda name, path: name == CUSTOM and path is None,
            "a function of your own needs its file",
            f"Set {section}.path=/path/to/file.py and {section}.name, or choose another {choice}.",
        )
        yield Refusal(
            (choice, f"{section}.path"),
            lambda name, path: name != CUSTOM and path is not None,
            "a file is named, but its function is not chosen",
            f"Set {choice}=custom, or remove {section}.path.",
        )


ALGORITHM_RULES: tuple[Refusal, ...] = (
    *_groups(),
    *_losses(),
    *(refusal for record in RECORDS for refusal in record.refuses),
)
"""All rules of this file and of the records, for :mod:`verl_memopt.config.checks`."""
