from dataclasses import replace

import pytest
import torch

from tests.algorithms.ragged import Ragged
from verl_memopt.algorithms.rollout_correction import correct, corrects_before_update, importance_weights, rejection
from verl_memopt.config.aliases import PRESETS

SAMPLE = Ragged((3, 0, 5, 1), 4)
TRAINER = -SAMPLE.tokens(0).abs()
ENGINE = TRAINER + 0.4 * SAMPLE.tokens(1)


@pytest.mark.parametrize("name", PRESETS)
def test_a_correction_has_what_its_settings_ask_for(name):
    settings = PRESETS[name]
    correction = correct(TRAINER, ENGINE, SAMPLE.row, SAMPLE.lengths, settings)
    assert (correction.weights is None) == (settings.rollout_is is None)
    assert (correction.kept is None) == (settings.rollout_rs is None)
    assert all(key.startswith("rollout_corr/") for key in correction.metrics)
    assert "rollout_corr/k3_kl" in correction.metrics
    assert ("rollout_corr/rollout_is_mean" in correction.metrics) == (settings.rollout_is is not None)
    assert ("rollout_corr/rollout_rs_masked_fraction" in correction.metrics) == (settings.rollout_rs is not None)


def test_weights_and_kept_tokens_are_those_of_the_log_ratio_trainer_minus_engine():
    settings = replace(PRESETS["decoupled_k3_rs_token_tis"], rollout_rs_threshold=0.05)
    correction = correct(TRAINER, ENGINE, SAMPLE.row, SAMPLE.lengths, settings)
    weights, _ = importance_weights(TRAINER - ENGINE, SAMPLE.row, SAMPLE.lengths, "token", 2.0, False)
    kept, _ = rejection(TRAINER - ENGINE, SAMPLE.row, SAMPLE.lengths, "seq_mean_k3", 0.05)
    assert torch.equal(correction.weights, weights)
    assert torch.equal(correction.kept, kept)
    assert 0 < kept.sum() < len(kept)


def test_normalised_weights_have_mean_one_over_the_tokens_of_the_step():
    settings = replace(PRESETS["decoupled_token_is"], rollout_is_batch_normalize=True)
    assert correct(TRAINER, ENGINE, SAMPLE.row, SAMPLE.lengths, settings).weights.mean().item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(
    ("bypass", "weights", "rejections", "corrects"),
    [
        (False, None, None, False),
        (False, "token", None, True),
        (False, None, "token_k1", True),
        (False, "token", "token_k1", True),
        (True, None, None, False),
        (True, "token", None, False),
        (True, None, "token_k1", False),
        (True, "token", "token_k1", False),
    ],
)
def test_a_step_corrects_before_its_update_in_decoupled_mode_alone(bypass, weights, rejections, corrects):
    settings = replace(PRESETS["decoupled_token_is"], bypass_mode=bypass, rollout_is=weights, rollout_rs=rejections)
    assert corrects_before_update(settings) is corrects
