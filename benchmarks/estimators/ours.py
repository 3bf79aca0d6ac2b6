"""This project's values, one function a case."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.estimators.batch import (
    CLIP_C,
    CLIP_HIGH,
    CLIP_LOW,
    GAMMA,
    LAM,
    REWARDS,
    SCALE_FACTOR,
    TAU_NEG,
    TAU_POS,
    Batch,
    with_gradient,
)
from verl_memopt.algorithms.estimators import AdvantageInputs, estimate
from verl_memopt.algorithms.kl import PF_PPO_METHODS, KlController, kl_estimate, pf_ppo_weights
from verl_memopt.algorithms.losses import LossTokens, ValueTokens, select_clip_cov, select_kl_cov, value_loss
from verl_memopt.algorithms.records import CUSTOM, ESTIMATORS, LOSSES, load
from verl_memopt.algorithms.rollout_correction import bypass_loss, correct, kept_lengths
from verl_memopt.algorithms.rows import LOSS_AGG_MODES, GlobalCounts, aggregate
from verl_memopt.config.algorithm_rules import REJECTIONS
from verl_memopt.config.aliases import PRESETS
from verl_memopt.config.schema import Actor, Algorithm, KlControl, Optim, PolicyLoss, RolloutCorrection
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.prompts import StepPrompts
from verl_memopt.rewards.rules import score_by_rule
from verl_memopt.rewards.score import RewardResult
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.rollouts import Answers, StepBatch
from verl_memopt.worker.optimizer import learning_rate_factors

Values = dict[str, Any]
Case = Callable[[Batch], Values]
ALONE = ", groups of one"
UNSCORED = ", a row without a reward"
NO_DUAL_CLIP, NO_LOWER_CLIP = " without dual clip", " without lower clip"
"""TRL has neither."""
TRLS_ADVANTAGES = ("rloo", "grpo, no std")
TRLS_AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
GROUPED = ("rloo", "rloo_vectorized", "grpo", "grpo_vectorized", "reinforce_plus_plus_baseline", "opo", "gpg", "gdpo")
SEQUENCE_MODES = ("sequence", "gspo", "geo_mean")
COV_RATIO, COV_LOWER, COV_UPPER, COV_COEF = 0.1, 0.05, 5.0, 1.0
KL_KINDS = ("k1", "k2", "k3", "abs")
VALUE_CLIP = 0.5
WARMUP, ROLLOUTS = 3, 12
CORRECTED = ", weights and rejection"
CORRECTED_CASES = [
    *((mode, agg) for mode in ("vanilla", "cispo", "gpg") for agg in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")),
    *((mode, "seq-mean-token-mean") for mode in ("sapo", "gspo", "geo_mean", "dppo_tv")),
]
"""Losses and aggregations with importance weights and rejected tokens."""
FAR = ", ratios far from 1"
FAR_MODES = ("vanilla", "gspo", "geo_mean", "cispo", "sapo", "kl_cov", "dppo_tv", "dppo_kl")
NAMES = [name for name in (*ESTIMATORS, "rloo_vectorized", "grpo_vectorized") if name != CUSTOM and not name.startswith("tir_")]
TOKEN_LOCAL = sorted(name for name, record in LOSSES.items() if record.token_local and name != CUSTOM)
THRESHOLDS = {"k1": "0.7_1.4", "k2": 0.1, "k3": 0.1}


def weights_and_kept(batch: Batch) -> tuple[Tensor, Tensor]:
    """Gives importance weights and kept tokens, fp64 and bool [R], neither of them trivial."""
    log_ratio = batch.old_log_probs - batch.rollout_log_probs
    return log_ratio.exp().clamp(max=1.3), log_ratio.abs() < 0.4


def advantages(name: str, batch: Batch, by_std: bool = True, corrected: bool = False) -> Values:
    advantages, returns = estimate(
        AdvantageInputs(
            batch.scores, batch.group, ~torch.isnan(batch.scores), batch.row, batch.lengths,
            token_rewards=batch.token_rewards, values=batch.values,
            baselines=batch.baselines, old_log_probs=batch.old_log_probs, statistics={"sum_pi_squared": batch.sum_pi_squared},
            weights=weights_and_kept(batch)[0] if corrected else None, components=batch.components,
        ),
        Algorithm(
            name.removesuffix("_vectorized"), gamma=GAMMA, lam=LAM, norm_adv_by_std_in_grpo=by_std,
            gdpo_reward_weights=[*REWARDS.values()],
        ),
    )  # fmt: skip
    return {"advantages": advantages, "returns": returns}


def unscored(case: Case) -> Case:
    """Gives a case on the same batch, in which one row has no reward."""

    def values(batch: Batch) -> Values:
        scores = batch.scores.clone()
        scores[1] = torch.nan
        return case(replace(batch, scores=scores))

    return values


def counts(batch: Batch) -> GlobalCounts:
    return GlobalCounts(float(batch.lengths.sum()), float(len(batch.lengths)))


def tokens(batch: Batch, log_probs: Tensor, **options: Any) -> LossTokens:
    per_token = batch.advantages[batch.row]
    return LossTokens(log_probs, batch.old_log_probs, per_token, batch.row, batch.lengths, counts(batch), **options)


SELECTS = PolicyLoss(
    clip_cov_ratio=COV_RATIO, clip_cov_lb=COV_LOWER, clip_cov_ub=COV_UPPER, kl_cov_ratio=COV_RATIO, ppo_kl_coef=COV_COEF
)


def settings(agg: str, **changes: float) -> Actor:
    actor = Actor(
        clip_ratio_low=CLIP_LOW, clip_ratio_high=CLIP_HIGH, clip_ratio_c=CLIP_C, loss_agg_mode=agg,
        loss_scale_factor=SCALE_FACTOR, policy_loss=SELECTS, tau_pos=TAU_POS, tau_neg=TAU_NEG,
    )  # fmt: skip
    return replace(actor, **changes)


def policy(mode: str, agg: str, batch: Batch, **changes: float) -> Values:
    near = mode.endswith("_cov")
    leaf = (batch.near_log_probs if near else batch.log_probs).clone().requires_grad_()
    per_token, selected = batch.advantages[batch.row], None
    if mode == "clip_cov":
        generator = torch.Generator().manual_seed(0)
        selected = select_clip_cov(leaf, per_token, SELECTS, generator)
    elif mode == "kl_cov":
        selected = select_kl_cov(leaf, per_token, SELECTS, torch.Generator())
    return with_gradient(
        batch, load(LOSSES[mode].function)(tokens(batch, leaf, selected=selected), settings(agg, **changes))[0], leaf
    )


def far(case: Case) -> Case:
    """Gives a case on the same batch, in which the log-ratios of every other row lie 25 above or below."""

    def values(batch: Batch) -> Values:
        moved = torch.where(batch.row % 4 == 0, -25.0, torch.where(batch.row % 4 == 2, 25.0, 0.0))
        return case(replace(batch, old_log_probs=batch.old_log_probs + moved))

    return values


def corrected(mode: str, agg: str, batch: Batch) -> Values:
    """Gives a loss with importance weights and rejected tokens. The mini-batch has the kept tokens alone."""
    leaf = batch.log_probs.clone().requires_grad_()
    weights, kept = weights_and_kept(batch)
    counted = replace(counts(batch), tokens=float(kept.sum()))
    options = {"weights": weights, "kept": kept, "lengths": kept_lengths(kept, batch.row, batch.lengths), "counts": counted}
    return with_gradient(batch, load(LOSSES[mode].function)(replace(tokens(batch, leaf), **options), settings(agg))[0], leaf)


def kl(kind: str, batch: Batch) -> Values:
    leaf = batch.log_probs.clone().requires_grad_()
    return with_gradient(batch, kl_estimate(leaf, batch.ref_log_probs, kind).sum(), leaf)


def kl_control(kind: str, batch: Batch) -> Values:
    controller = KlController(KlControl(type=kind, kl_coef=0.2, horizon=100, target_kl=0.1))
    coefficients = []
    for mean_kl in (0.5, 0.101, 0.02):
        controller.update(mean_kl, 12)
        coefficients.append(controller.coefficient)
    return {"coefficients": torch.tensor(coefficients, dtype=torch.float64)}


def aggregation(mode: str, batch: Batch) -> Values:
    return {"loss": aggregate(batch.values, batch.row, batch.lengths, mode, counts(batch), SCALE_FACTOR)}


def value(mode: str, batch: Batch) -> Values:
    leaf = batch.predictions.clone().requires_grad_()
    tokens = ValueTokens(leaf, batch.values, batch.returns, batch.row, batch.lengths, counts(batch))
    loss, _ = value_loss(tokens, VALUE_CLIP, mode, SCALE_FACTOR)
    return with_gradient(batch, loss, leaf)


def correction_settings(**options: Any) -> RolloutCorrection:
    base = {
        "rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False, "rollout_rs": None,
        "rollout_rs_threshold": None, "bypass_mode": False, "loss_type": "ppo_clip",
    }  # fmt: skip
    return RolloutCorrection(**base | options)


CORRECTIONS: dict[str, dict[str, Any]] = {
    "weights token": {"rollout_is": "token"},
    "weights sequence": {"rollout_is": "sequence"},
    "weights token, normalized": {"rollout_is": "token", "rollout_is_batch_normalize": True},
    "weights sequence, normalized": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "weights token, IcePop": {"rollout_is": "token", "rollout_is_threshold": "0.8_1.3"},
    **{f"rejection {name}": {"rollout_rs": name, "rollout_rs_threshold": THRESHOLDS[name[-2:]]} for name in REJECTIONS},
    "rejection token_k1,seq_max_k2": {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "0.6_1.6,0.4"},
}


def correction(name: str, batch: Batch) -> Values:
    result = correct(
        batch.old_log_probs, batch.rollout_log_probs, batch.row, batch.lengths, correction_settings(**CORRECTIONS[name])
    )
    found: Values = {key: torch.tensor(number, dtype=torch.float64) for key, number in result.metrics.items()}
    if result.weights is not None:
        found["weights"] = result.weights
    found["kept"] = torch.ones(len(batch.row)) if result.kept is None else result.kept.double()
    return found


BYPASS: dict[str, dict[str, Any]] = {
    "bypass ppo_clip": {},
    "bypass ppo_clip, rejection": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.08},
    "bypass reinforce": {"rollout_is": "sequence", "loss_type": "reinforce"},
    "bypass reinforce, normalized": {"rollout_is": "token", "rollout_is_batch_normalize": True, "loss_type": "reinforce"},
}


def bypass(name: str, batch: Batch) -> Values:
    leaf = batch.log_probs.clone().requires_grad_()
    options = correction_settings(**BYPASS[name], bypass_mode=True)
    return with_gradient(batch, bypass_loss(tokens(batch, leaf), settings("token-mean"), options)[0], leaf)


def presets(batch: Batch) -> Values:
    return {name: asdict(PRESETS[name]) for name in PRESETS}


def weights_of_pf_ppo(method: str, batch: Batch) -> Values:
    weights = pf_ppo_weights(batch.scores - 0.3, torch.ones_like(batch.scores, dtype=torch.bool), method, 2.0)
    return {"weights": weights}


def kl_in_reward(batch: Batch) -> Values:
    """Gives the mean KL of a step, and the coefficient that the adaptive controller makes of it."""
    controller = KlController(KlControl(type="adaptive", kl_coef=0.2, horizon=100, target_kl=0.1))
    rows = RolloutBatch(
        prompts=Ragged(flat=torch.zeros_like(batch.lengths), lengths=torch.ones_like(batch.lengths), batch_size=[]),
        responses=Ragged(flat=torch.zeros_like(batch.row), lengths=batch.lengths, batch_size=[]), group=batch.group,
        old_log_probs=batch.old_log_probs, ref_log_probs=batch.ref_log_probs, batch_size=[],
    )  # fmt: skip
    prompts = [PromptRow(row, "", "", None, {}, str(row)) for row in range(len(batch.lengths))]
    answers, results = Answers(prompts, [], Generation([], None, []), []), list(map(RewardResult, batch.scores.tolist()))
    step = StepBatch(1, StepPrompts(prompts, [], 0, 0), answers, rows, results)
    found = step.estimate(Algorithm("rloo", use_kl_in_reward=True, kl_penalty="kl"), controller)
    controller.update(found.kl_mean, len(prompts))
    return {"mean": torch.tensor([found.kl_mean]), "coefficient": torch.tensor([controller.coefficient])}


RULE_SOURCES = {"gsm8k": "openai/gsm8k", "MATH": "lighteval/MATH", "math_dapo": "math_dapo"}
PIECES = (
    r"\boxed{", "}", r"\frac", "{", "12", "1/2", "0.5", ".5", " ", r"\sqrt", "3", "x", "=", r"\text{ cm}", r"\%", "%", r"\!",
    r"\left(", r"\right)", "tfrac", "$", r"\$", "\n", r"^\circ", "-7", "1,072", "Answer: ", "answer:", "dollars", "a ",
    r"\text{m}", r"\boxed ", r"\fbox{", "#### ", "72", "72.", "$72", "\\\\", "{,}",
    r"\boxed{72}", r"\boxed{\frac{1}{2}}", "Answer: 72", "#### 72",
)  # fmt: skip
TRUTHS = ("72", r"\frac{1}{2}", "1072", "0.5", "x", r"\sqrt{3}", "12")


def scored(score: Callable[[str, str], Any]) -> Values:
    """Gives the scores of 20,000 random answers."""
    generator, scores = random.Random(0), []
    for _ in range(20_000):
        text, truth = "".join(generator.choices(PIECES, k=generator.randint(1, 9))), generator.choice(TRUTHS)
        found = score(text, truth)
        scores.append(float(found["score"] if isinstance(found, dict) else found))
    return {"scores": torch.tensor(scores)}


def learning_rates(name: str, batch: Batch) -> Values:
    """Gives the shares of the peak rate over twelve rollouts, three of them warm-up."""
    optim = Optim(lr_scheduler_type=name, min_lr_ratio=0.1)
    factor = learning_rate_factors(WARMUP, ROLLOUTS, optim)
    return {"rates": torch.tensor([factor(rollout) for rollout in range(ROLLOUTS)], dtype=torch.float64)}


CASES: dict[str, Case] = {
    **{f"advantages {name}": partial(advantages, name) for name in NAMES},
    **{f"advantages {name}, no std": partial(advantages, name, by_std=False) for name in ("grpo", "gdpo")},
    **{
        f"advantages {name}{UNSCORED}": unscored(partial(advantages, name.split(",")[0], by_std="no std" not in name))
        for name in TRLS_ADVANTAGES
    },
    **{f"advantages {name}{ALONE}": partial(advantages, name) for name in GROUPED},
    **{f"loss {mode}, {agg_mode}": partial(policy, mode, agg_mode) for mode in TOKEN_LOCAL for agg_mode in LOSS_AGG_MODES},
    **{f"loss {mode}": partial(policy, mode, "seq-mean-token-mean") for mode in SEQUENCE_MODES},
    **{f"loss gspo, {agg_mode}": partial(policy, "gspo", agg_mode) for agg_mode in LOSS_AGG_MODES},
    **{f"loss {mode}, token-mean{FAR}": far(partial(policy, mode, "token-mean")) for mode in FAR_MODES},
    **{f"loss vanilla{NO_DUAL_CLIP}, {agg}": partial(policy, "vanilla", agg, clip_ratio_c=math.inf) for agg in TRLS_AGGREGATIONS},
    f"loss cispo{NO_LOWER_CLIP}, token-mean": partial(policy, "cispo", "token-mean", clip_ratio_low=1.0),
    **{f"aggregation {mode}": partial(aggregation, mode) for mode in LOSS_AGG_MODES},
    **{f"value loss, {mode}": partial(value, mode) for mode in LOSS_AGG_MODES},
    **{f"kl {kind}{plus}": partial(kl, f"{kind}{plus}") for kind in KL_KINDS for plus in ("", "+")},
    **{f"kl control {kind}": partial(kl_control, kind) for kind in ("fixed", "adaptive")},
    **{f"correction {name}": partial(correction, name) for name in CORRECTIONS},
    **{f"loss {name}": partial(bypass, name) for name in BYPASS},
    **{f"loss {mode}, {agg}{CORRECTED}": partial(corrected, mode, agg) for mode, agg in CORRECTED_CASES},
    f"advantages optimal_token_baseline{CORRECTED}": partial(advantages, "optimal_token_baseline", corrected=True),
    "correction presets": presets,
    "kl in the reward": kl_in_reward,
    **{f"rule {name}": lambda _, source=source: scored(partial(score_by_rule, source)) for name, source in RULE_SOURCES.items()},
    **{f"learning rates {name}": partial(learning_rates, name) for name in ("constant", "cosine")},
    **{f"weights of pf_ppo {method}": partial(weights_of_pf_ppo, method) for method in PF_PPO_METHODS},
}
"""Name of a case -> this project's values. Names with ``ALONE`` read the batch in which every row is a group."""
