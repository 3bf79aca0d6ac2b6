import math

import pytest
import torch

from tests.trainer.conftest import AR
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.errors import ConfigError, RolloutError
from verl_memopt.trainer.correct_rollouts import (
    LIMIT_FP8_CACHE,
    LIMIT_FP32,
    LIMIT_HALF,
    MismatchCheck,
    log_prob_limit,
    same_distribution,
)

LEAST = {
    "data.train_files": "rows.jsonl",
    "data.val_files": None,
    f"{AR}.model.path": "model",
    f"{AR}.rollout.name": "vllm",
    f"{AR}.rollout.n": 2,
    f"{AR}.actor.use_dynamic_bsz": True,
    "algorithm.adv_estimator": "rloo",
}


def limit(engine="fp32", compute="fp32", **more):
    dtypes = {f"{AR}.rollout.dtype": engine, f"{AR}.actor.fsdp_config.dtype": compute}
    roles = settings_from_mapping(LEAST | dtypes | {f"{AR}.{k}": v for k, v in more.items()}).actor_rollout_ref
    return log_prob_limit(roles.rollout, roles.actor.fsdp_config)


@pytest.mark.parametrize(
    ("engine", "compute", "more", "expected"),
    [
        ("fp32", "fp32", {}, LIMIT_FP32),
        ("bfloat16", "fp32", {}, LIMIT_HALF),
        ("fp32", "bfloat16", {}, LIMIT_HALF),
        ("fp16", "bfloat16", {}, LIMIT_HALF),
        ("fp32", "fp32", {"actor.fsdp_config.model_dtype": "bfloat16"}, LIMIT_HALF),
        ("fp32", "fp32", {"rollout.kv_cache_dtype": "bfloat16"}, LIMIT_HALF),
        ("bfloat16", "bfloat16", {"rollout.kv_cache_dtype": "fp8"}, LIMIT_FP8_CACHE),
    ],
    ids=str,
)
def test_the_limit_follows_the_coarsest_dtype(engine, compute, more, expected):
    assert limit(engine, compute, **more) == expected
    assert limit(engine, compute, **more, **{"rollout.max_logprob_diff": "auto"}) == expected


@pytest.mark.parametrize("asked", [0.25, 2, "1e-4", None])
def test_a_number_or_null_is_taken_as_it_is(asked):
    allowed = limit("bfloat16", "bfloat16", **{"rollout.max_logprob_diff": asked})
    assert allowed == (None if asked is None else float(asked))


@pytest.mark.parametrize("asked", [0, -1, "off", "by dtype"])
def test_anything_else_is_refused(asked):
    with pytest.raises(ConfigError, match=r"max_logprob_diff.*must be a number above 0, or auto"):
        limit(**{"rollout.max_logprob_diff": asked})


def check_of(settled, more=None):
    roles = settled(more).actor_rollout_ref
    return MismatchCheck(roles.rollout, roles.actor.fsdp_config)


def compared(settled, engine, trainer, more=None):
    return check_of(settled, more).compare(torch.tensor(engine), torch.tensor(trainer), 7)


def test_differences_are_given_in_nats_and_in_probability(settled):
    metrics = compared(
        settled, [math.log(0.5), math.log(0.25)], [math.log(0.25), math.log(0.25)], {f"{AR}.rollout.max_logprob_diff": 1.0}
    )
    assert metrics == pytest.approx(
        {
            "rollout/logprob_diff_mean": math.log(2) / 2,
            "rollout/logprob_diff_max": math.log(2),
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_mean": 0.125,
            "training/rollout_probs_diff_max": 0.25,
            "training/rollout_probs_diff_std": 0.125,
        }
    )


def test_the_correlation_of_probabilities_is_pearsons(settled):
    more = {f"{AR}.rollout.max_logprob_diff": None}
    name = "training/rollout_actor_probs_pearson_corr"
    assert compared(settled, [-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0], more)[name] == pytest.approx(1.0)
    halves = [[math.log(p) for p in probs] for probs in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])]
    assert compared(settled, *halves, more)[name] == pytest.approx(-1.0)
    assert name not in compared(settled, [-1.0, -1.0], [-1.0, -2.0], more)


@pytest.mark.parametrize("engine", [[-1.0, -1.5], [math.nan, -1.0]])
def test_past_the_threshold_the_run_stops_and_names_the_key_and_the_step(settled, engine):
    more = {f"{AR}.rollout.max_logprob_diff": 0.2}
    with pytest.raises(
        RolloutError, match=rf"{AR}\.rollout\.max_logprob_diff=0\.2: in step 7 .* (0\.25|nan) nats.*rollout\.dtype"
    ):
        compared(settled, engine, [-1.0, -1.0], more)


@pytest.mark.parametrize(
    "more", [{"max_logprob_diff": None}, {"max_logprob_diff": 0.26}, {"max_logprob_diff": 0.2, "top_p": 0.9}], ids=str
)
def test_below_the_threshold_without_one_or_with_filters_the_run_goes_on(settled, more):
    metrics = compared(settled, [-1.0, -1.5], [-1.0, -1.0], {f"{AR}.rollout.{name}": value for name, value in more.items()})
    assert metrics["rollout/logprob_diff_mean"] == 0.25


@pytest.mark.parametrize("engine", [[-1.0, -1.0], [math.nan, -1.0]])
@pytest.mark.parametrize("trainer", [math.nan, -math.inf])
def test_where_the_trainers_own_log_probs_are_not_finite_the_sync_is_not_blamed(settled, engine, trainer):
    metrics = compared(settled, engine, [trainer, -1.0], {f"{AR}.rollout.max_logprob_diff": 0.2})
    assert not math.isfinite(metrics["rollout/logprob_diff_mean"])


def test_a_difference_of_the_threshold_goes_on_and_any_more_stops_by_default_that_of_the_dtypes(settled):
    key, log_probs = f"{AR}.rollout.max_logprob_diff", ([-1.0, -1.5], [-1.0, -1.0])
    assert compared(settled, *log_probs, {key: 0.25})["rollout/logprob_diff_mean"] == 0.25
    with pytest.raises(RolloutError, match="max_logprob_diff"):
        compared(settled, *log_probs, {key: math.nextafter(0.25, 0)})
    assert compared(settled, [-1.0, -1.0005], [-1.0, -1.0])["rollout/logprob_diff_mean"] < 1e-3
    with pytest.raises(RolloutError, match=r"max_logprob_diff=auto \(0\.001 for these dtypes\): in step 7 .* 0\.002 nats"):
        compared(settled, [-1.0, -1.004], [-1.0, -1.0])


def test_nothing_is_compared_without_engine_log_probs_or_without_tokens(settled):
    assert check_of(settled).compare(None, torch.full((3,), -5.0), 1) == {}
    assert compared(settled, [], []) == {}


@pytest.mark.parametrize(
    ("more", "same"),
    [
        ({}, True),
        ({"temperature": 0.7}, True),
        ({"top_p": 0.9}, False),
        ({"top_k": 5}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"do_sample": False}, False),
        ({"logprobs_mode": "raw_logprobs"}, True),
        ({"logprobs_mode": "raw_logprobs", "top_p": 0.9}, True),
        ({"logprobs_mode": "raw_logprobs", "temperature": 0.7}, False),
    ],
    ids=str,
)
def test_engine_and_trainer_are_comparable_where_they_describe_one_distribution(settled, more, same):
    settings = settled({f"{AR}.rollout.{name}": value for name, value in more.items()})
    assert same_distribution(settings.actor_rollout_ref.rollout) is same
