import inspect
from dataclasses import fields, replace

import pytest
import torch

from tests.algorithms.ragged import Ragged
from verl_memopt.algorithms.estimators import (
    AdvantageInputs,
    estimate,
    gae_advantages,
    grpo_advantages,
    opo_advantages,
    optimal_token_baseline_advantages,
    rloo_advantages,
)
from verl_memopt.algorithms.kl import token_level_rewards
from verl_memopt.algorithms.records import CUSTOM, DISTILL, ESTIMATORS, SFT, STATISTICS, load, with_input, with_option
from verl_memopt.config.schema import Algorithm

NAN = float("nan")
SAMPLE = Ragged((3, 1, 4, 2, 0), 7)
VERLS = {
    "gae", "gdpo", "grpo", "grpo_passk", "gpg", "opo", "optimal_token_baseline", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "remax", "rloo", "tir_optimal_token_baseline",
}  # fmt: skip


def inputs(rewards=(1.0, 0.0, 0.5, 0.0, 2.0)):
    scores, valid = torch.tensor(rewards), torch.tensor([True] * 5)
    return AdvantageInputs(
        scores, torch.tensor([0, 0, 1, 1, 1]), valid, SAMPLE.row, SAMPLE.lengths,
        token_rewards=token_level_rewards(scores, SAMPLE.row, SAMPLE.lengths),
        values=SAMPLE.tokens(0).float(), baselines=torch.full((5,), 0.25), old_log_probs=-SAMPLE.tokens(1).abs().float(),
        statistics={"sum_pi_squared": torch.full((10,), 0.5)}, components=torch.stack([scores, -scores.square()], 1),
    )  # fmt: skip


def estimated(name, given, **options):
    return estimate(given, Algorithm(adv_estimator=name, **{"gamma": 0.9, "lam": 0.8, **options}))


def test_every_estimator_of_verl_for_one_reward_has_its_record():
    assert ESTIMATORS.keys() == VERLS | {CUSTOM, DISTILL, SFT}


@pytest.mark.parametrize(
    "record", [record for record in ESTIMATORS.values() if record.name != CUSTOM], ids=lambda each: each.name
)
def test_a_record_names_the_parameters_of_its_function_and_where_each_comes_from(record):
    parameters = inspect.signature(load(record.function)).parameters
    assert {*record.inputs, *record.options} <= parameters.keys()
    assert {name for name, each in parameters.items() if each.default is each.empty} <= {*record.inputs, *record.options}
    assert set(record.inputs) <= {field.name for field in fields(AdvantageInputs)} | STATISTICS.keys()
    assert set(record.options.values()) <= {field.name for field in fields(Algorithm)}


def test_an_input_and_a_key_are_found_with_the_estimators_and_losses_that_read_them():
    assert with_input("values") == ("gae",)
    assert with_input("baselines") == ("remax",)
    assert set(with_input("components")) == {"gdpo"}
    assert set(with_option("norm_adv_by_std_in_grpo")) == {"grpo", "grpo_passk", "gdpo"}
    assert set(with_option("tau_pos")) == {"sapo"}
    assert with_option("lr") == ()


def test_an_input_that_is_not_there_is_named():
    with pytest.raises(AssertionError, match=r"^gae needs token_rewards, values$"):
        estimated("gae", replace(inputs(), token_rewards=None, values=None))


def test_every_token_of_a_demonstration_has_the_advantage_1():
    assert torch.equal(estimated("sft", inputs())[0], torch.ones(10))


@pytest.mark.parametrize("name", sorted(VERLS))
def test_an_estimator_gives_one_number_a_token_from_the_inputs_it_names(name):
    costly = ("values", "baselines", "old_log_probs", "components")
    bare = replace(inputs(), statistics={}, **dict.fromkeys(costly))
    needed = {field: getattr(inputs(), field) for field in ESTIMATORS[name].inputs if field in costly}
    statistics = {field: inputs().statistics[field] for field in ESTIMATORS[name].inputs if field in STATISTICS}
    result = estimated(name, replace(bare, statistics=statistics, **needed))
    assert result[0].shape == result[1].shape == SAMPLE.row.shape
    assert result[0].dtype == result[1].dtype == torch.float32
    assert result[0].abs().sum() > 0
    for field in needed.keys() | {"token_rewards"} & set(ESTIMATORS[name].inputs):
        with pytest.raises(AssertionError, match=f"^{name} needs {field}"):
            estimated(name, replace(bare, statistics=statistics, **needed | {field: None}))
    if statistics:
        with pytest.raises(AssertionError, match=f"^{name} needs sum_pi_squared"):
            estimated(name, replace(bare, **needed))


