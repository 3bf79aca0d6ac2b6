import logging

import pytest

from verl_memopt.config.loader import log_objective, objective
from verl_memopt.config.values import choices

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


def test_estimator_loss_and_both_kls_are_named(settled):
    in_reward = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.02}
    assert objective(settled(in_reward).algorithm, "gspo", "0.001 x mse") == (
        "advantages rloo, loss gspo (one clipped ratio per sequence, length-normalised), "
        "KL in the loss 0.001 x mse, KL in the reward 0.02 x kl"
    )


def test_a_loss_that_bypass_mode_does_not_take_earns_a_warning(settled, caplog):
    for loss, warns in (("sequence", True), ("vanilla", False)):
        settings = settled({"algorithm.rollout_correction.bypass_mode": True, LOSS: loss})
        caplog.clear()
        with caplog.at_level(logging.INFO):
            log_objective(settings)
        assert [record.levelname for record in caplog.records] == ["INFO", *["WARNING"] * warns]


@pytest.mark.parametrize("loss", choices()[LOSS])
def test_every_loss_has_its_words(settled, loss):
    assert objective(settled({}).algorithm, loss, None).endswith("), no KL")


@pytest.mark.parametrize(
    ("estimator", "loss", "warns"),
    [("grpo", "sequence", True), ("opo", "sequence", True), ("grpo", "vanilla", False), ("rloo", "sequence", False)],
)
def test_another_estimator_with_the_loss_of_rloo_earns_a_warning(settled, caplog, estimator, loss, warns):
    settings = settled({"algorithm.adv_estimator": estimator, LOSS: loss})
    caplog.clear()
    with caplog.at_level(logging.INFO):
        log_objective(settings)
    assert [record.levelname for record in caplog.records] == ["INFO", *["WARNING"] * warns]
