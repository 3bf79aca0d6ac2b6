from dataclasses import asdict, replace

from verl_memopt.config.aliases import PRESETS
from verl_memopt.config.correction_rules import importance_bounds, rejection_bounds


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


def test_a_preset_by_hand():
    assert asdict(PRESETS["bypass_pg_geo_rs_token_tis"]) == {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.999_1.001",
        "bypass_mode": True,
        "loss_type": "reinforce",
    }


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
