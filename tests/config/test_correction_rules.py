import math
from dataclasses import replace

import pytest

from verl_memopt.algorithms.records import WITH_STATISTICS
from verl_memopt.config.algorithm_rules import importance_bounds, rejection_bounds
from verl_memopt.config.aliases import PRESETS
from verl_memopt.errors import ConfigError

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
    assert settled({f"{KEY}.rollout_is_threshold": "a", f"{KEY}.rollout_rs_threshold": "a"})


def test_remax_takes_one_response_and_every_token_baseline_a_group(settled, complaint):
    one = {f"{AR}.rollout.n": 1}
    assert settled({"algorithm.adv_estimator": "remax"} | one)
    for name in WITH_STATISTICS:
        assert "a group of one has no baseline" in complaint(OTB | {"algorithm.adv_estimator": name} | one)


def test_one_number_is_an_upper_bound_and_two_are_both():
    assert importance_bounds(2) == importance_bounds("2.0") == (None, 2.0)
    assert importance_bounds("0.5_2") == (0.5, 2.0)


@pytest.mark.parametrize("threshold", [0, "a", "2.0_0.5", "1_2_3", "", "inf", "0_1"])
def test_a_threshold_that_cannot_be_read_is_an_error_with_its_key(threshold):
    with pytest.raises(ConfigError, match=r"algorithm\.rollout_correction\.rollout_is_threshold=.*: give one positive number"):
        importance_bounds(threshold)


def test_bounds_are_read_in_the_form_of_their_divergence():
    bounds = rejection_bounds("token_k1,seq_max_k2,seq_sum_k1", "0.5_2.0,2.5,4")
    assert bounds["token_k1"] == pytest.approx((math.log(0.5), math.log(2)))
    assert bounds["seq_max_k2"] == (-math.inf, 2.5)
    assert bounds["seq_sum_k1"] == pytest.approx((-math.log(4), math.log(4)))
    assert rejection_bounds("token_k2,token_k2,seq_sum_k3", 0.1).keys() == {"token_k2", "seq_sum_k3"}


@pytest.mark.parametrize(
    ("names", "threshold", "message"),
    [
        ("token_k4", 1.0, r"rollout_rs=token_k4: give names out of"),
        ("token_k1", None, r"rollout_rs_threshold=None: give one threshold"),
        ("token_k1,token_k2,token_k3", "1,2", r"rollout_rs_threshold=1,2: give one threshold"),
        ("token_k2", "0.5_2.0", r"rollout_rs_threshold=0\.5_2\.0: token_k2 needs one positive number"),
        ("token_k1", "2.0_0.5", r"token_k1 needs lower_upper"),
        ("token_k1", 0.5, r"token_k1 needs lower_upper"),
        ("token_k3", -1, r"token_k3 needs one positive number"),
    ],
)
def test_a_setting_that_cannot_be_read_is_an_error_with_its_key(names, threshold, message):
    with pytest.raises(ConfigError, match=r"^algorithm\.rollout_correction\..*" + message):
        rejection_bounds(names, threshold)


def test_a_name_says_its_values():
    for name in PRESETS:
        values = PRESETS[name]
        assert values.bypass_mode == name.startswith("bypass")
        assert (values.loss_type == "reinforce") == ("_pg_" in name)
        level = "token" if "token" in name else "sequence" if "seq" in name or name == "bypass_pg_is" else None
        assert values.rollout_is == level
        assert (values.rollout_rs is None) == ("_rs" not in name)
        assert (importance_bounds(values.rollout_is_threshold)[0] is not None) == ("icepop" in name)
        assert not values.rollout_is_batch_normalize
        if values.rollout_rs is not None:
            expected = "seq_mean_k1" if "geo" in name else "seq_mean_k3" if "k3" in name else "seq_sum_k1"
            assert list(rejection_bounds(values.rollout_rs, values.rollout_rs_threshold)) == [expected]


def test_a_name_stands_for_its_values_and_given_keys_win(settled):
    name = {"algorithm.rollout_correction.preset": "decoupled_seq_is_rs"}
    assert settled(name).algorithm.rollout_correction == PRESETS["decoupled_seq_is_rs"]
    assert settled({"algorithm.rollout_correction": "decoupled_seq_is_rs"}) == settled(name)
    own = settled(name | {"algorithm.rollout_correction.rollout_is_threshold": 3.0}).algorithm.rollout_correction
    assert own == replace(PRESETS["decoupled_seq_is_rs"], rollout_is_threshold=3.0)


def test_no_name_changes_nothing(settled):
    assert (
        settled({"algorithm.rollout_correction": None}) == settled({}) == settled({"algorithm.rollout_correction.preset": None})
    )


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(complaint):
    text = complaint({"algorithm.rollout_correction.preset": "tis"})
    assert "algorithm.rollout_correction.preset=tis: no such preset" in text
    assert all(name in text for name in PRESETS)
    both = {"algorithm.rollout_correction.preset": "bypass_pg_is", "algorithm.rollout_correction": "bypass_pg_is"}
    assert "two names of a preset" in complaint(both)
