"""TRL's names for losses, advantages, importance weights and sampling: our keys, and how values are converted.

Source: ``GRPOConfig`` and ``GRPOTrainer`` of TRL 1.16. tests/worker/test_trl_losses.py shows that both give equal losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_memopt.config.spelling import (
    ESTIMATOR,
    GRPO,
    RLOO,
    NotConvertibleError,
    Spelling,
    TrlSettings,
    Values,
    copied,
    effective,
    off_at_zero,
    unless_none,
)

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
KL_IN_LOSS = f"{_ACTOR}.use_kl_loss"
LOSS_MODE, AGG_MODE = f"{_ACTOR}.policy_loss.loss_mode", f"{_ACTOR}.loss_agg_mode"
CISPO_RATIO, DUAL_CLIP = f"{_ACTOR}.policy_loss.cispo_max_ratio", f"{_ACTOR}.clip_ratio_c"
CLIP, CLIP_HIGH = f"{_ACTOR}.clip_ratio", f"{_ACTOR}.clip_ratio_high"
ENTROPY, ENTROPY_AGG = f"{_ACTOR}.entropy_coeff", f"{_ACTOR}.entropy_agg_mode"
ENTROPY_CTRL = f"{_ACTOR}.entropy_ctrl"
ADAPTIVE = {
    "entropy_target": ("target", 0.2), "entropy_coef_delta": ("delta", 0.005), "entropy_coef_min": ("min", 0.0),
    "entropy_coef_max": ("max", 1.0),
}  # fmt: skip
"""Name of TRL -> (our key below ``entropy_ctrl``, TRL's default)."""
BY_STD, STD_OF, STD_EPSILON = (f"algorithm.norm_adv_{name}" for name in ("by_std_in_grpo", "std_of", "epsilon"))
REWARD_CLIP = "algorithm.reward_clip_range"
QUANTILE, WHITEN_OVER = "algorithm.top_entropy_quantile", "algorithm.gdpo_whiten_over"
WEIGHTS, WEIGHTS_BOUND = (f"algorithm.rollout_correction.{name}" for name in ("rollout_is", "rollout_is_threshold"))
LOSS_TYPES = {
    "grpo": ("vanilla", "seq-mean-token-mean"), "dapo": ("vanilla", "token-mean"), "bnpo": ("vanilla", "token-mean"),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"), "luspo": ("vanilla", "seq-mean-token-sum"),
    "cispo": ("cispo", "token-mean"), "sapo": ("sapo", "seq-mean-token-mean"), "vespo": ("vespo", "token-mean"),
}  # fmt: skip
"""Value of ``loss_type`` -> (our loss with one ratio per token, how the loss is averaged)."""
TRL_EPSILON = 1e-4
"""Number that TRL adds to a standard deviation of rewards before it divides by it."""


def _by_sequence(trl: TrlSettings) -> bool:
    return trl.get("importance_sampling_level") == "sequence"


def loss(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    kind, level = trl.get("loss_type"), trl.get("importance_sampling_level") or "token"
    if kind is not None and kind not in LOSS_TYPES:
        raise NotConvertibleError(f"TRL has {', '.join(LOSS_TYPES)}", "Choose one.", ("loss_type",))
    if level not in ("token", "sequence"):
        raise NotConvertibleError("TRL has token and sequence", "Choose one.", ("importance_sampling_level",))
    mode, aggregation = LOSS_TYPES[kind or "dapo"]
    if level == "sequence" and mode != "vanilla":
        both = ("loss_type", "importance_sampling_level")
        raise NotConvertibleError(f"{mode} has a ratio of its own per token", "Set importance_sampling_level=token.", both)
    mode = "gspo" if level == "sequence" else mode
    if name == "importance_sampling_level":
        return {LOSS_MODE: mode} if level == "sequence" else {}
    return {LOSS_MODE: mode, AGG_MODE: aggregation}


def clips(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # CISPO has a single bound: it is the largest ratio, not a distance from 1.
    if trl.get("loss_type") == "cispo":
        bound = trl.get("epsilon_high")
        return {CISPO_RATIO: trl[name] if bound is None else bound}
    return {} if trl[name] is None else {CLIP_HIGH if name == "epsilon_high" else CLIP: trl[name]}


def two_sided(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # Set the upper bound of the ratio at negative advantages. Losses without a clip have no such bound.
    delta, mode = trl[name], LOSS_TYPES.get(str(trl.get("loss_type")), ("vanilla", ""))[0]
    if delta is None or mode != "vanilla":
        return {DUAL_CLIP: None} if mode == "vanilla" else {}
    if _by_sequence(trl):
        way_out = "Remove it, or set importance_sampling_level=token."
        raise NotConvertibleError("the ratio of a sequence has no second bound", way_out)
    high = next(clip for clip in (effective(CLIP_HIGH, values), effective(CLIP, values)) if clip is not None)
    if isinstance(delta, int | float) and delta < 1 + high:
        what = f"below 1 + {high} TRL also bounds positive advantages by it; here only clip_ratio_high bounds these"
        raise NotConvertibleError(what, f"Raise it to at least {1 + high:g}, as TRL recommends.")
    return {DUAL_CLIP: delta}


def scaled_rewards(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # Set which standard deviation the advantages are divided by. Rewards that are normalised separately use that of their group.
    word = str(trl[name]).lower()
    word = {"true": "group", "false": "none"}.get(word, word)
    if word not in ("group", "batch", "none"):
        raise NotConvertibleError("TRL has group, batch and none", "Choose one.")
    if word == "none" and trl.get("multi_objective_aggregation") != "normalize_then_sum":
        return {BY_STD: False}
    over = {} if trl.get("multi_objective_aggregation") == "normalize_then_sum" else {STD_OF: word}
    return {BY_STD: True, STD_EPSILON: TRL_EPSILON, **over}


def objectives(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    if trl[name] == "sum_then_normalize":
        return {}
    if trl[name] != "normalize_then_sum":
        raise NotConvertibleError("TRL has sum_then_normalize and normalize_then_sum", "Choose one.")
    return {ESTIMATOR: "gdpo", WHITEN_OVER: "rows", BY_STD: True, STD_EPSILON: TRL_EPSILON}


def kl_by_ratio(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # Without a KL in the loss the name has no effect.
    return {f"{_ACTOR}.kl_loss_by_ratio": trl[name]} if effective(KL_IN_LOSS, values) else {}


def entropy_bonus(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # TRL averages the entropy bonus over tokens, whatever the loss is.
    adapts = bool(trl.get("use_adaptive_entropy"))
    if trl[name] in (None, 0) and not adapts:
        return {ENTROPY: 0.0}
    if trl.get("top_entropy_quantile") not in (None, 1):
        both = (name, "top_entropy_quantile")
        what = "TRL's bonus is then taken only over the tokens of top_entropy_quantile, and ours over all tokens"
        raise NotConvertibleError(what, f"Remove one, or set {ENTROPY}.", both)
    return {ENTROPY: trl[name] or 0.0, ENTROPY_AGG: "token-mean"}


def adaptive_entropy(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # Combine all of TRL's names for the adaptive weight of the bonus. `use_adaptive_entropy` switches it on.
    if not trl.get("use_adaptive_entropy"):
        return {f"{ENTROPY_CTRL}.target": None} if name == "use_adaptive_entropy" else {}
    given = {part: trl[option] for option, (part, _) in ADAPTIVE.items() if trl.get(option) is not None}
    ours = {f"{ENTROPY_CTRL}.{part}": given.get(part, default) for part, default in ADAPTIVE.values()}
    return ours | {ENTROPY_AGG: "token-mean"}


def top_entropy(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    if trl[name] not in (None, 1) and _by_sequence(trl):
        both = (name, "importance_sampling_level")
        what = "with the ratio of a sequence TRL scales the whole sequence by its share of such tokens"
        raise NotConvertibleError(what, f"Set {QUANTILE}, which gives the other tokens advantage 0.", both)
    return {} if trl[name] is None else {QUANTILE: trl[name]}


LEAST, MOST = "1e-9", "1e9"
"""Bounds that no importance weight reaches, for a side that TRL leaves open."""


def importance(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # TRL uses importance weights between engine and trainer only with vLLM.
    if trl.get("vllm_importance_sampling_correction") is False:
        return {WEIGHTS: None} if name == "vllm_importance_sampling_correction" else {}
    if effective(f"{_ROLLOUT}.name", values) != "vllm":
        return {}
    word = trl.get("vllm_importance_sampling_mode") or "sequence_mask"
    level, _, how = str(word).partition("_")
    if level not in ("token", "sequence") or how not in ("mask", "truncate"):
        modes = "token_truncate, token_mask, sequence_truncate and sequence_mask"
        raise NotConvertibleError(f"TRL has {modes}", "Choose one.", ("vllm_importance_sampling_mode",))
    if level == "sequence" and trl.get("loss_type") == "vespo":
        what = "VESPO multiplies the weights of a sequence's tokens itself"
        raise NotConvertibleError(what, "Set vllm_importance_sampling_mode=token_truncate or token_mask.")
    clip_min, cap = trl.get("vllm_importance_sampling_clip_min"), trl.get("vllm_importance_sampling_cap")
    clip_max = trl.get("vllm_importance_sampling_clip_max", 3.0) if cap is None else cap
    if how == "mask":
        return {WEIGHTS: level, WEIGHTS_BOUND: f"{clip_min or LEAST}_{clip_max or MOST}"}
    if clip_min is not None:
        raise NotConvertibleError("truncated weights have no lower bound here", "Remove vllm_importance_sampling_clip_min.")
    return {WEIGHTS: level, WEIGHTS_BOUND: float(clip_max or MOST)}


DRAWN = {
    **{name: f"{_ROLLOUT}.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos")},
    **dict.fromkeys(("stop", "stop_strings"), f"{_ROLLOUT}.stop"), "stop_token_ids": f"{_ROLLOUT}.stop_token_ids",
    **dict.fromkeys(("max_tokens", "max_new_tokens"), "data.max_response_length"), "do_sample": f"{_ROLLOUT}.do_sample",
}  # fmt: skip
"""Sampling argument of vLLM or transformers -> our key."""


def drawn(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # Convert `generation_kwargs`, which win over TRL's other names for sampling.
    given = trl[name] or {}
    if not isinstance(given, Mapping):
        raise NotConvertibleError("it is no mapping", "Give names with values.")
    unknown = [option for option in given if option not in DRAWN]
    if unknown:
        what = f"the names {', '.join(DRAWN)} are read in both engines, and not {', '.join(unknown)}"
        raise NotConvertibleError(what, f"Remove {', '.join(unknown)}.")
    off = {"top_k": (0, -1), "min_p": (None, 0.0)}
    sampling = {
        DRAWN[option]: off[option][1] if option in off and value == off[option][0] else value for option, value in given.items()
    }
    stop = f"{_ROLLOUT}.stop"
    return sampling | ({stop: [sampling[stop]]} if isinstance(sampling.get(stop), str) else {})


OBJECTIVE: tuple[Spelling, ...] = (
    Spelling(("epsilon", "cliprange"), (CLIP, CISPO_RATIO), clips, "with loss_type=cispo it is the largest ratio itself"),
    Spelling(("epsilon_high",), (CLIP_HIGH, CISPO_RATIO), clips, "with loss_type=cispo it is the largest ratio itself"),
    Spelling(
        ("scale_rewards",), (BY_STD, STD_OF, STD_EPSILON), scaled_rewards,
        f"{TRL_EPSILON} is added to the standard deviation, as in TRL", GRPO,
    ),
    Spelling(
        ("multi_objective_aggregation",), (WHITEN_OVER, BY_STD, STD_EPSILON), objectives,
        "normalize_then_sum selects the estimator gdpo; algorithm.gdpo_reward_keys lists its rewards", GRPO,
    ),
    Spelling(
        ("loss_type",), (LOSS_MODE, AGG_MODE), loss,
        "averages are over the whole mini-batch, however it is cut into micro-batches", GRPO,
    ),
    Spelling(
        ("importance_sampling_level",), (LOSS_MODE,), loss,
        "sequence selects the loss gspo; in its gradient each token has its own advantage and importance weight", GRPO,
    ),
    Spelling(("delta",), (DUAL_CLIP,), two_sided, "it bounds the ratio at tokens with a negative advantage; null is off", GRPO),
    *(
        Spelling((f"sapo_temperature_{sign}",), (f"{_ACTOR}.tau_{sign}",), copied(f"{_ACTOR}.tau_{sign}"), "", GRPO)
        for sign in ("neg", "pos")
    ),
    *(
        Spelling((option,), (f"{_ACTOR}.policy_loss.{option}",), copied(f"{_ACTOR}.policy_loss.{option}"), "", GRPO)
        for option in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    ),
    Spelling(
        ("use_bias_correction_kl",), (f"{_ACTOR}.kl_loss_by_ratio",), kl_by_ratio, "it needs a KL in the loss", GRPO
    ),
    Spelling(
        ("off_policy_mask_threshold",), (f"{_ACTOR}.off_policy_mask_threshold",),
        unless_none(f"{_ACTOR}.off_policy_mask_threshold"), "", GRPO,
    ),
    Spelling(
        ("top_entropy_quantile",), (QUANTILE,), top_entropy,
        "the quantile is over all tokens of the step, with the entropies from before the update", GRPO,
    ),
    Spelling(("entropy_coef",), (ENTROPY, ENTROPY_AGG), entropy_bonus, "", GRPO),
    *(
        Spelling(
            (option,), (*(f"{ENTROPY_CTRL}.{part}" for part, _ in ADAPTIVE.values()), ENTROPY_AGG), adaptive_entropy,
            "it needs use_adaptive_entropy; TRL adapts after each optimizer step, here the weight changes once per training step",
            GRPO,
        )
        for option in ("use_adaptive_entropy", *ADAPTIVE)
    ),
    Spelling(
        ("reward_clip_range",), (REWARD_CLIP,), unless_none(REWARD_CLIP),
        "the weighted sum of the rewards is clipped, before the KL is subtracted", RLOO,
    ),
)  # fmt: skip
"""Losses and advantages. They are read after the KL."""

DRAWING: tuple[Spelling, ...] = (
    Spelling(("min_p",), (f"{_ROLLOUT}.min_p",), off_at_zero(f"{_ROLLOUT}.min_p", 0.0)),
    Spelling(
        ("generation_kwargs",), (f"{_ROLLOUT}.stop", f"{_ROLLOUT}.stop_token_ids", f"{_ROLLOUT}.ignore_eos"), drawn,
        "its names win over TRL's other names",
    ),
)  # fmt: skip
"""Further names for sampling. They are read after the other names for sampling."""

WEIGHING: tuple[Spelling, ...] = (
    *(
        Spelling((f"vllm_importance_sampling_{option}",), (WEIGHTS, WEIGHTS_BOUND), importance, "it needs use_vllm=true", GRPO)
        for option in ("correction", "mode", "clip_max", "clip_min", "cap")
    ),
)  # fmt: skip
"""Importance weights. They are read after the name of the engine, because they depend on it."""
