"""verl's values, from its own functions, on padded rows."""

from __future__ import annotations

import contextlib
import inspect
import types
import warnings
from functools import partial
from importlib.metadata import version
from typing import Any
from unittest import mock

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
from benchmarks.estimators.ours import (
    ALONE,
    BYPASS,
    CASES,
    CORRECTED,
    CORRECTIONS,
    COV_COEF,
    COV_LOWER,
    COV_RATIO,
    COV_UPPER,
    FAR,
    NO_DUAL_CLIP,
    NO_LOWER_CLIP,
    ROLLOUTS,
    UNSCORED,
    VALUE_CLIP,
    WARMUP,
    Case,
    Values,
    far,
    scored,
    weights_and_kept,
)
from benchmarks.update_pass.ray_stand_in import ray_or_stand_in

with warnings.catch_warnings(), ray_or_stand_in():
    warnings.simplefilter("ignore")
    from verl import DataProto
    from verl.trainer.config import AlgoConfig
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo import core_algos, ray_trainer, rollout_corr_helper
    from verl.utils import torch_functional
    from verl.utils.reward_score import gsm8k, math_dapo, math_reward
    from verl.workers.config import ActorConfig, PolicyLossConfig

VERSION = version("verl")


def advantages(name: str, batch: Batch, by_std: bool = True, corrected: bool = False) -> Values:
    function = core_algos.get_adv_estimator_fn(name)
    prompts = torch.zeros_like(batch.mask[:, :1])
    given = {
        "token_level_rewards": batch.pad(batch.token_rewards), "response_mask": batch.mask, "index": batch.group.numpy(),
        "values": batch.pad(batch.values), "gamma": GAMMA, "lam": LAM, "norm_adv_by_std_in_grpo": by_std,
        "config": AlgoConfig(
            gamma=GAMMA, lam=LAM, norm_adv_by_std_in_grpo=by_std,
            gdpo_reward_keys=[*REWARDS], gdpo_reward_weights=[*REWARDS.values()],
        ),
        "non_tensor_batch": dict(zip(REWARDS, batch.components.T.numpy(), strict=True)),
        "batch": {"prompts": prompts, "attention_mask": torch.cat([prompts, batch.mask], 1).long()},
        "reward_baselines": batch.baselines,
        "old_log_probs": batch.pad(batch.old_log_probs), "sum_pi_squared": batch.pad(batch.sum_pi_squared),
        "rollout_is_weights": batch.pad(weights_and_kept(batch)[0]) if corrected else None,
    }  # fmt: skip
    names = inspect.signature(function).parameters
    found = function(**{key: value for key, value in given.items() if key in names})
    return dict(zip(("advantages", "returns"), map(batch.flat, found), strict=True))


def actor(agg: str, batch: Batch, correction: dict[str, Any] | None = None) -> ActorConfig:
    config = ActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=CLIP_LOW, clip_ratio_high=CLIP_HIGH,
        clip_ratio_c=CLIP_C, tau_pos=TAU_POS, tau_neg=TAU_NEG, loss_agg_mode=agg, loss_scale_factor=SCALE_FACTOR,
        policy_loss=PolicyLossConfig(
            clip_cov_ratio=COV_RATIO, clip_cov_lb=COV_LOWER, clip_cov_ub=COV_UPPER, kl_cov_ratio=COV_RATIO, ppo_kl_coef=COV_COEF,
            **({} if correction is None else {"rollout_correction": correction}),
        ),
    )  # fmt: skip
    config.global_batch_info.update(info(batch))
    return config


def info(batch: Batch) -> dict[str, Any]:
    rows, tokens = len(batch.lengths), int(batch.lengths.sum())
    return {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": rows, "loss_scale_factor": SCALE_FACTOR}


def policy(mode: str, agg: str, batch: Batch, log_probs: str = "log_probs", correction: dict[str, Any] | None = None) -> Values:
    leaf = batch.pad(getattr(batch, log_probs)).requires_grad_()
    torch.manual_seed(0)
    # clip_cov draws from the global generator.
    loss, _ = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=batch.pad(batch.old_log_probs), log_prob=leaf, advantages=batch.advantages[:, None] * batch.mask,
        response_mask=batch.mask, loss_agg_mode=agg, config=actor(agg, batch, correction), rollout_is_weights=None,
    )  # fmt: skip
    return with_gradient(batch, loss, leaf)


def corrected(mode: str, agg: str, batch: Batch) -> Values:
    """Gives a loss with importance weights, whose mask lacks the rejected tokens."""
    leaf = batch.pad(batch.log_probs).requires_grad_()
    weights, kept = weights_and_kept(batch)
    config = actor(agg, batch)
    config.global_batch_info["batch_num_tokens"] = int(kept.sum())
    loss, _ = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=batch.pad(batch.old_log_probs), log_prob=leaf, advantages=batch.advantages[:, None] * batch.mask,
        response_mask=batch.pad(kept.to(leaf)), loss_agg_mode=agg, config=config, rollout_is_weights=batch.pad(weights),
    )  # fmt: skip
    return with_gradient(batch, loss, leaf)


def kl(kind: str, batch: Batch) -> Values:
    leaf = batch.log_probs.clone().requires_grad_()
    return with_gradient(batch, core_algos.kl_penalty(leaf, batch.ref_log_probs, kind).sum(), leaf)


def kl_control(kind: str, batch: Batch) -> Values:
    options = types.SimpleNamespace(type=kind, kl_coef=0.2, horizon=100, target_kl=0.1)
    controller = core_algos.get_kl_controller(options)
    coefficients = []
    for mean_kl in (0.5, 0.101, 0.02):
        controller.update(mean_kl, 12)
        coefficients.append(float(controller.value))
    return {"coefficients": torch.tensor(coefficients, dtype=torch.float64)}


