import math

import pytest

from verl_memopt.config.correction_rules import importance_bounds, rejection_bounds
from verl_memopt.errors import ConfigError


def test_one_number_is_an_upper_bound_and_two_are_both():
    assert importance_bounds(2) == importance_bounds("2.0") == (None, 2.0)
    assert importance_bounds("0.5_2") == (0.5, 2.0)


@pytest.mark.parametrize("threshold", [0, -1.0, "a", "2.0_0.5", "1_2_3", "", "inf", "0_1"])
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
        ("", 1.0, r"rollout_rs=: give names out of"),
        ("token_k1", None, r"rollout_rs_threshold=None: give one threshold"),
        ("token_k1,token_k2,token_k3", "1,2", r"rollout_rs_threshold=1,2: give one threshold"),
        ("token_k2", "0.5_2.0", r"rollout_rs_threshold=0\.5_2\.0: token_k2 needs one positive number"),
        ("token_k1", "2.0_0.5", r"token_k1 needs lower_upper"),
        ("token_k1", 0.5, r"token_k1 needs lower_upper"),
        ("token_k3", "x", r"token_k3 needs one positive number"),
        ("token_k3", -1, r"token_k3 needs one positive number"),
    ],
)
def test_a_setting_that_cannot_be_read_is_an_error_with_its_key(names, threshold, message):
    with pytest.raises(ConfigError, match=r"^algorithm\.rollout_correction\..*" + message):
        rejection_bounds(names, threshold)