@pytest.mark.parametrize("name", sorted(VERLS))
def test_a_row_without_a_reward_gets_zero_and_leaves_the_others_numbers(name):
    given = replace(inputs((1.0, NAN, 0.5, 0.0, 2.0)), valid=torch.tensor([True, False, True, True, True]))
    result = estimated(name, given)
    assert torch.equal(result[0][SAMPLE.row == 1], torch.zeros(1))
    assert result[0].isfinite().all()


@pytest.mark.parametrize("name", sorted(VERLS - {"gae", "remax", "reinforce_plus_plus"}))
def test_equal_rewards_and_groups_of_one_give_exactly_zero(name):
    equal = replace(inputs((0.1,) * 5), token_rewards=token_level_rewards(torch.full((5,), 0.1), SAMPLE.row, SAMPLE.lengths))
    alone = replace(inputs(), group=torch.arange(5))
    if not ESTIMATORS[name].alone:  # which take the reward itself
        assert torch.equal(estimated(name, alone)[0], torch.zeros(10))
    if "optimal" not in name:  # whose longest row keeps its reward where it is alone
        assert torch.equal(estimated(name, equal)[0], torch.zeros(10))


def test_names_reach_their_functions():
    given = inputs()
    expected = grpo_advantages(given.rewards, given.group, given.valid, True)[SAMPLE.row]
    assert torch.equal(estimated("grpo", given)[0], expected)
    raw = estimated("grpo", given, norm_adv_by_std_in_grpo=False)
    assert torch.equal(raw[0], grpo_advantages(given.rewards, given.group, given.valid, False)[SAMPLE.row])
    normalized = estimated("rloo", given, normalize_advantages=True)
    expected = rloo_advantages(given.rewards, given.group, given.valid, normalize=True)[SAMPLE.row]
    assert torch.equal(normalized[0], expected)
    expected = opo_advantages(given.rewards, given.group, given.valid, SAMPLE.lengths)[SAMPLE.row]
    assert torch.equal(estimated("opo", given)[0], expected)
    expected = gae_advantages(given.token_rewards, given.values, SAMPLE.row, SAMPLE.lengths, given.valid, 0.9, 0.8)
    result = estimated("gae", given)
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1], expected[1])


def test_a_step_of_single_samples_takes_the_reward_itself_where_a_group_would_give_the_baseline():
    once = replace(inputs(), group=torch.arange(5), valid=torch.tensor([True, True, False, True, True]))
    assert {name for name in ESTIMATORS if ESTIMATORS[name].alone} == {
        "rloo", "grpo", "gdpo", "opo", "gpg", "reinforce_plus_plus_baseline",
    }  # fmt: skip
    rewards = torch.where(once.valid, once.rewards, 0.0)[SAMPLE.row]
    for name in ("rloo", "grpo", "opo"):
        assert torch.equal(estimated(name, once, norm_adv_by_std_in_grpo=False)[0], rewards)
    torch.testing.assert_close(estimated("grpo", once)[0], rewards / (1 + 1e-6))
    one_pair = replace(once, group=torch.tensor([0, 1, 2, 3, 3]))
    assert torch.equal(estimated("rloo", one_pair)[0][SAMPLE.row < 3], rewards[SAMPLE.row < 3])


def test_importance_weights_reach_the_token_baseline():
    given, weights = inputs(), torch.linspace(0.2, 2.0, 10)
    result = estimated("optimal_token_baseline", replace(given, weights=weights))
    expected = optimal_token_baseline_advantages(
        given.token_rewards, given.group, given.valid, SAMPLE.row, given.old_log_probs, given.statistics["sum_pi_squared"],
        weights,
    )  # fmt: skip
    assert torch.equal(result[0], expected[0])
    assert not torch.equal(result[0], estimated("optimal_token_baseline", given)[0])