def agg(mode: str, batch: Batch) -> Values:
    return {"loss": core_algos.agg_loss(batch.pad(batch.values), batch.mask, mode, **info(batch))}


def value(mode: str, batch: Batch) -> Values:
    leaf = batch.pad(batch.predictions).requires_grad_()
    loss, _ = core_algos.compute_value_loss(
        leaf, batch.pad(batch.returns), batch.pad(batch.values), batch.mask, VALUE_CLIP, mode, **info(batch)
    )
    return with_gradient(batch, loss, leaf)


def correction(name: str, batch: Batch) -> Values:
    weights, mask, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        batch.pad(batch.old_log_probs), batch.pad(batch.rollout_log_probs), batch.mask, **CORRECTIONS[name]
    )
    found: Values = {key: torch.tensor(number, dtype=torch.float64) for key, number in metrics.items()}
    if weights is not None:
        found["weights"] = batch.flat(weights.batch["rollout_is_weights"])
    found["kept"] = batch.flat(mask)
    return found


def presets(batch: Batch) -> Values:
    names = [name for name, member in vars(RolloutCorrectionConfig).items() if isinstance(member, classmethod)]
    fields = RolloutCorrectionConfig.__dataclass_fields__
    return {
        name: {field: getattr(getattr(RolloutCorrectionConfig, name)(), field) for field in fields if not field.startswith("_")}
        for name in names
    }


def weights_of_pf_ppo(method: str, batch: Batch) -> Values:
    """Gives the weights that verl hands to its draw."""
    data = types.SimpleNamespace(batch={"token_level_scores": (batch.scores - 0.3)[:, None]}, non_tensor_batch={}, meta_info={})
    handed: list[Tensor] = []

    def draw(weights: Tensor, *_: Any, **__: Any) -> Tensor:
        handed.append(weights)
        raise _Handed

    with mock.patch.object(torch, "multinomial", draw), contextlib.suppress(_Handed):
        core_algos.compute_pf_ppo_reweight_data(data, method, 2.0)
    return {"weights": handed[0]}


class _Handed(Exception):  # noqa: N818 - ends a call whose argument is all that is wanted
    pass


def kl_in_reward(batch: Batch) -> Values:
    options = types.SimpleNamespace(type="adaptive", kl_coef=0.2, horizon=100, target_kl=0.1)
    controller = core_algos.get_kl_controller(options)
    tensors = {
        "response_mask": batch.mask, "token_level_scores": batch.pad(batch.token_rewards),
        "old_log_probs": batch.pad(batch.old_log_probs), "ref_log_prob": batch.pad(batch.ref_log_probs),
    }  # fmt: skip
    _, metrics = ray_trainer.apply_kl_penalty(DataProto.from_single_dict(tensors), controller, "kl")
    mean, coefficient = metrics["actor/reward_kl_penalty"], controller.value
    return {"mean": torch.tensor([mean]), "coefficient": torch.tensor([float(coefficient)])}


def learning_rates(name: str, batch: Batch) -> Values:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    if name == "constant":
        schedule = torch_functional.get_constant_schedule_with_warmup(optimizer, WARMUP)
    else:
        schedule = torch_functional.get_cosine_schedule_with_warmup(optimizer, WARMUP, ROLLOUTS, min_lr_ratio=0.1)
    factor = schedule.lr_lambdas[0]
    return {"rates": torch.tensor([factor(rollout) for rollout in range(ROLLOUTS)], dtype=torch.float64)}


RULES: dict[str, Any] = {"gsm8k": gsm8k, "MATH": math_reward, "math_dapo": math_dapo}


def _case(name: str) -> Case | None:
    """Gives verl's values of a case by its name, None where verl has no such function."""
    if name.endswith(UNSCORED) or name == "advantages sft":
        return None
    kind, _, rest = name.removesuffix(ALONE).partition(" ")
    if name == "correction presets":
        return presets
    if name.startswith("rule "):
        rule = RULES[name.removeprefix("rule ")]
        return lambda _: scored(rule.compute_score)
    if name == "kl in the reward":
        return kl_in_reward
    if name.startswith("learning rates "):
        return partial(learning_rates, name.rsplit(" ", 1)[1])
    if name.startswith("kl control "):
        return partial(kl_control, rest.removeprefix("control "))
    if name.startswith("weights of pf_ppo "):
        return partial(weights_of_pf_ppo, name.rsplit(" ", 1)[1])
    if kind == "advantages" and name.endswith(CORRECTED):
        return partial(advantages, rest.removesuffix(CORRECTED), corrected=True)
    if name.endswith(FAR):
        found = _case(name.removesuffix(FAR))
        return None if found is None else far(found)
    if name.endswith(CORRECTED):
        return partial(corrected, *rest.removesuffix(CORRECTED).split(", "))
    if kind == "advantages":
        return partial(advantages, rest.removesuffix(", no std"), by_std="no std" not in rest)
    if name.startswith("loss bypass "):
        return partial(policy, "bypass_mode", "token-mean", correction=BYPASS[rest])
    if kind == "loss":
        mode, _, agg_mode = rest.partition(", ")
        if mode == "sequence" or mode.endswith((NO_DUAL_CLIP, NO_LOWER_CLIP)):
            return None
        return partial(
            policy, mode, agg_mode or "seq-mean-token-mean", log_probs="near_log_probs" if mode.endswith("_cov") else "log_probs"
        )
    makers = {"aggregation": agg, "kl": kl, "correction": correction}
    return partial(value, rest.removeprefix("loss, ")) if kind == "value" else partial(makers[kind], rest)


VALUES: dict[str, Case] = {name: case for name in CASES if (case := _case(name)) is not None}
