import re

import pytest

from verl_memopt.config.builder import FOREIGN, hint
from verl_memopt.config.keys import leaf_keys


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
