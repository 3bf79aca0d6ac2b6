import pytest

from verl_memopt.algorithms.records import WITH_STATISTICS
from verl_memopt.config.checks import RULES
from verl_memopt.config.correction_rules import CORRECTION_RULES, CORRECTION_UNUSED
from verl_memopt.config.unused_keys import UNUSED_KEYS

AR = "actor_rollout_ref"
KEY = "algorithm.rollout_correction"
WEIGHTS, REJECTION, BYPASS = ({f"{KEY}.{key}": value} for key, value in (
    ("rollout_is", "token"), ("rollout_rs", "token_k2"), ("bypass_mode", True)
))  # fmt: skip
BOUND = {f"{KEY}.rollout_rs_threshold": 0.5}
OTB = {"algorithm.adv_estimator": "optimal_token_baseline", f"{AR}.actor.calculate_sum_pi_squared": True}

CASES = {
    "a bound of the weights is read": (WEIGHTS, f"{KEY}.rollout_is_threshold", ["0.5_5.0", 2], ["5_0.5", "a", -1.0, "1_2_3"]),
    "names of rejections are known": (BOUND, f"{KEY}.rollout_rs", ["token_k2", "token_k2,seq_max_k3"], ["token_k4", ""]),
    "a rejection has its bound": (REJECTION, f"{KEY}.rollout_rs_threshold", [0.5, "0.5"], [None, "0.5_2.0", "0.5,1"]),
    **{
        f"the engine returns log-probs for {next(iter(on))}": (on | BOUND, f"{AR}.rollout.calculate_log_probs", [True], [False])
        for on in (WEIGHTS, REJECTION, BYPASS)
    },
    "the engine's log-probs are of the sampled distribution": (
        WEIGHTS | {f"{AR}.rollout.temperature": 0.7}, f"{AR}.rollout.logprobs_mode", ["processed_logprobs"], ["raw_logprobs"],
    ),
    "raw log-probs are those of temperature 1": (WEIGHTS, f"{AR}.rollout.logprobs_mode", ["raw_logprobs"], []),
    "a token baseline has its sums": (OTB, f"{AR}.actor.calculate_sum_pi_squared", [True], [False]),
    "a token baseline has its pass": (OTB, f"{KEY}.bypass_mode", [False], [True]),
}  # fmt: skip
"""What must hold -> the other keys, the key that is tried, values that pass and values that are refused."""


@pytest.mark.parametrize("what", CASES)
def test_a_value_passes_or_is_refused_by_name(settled, complaint, what):
    others, key, within, beyond = CASES[what]
    for value in within:
        assert settled(others | {key: value})
    for value in beyond:
        text = complaint(others | {key: value})
        assert key in text
        assert "rollout_correction" in text or "sum of squared" in text


def test_a_threshold_that_nothing_reads_is_not_looked_at(settled):
    assert settled({f"{KEY}.rollout_is_threshold": "a"})
    assert settled({f"{KEY}.rollout_rs_threshold": "a"})


def test_the_message_says_how_a_bound_is_written(complaint):
    assert "give one positive number, or lower_upper" in complaint(WEIGHTS | {f"{KEY}.rollout_is_threshold": "a"})
    assert "token_k2 needs one positive number" in complaint(REJECTION | {f"{KEY}.rollout_rs_threshold": "a"})


def test_the_rules_are_asked_when_settings_are_loaded():
    assert set(CORRECTION_RULES) <= set(RULES)
    assert all(UNUSED_KEYS[unused.key] is unused for unused in CORRECTION_UNUSED)


def test_remax_takes_one_response_and_every_token_baseline_a_group(settled, complaint):
    one = {f"{AR}.rollout.n": 1}
    assert settled({"algorithm.adv_estimator": "remax"} | one)
    for name in WITH_STATISTICS:
        assert "a group of one has no baseline" in complaint(OTB | {"algorithm.adv_estimator": name} | one)
