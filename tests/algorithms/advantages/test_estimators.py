from dataclasses import fields, replace

import pytest
import torch

from tests.algorithms.ragged import Ragged
from verl_memopt.algorithms.advantages.estimators import ESTIMATORS, NEEDS, AdvantageInputs
from verl_memopt.algorithms.advantages.gae import gae_advantages
from verl_memopt.algorithms.advantages.outcome import grpo_advantages, opo_advantages, rloo_advantages
from verl_memopt.algorithms.kl import token_level_rewards

NAN = float("nan")
SAMPLE = Ragged((3, 1, 4, 2, 0), 7)
VERLS = {
    "gae", "grpo", "grpo_passk", "grpo_vectorized", "gpg", "opo", "optimal_token_baseline", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "remax", "rloo", "rloo_vectorized", "tir_optimal_token_baseline",
}  # fmt: skip


def inputs(rewards=(1.0, 0.0, 0.5, 0.0, 2.0)):
    scores, valid = torch.tensor(rewards), torch.tensor([True] * 5)
    return AdvantageInputs(
        scores, torch.tensor([0, 0, 1, 1, 1]), valid, SAMPLE.row, SAMPLE.lengths,
        token_rewards=token_level_rewards(scores, SAMPLE.row, SAMPLE.lengths), gamma=0.9, lam=0.8, normalize_by_std=True,
        values=SAMPLE.tokens(0).float(), baselines=torch.full((5,), 0.25), old_log_probs=-SAMPLE.tokens(1).abs().float(),
        sum_pi_squared=torch.full((10,), 0.5),
    )  # fmt: skip


def test_every_estimator_of_verl_for_one_reward_has_its_name():
    assert ESTIMATORS.keys() == VERLS
    names = {field.name for field in fields(AdvantageInputs)}
    assert all(set(needs) <= names for needs in NEEDS.values())


@pytest.mark.parametrize("name", sorted(VERLS))
def test_an_estimator_gives_one_number_a_token_from_the_inputs_it_names(name):
    bare = replace(inputs(), **dict.fromkeys(("values", "baselines", "old_log_probs", "sum_pi_squared")))
    needed = {field: getattr(inputs(), field) for field in NEEDS.get(name, ())}
    result = ESTIMATORS[name](replace(bare, **needed))
    assert result.per_token.shape == result.returns.shape == SAMPLE.row.shape
    assert result.per_token.dtype == result.returns.dtype == torch.float32
    assert result.per_token.abs().sum() > 0
    for field in needed:
        with pytest.raises(AssertionError, match=name.removeprefix("tir_")):
            ESTIMATORS[name](replace(bare, **needed | {field: None}))


@pytest.mark.parametrize("name", sorted(VERLS))
def test_a_row_without_a_reward_gets_zero_and_leaves_the_others_numbers(name):
    given = replace(inputs((1.0, NAN, 0.5, 0.0, 2.0)), valid=torch.tensor([True, False, True, True, True]))
    result = ESTIMATORS[name](given)
    assert torch.equal(result.per_token[SAMPLE.row == 1], torch.zeros(1))
    assert result.per_token.isfinite().all()


@pytest.mark.parametrize("name", sorted(VERLS - {"gae", "remax", "reinforce_plus_plus"}))
def test_equal_rewards_and_groups_of_one_give_exactly_zero(name):
    equal = replace(inputs((0.1,) * 5), token_rewards=token_level_rewards(torch.full((5,), 0.1), SAMPLE.row, SAMPLE.lengths))
    alone = replace(inputs(), group=torch.arange(5))
    per_token = ESTIMATORS[name](alone).per_token
    assert torch.equal(per_token, torch.zeros(10))
    if "optimal" not in name:  # whose longest row keeps its reward where it is alone
        assert torch.equal(ESTIMATORS[name](equal).per_token, torch.zeros(10))


def test_names_reach_their_functions():
    given = inputs()
    expected = grpo_advantages(given.rewards, given.group, given.valid, True)[SAMPLE.row]
    assert torch.equal(ESTIMATORS["grpo"](given).per_token, expected)
    raw = ESTIMATORS["grpo"](replace(given, normalize_by_std=False))
    assert torch.equal(raw.per_token, grpo_advantages(given.rewards, given.group, given.valid, False)[SAMPLE.row])
    normalized = ESTIMATORS["rloo"](replace(given, normalize_advantages=True))
    expected = rloo_advantages(given.rewards, given.group, given.valid, normalize=True)[SAMPLE.row]
    assert torch.equal(normalized.per_token, expected)
    expected = opo_advantages(given.rewards, given.group, given.valid, SAMPLE.lengths)[SAMPLE.row]
    assert torch.equal(ESTIMATORS["opo"](given).per_token, expected)
    expected = gae_advantages(given.token_rewards, given.values, SAMPLE.row, SAMPLE.lengths, given.valid, 0.9, 0.8)
    result = ESTIMATORS["gae"](given)
    assert torch.equal(result.per_token, expected[0])
    assert torch.equal(result.returns, expected[1])
