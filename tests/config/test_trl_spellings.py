"""The table of TRL's names: every key exists, every text names keys that exist."""

import re

import pytest

from verl_memopt.config.builder import FOREIGN, hint
from verl_memopt.config.keys import leaf_keys
from verl_memopt.config.trl_names import ESTIMATORS, NO_EQUAL, ONE_SETTING, SPELLINGS

KEY = re.compile(r"\b(?:actor_rollout_ref|algorithm|data|trainer|custom_reward_function|reward_model)(?:\.\w+)+")


def test_every_name_stands_once_for_an_estimator():
    for estimator in ESTIMATORS:
        names = [name for row in SPELLINGS if estimator in row.estimators for name in row.names]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("row", SPELLINGS, ids=lambda row: row.names[0])
def test_a_row_sets_keys_that_exist(row):
    assert set(row.keys) <= set(leaf_keys())
    assert set(KEY.findall(row.note)) <= set(leaf_keys())
    assert row.estimators
    assert set(row.estimators) <= set(ESTIMATORS)


@pytest.mark.parametrize("name", NO_EQUAL)
def test_a_reason_names_keys_that_exist(name):
    assert set(KEY.findall(NO_EQUAL[name].reason)) <= set(leaf_keys())


def test_names_of_one_setting_are_names_that_are_read():
    known = {name for row in SPELLINGS for name in row.names}
    assert {name for names in ONE_SETTING for name in names} == known


@pytest.mark.parametrize("name", FOREIGN)
def test_every_foreign_name_answers_with_keys_that_exist(name):
    named = re.findall(
        r"\b(?:actor_rollout_ref|algorithm|data|trainer|custom_reward_function|reward_model)(?:\.\w+)+", FOREIGN[name]
    )
    assert named
    assert set(named) <= set(leaf_keys())


def test_the_coefficients_of_rlt_are_keys_of_the_reward_model():
    assert hint("reward.kl_penalty_reward_coeff") == "Did you mean reward_model.rlt.kl_penalty_reward_coeff?"


def test_a_foreign_name_is_found_below_any_section():
    assert hint("algorithm.num_generations") == "Did you mean actor_rollout_ref.rollout.n?"
