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


def test_normalised_advantages_are_named_for_the_estimator_that_has_them(settled):
    for estimator, words in (("rloo", "advantages rloo (normalised over the step), "), ("opo", "advantages opo, ")):
        algorithm = settled({"algorithm.normalize_advantages": True, "algorithm.adv_estimator": estimator}).algorithm
        assert objective(algorithm, "sequence", None).startswith(words)


def test_groups_that_are_left_out_are_named(settled):
    algorithm = settled({"algorithm.filter_groups.enable": True}).algorithm
    assert objective(algorithm, "vanilla", None).endswith("no KL, groups whose responses agree in score left out")


CORRECTIONS = [
    (
        {"preset": "decoupled_k3_rs_seq_tis"},
        "loss vanilla (one clipped ratio per token), no KL, importance weights per sequence, rejection seq_mean_k3",
    ),
    (
        {"preset": "bypass_ppo_clip", "rollout_is": "token"},
        "loss ppo_clip (one clipped ratio to the engine per token), no KL",
    ),
    (
        {"preset": "bypass_pg_is"},
        "loss reinforce (log-probs without a ratio), no KL, importance weights per sequence",
    ),
]


@pytest.mark.parametrize(("more", "words"), CORRECTIONS)
def test_a_correction_is_named_with_the_loss_that_bypass_mode_takes(settled, more, words):
    settings = settled({f"algorithm.rollout_correction.{key}": value for key, value in more.items()})
    assert objective(settings.algorithm, "vanilla", None) == f"advantages rloo, {words}"


def test_rows_that_are_drawn_are_named(settled):
    assert objective(settled({"algorithm.use_pf_ppo": True}).algorithm, "vanilla", None).endswith("rows drawn by score (pow)")


def test_a_loss_that_bypass_mode_does_not_take_earns_a_warning(settled, caplog):
    algorithm = settled({"algorithm.rollout_correction.bypass_mode": True}).algorithm
    for loss, warns in (("sequence", True), ("vanilla", False)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            log_objective(algorithm, loss, None)
        assert [record.levelname for record in caplog.records] == ["INFO", *["WARNING"] * warns]


@pytest.mark.parametrize("loss", choices()[LOSS])
def test_every_loss_has_its_words(settled, loss):
    assert objective(settled({}).algorithm, loss, None).endswith("), no KL")


@pytest.mark.parametrize(
    ("estimator", "loss", "warns"),
    [("grpo", "sequence", True), ("opo", "sequence", True), ("grpo", "vanilla", False), ("rloo", "sequence", False)],
)
def test_another_estimator_with_the_loss_of_rloo_earns_a_warning(settled, caplog, estimator, loss, warns):
    settings = settled({"algorithm.adv_estimator": estimator})
    with caplog.at_level(logging.INFO):
        log_objective(settings.algorithm, loss, None)
    assert [record.levelname for record in caplog.records] == ["INFO", *["WARNING"] * warns]
