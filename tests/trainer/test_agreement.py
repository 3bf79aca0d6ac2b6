import pytest

from tests.trainer.conftest import AR
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.errors import ConfigError
from verl_memopt.trainer.agreement import LIMIT_FP8_CACHE, LIMIT_FP32, LIMIT_HALF, log_prob_limit

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
    return log_prob_limit(settings_from_mapping(LEAST | dtypes | {f"{AR}.{k}": v for k, v in more.items()}).actor_rollout_ref)


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
    found = limit("bfloat16", "bfloat16", **{"rollout.max_logprob_diff": asked})
    assert found == (None if asked is None else float(asked))


@pytest.mark.parametrize("asked", [0, -1, "off", "by dtype"])
def test_anything_else_is_refused(asked):
    with pytest.raises(ConfigError, match=r"max_logprob_diff.*must be a number above 0, or auto"):
        limit(**{"rollout.max_logprob_diff": asked})
