from dataclasses import asdict

import pytest

from verl_memopt.algorithms.corrections.importance import importance_bounds
from verl_memopt.algorithms.corrections.presets import PRESETS, preset
from verl_memopt.algorithms.corrections.rejection import rejection_bounds
from verl_memopt.errors import ConfigError


def test_a_name_says_its_values():
    for name in PRESETS:
        values = preset(name)
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


def test_a_preset_by_hand():
    assert asdict(preset("bypass_pg_geo_rs_token_tis")) == {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.999_1.001",
        "bypass_mode": True,
        "loss_type": "reinforce",
    }


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"algorithm\.rollout_correction=tis: no such preset.*decoupled_token_is"):
        preset("tis")
