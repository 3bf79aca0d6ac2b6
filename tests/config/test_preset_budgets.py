"""Token budgets of profiles make room for the longest sample; those of the user stay as they are."""

import logging

import pytest

from verl_memopt.config.loader import BUDGETS, load_settings, with_room_for_samples
from verl_memopt.errors import ConfigError

ACTOR, LOG_PROBS, CRITIC = BUDGETS
LONG = {"data.max_prompt_length": 2048, "data.max_response_length": 4096}


def test_budgets_of_a_preset_become_the_longest_sample_and_others_stay(caplog) -> None:
    budgets = {ACTOR: 4096, LOG_PROBS: 8192, CRITIC: 512}
    with caplog.at_level(logging.WARNING):
        values = with_room_for_samples({**LONG, **budgets}, {ACTOR, LOG_PROBS, CRITIC, "data.seed"})
    assert values == {**LONG, ACTOR: 6144, LOG_PROBS: 8192, CRITIC: 6144}
    assert "budget of 512 tokens is raised to 6144" in caplog.text
    assert with_room_for_samples({**LONG, **budgets}, {CRITIC}) == {**LONG, **budgets, CRITIC: 6144}
    assert with_room_for_samples({**LONG, **budgets}, frozenset()) == {**LONG, **budgets}


def test_a_budget_for_a_critic_alone_is_raised_without_a_word(caplog) -> None:
    """A profile sets it in runs without a critic too."""
    with_room_for_samples({**LONG, CRITIC: 512}, {CRITIC})
    assert caplog.messages == []


def test_lengths_that_are_no_numbers_are_left_to_their_own_error() -> None:
    values = {"data.max_prompt_length": "long", ACTOR: 8}
    assert with_room_for_samples(values, {ACTOR}) == values


def test_default_lengths_count_where_none_are_set() -> None:
    assert with_room_for_samples({ACTOR: 1000}, {ACTOR}) == {ACTOR: 1024}


def test_a_profile_serves_long_samples_and_a_small_budget_of_the_user_is_refused() -> None:
    files = ["data.train_files=train.jsonl", "data.val_files=null", "actor_rollout_ref.model.path=folder", "memory=12g"]
    lengths = [f"{key}={value}" for key, value in LONG.items()]
    actor = load_settings("rloo_trainer", [*files, *lengths]).actor_rollout_ref.actor
    assert actor.ppo_max_token_len_per_gpu == 6144
    with pytest.raises(ConfigError, match=f"{ACTOR}=4096: a sample may have 6144 tokens"):
        load_settings("rloo_trainer", [*files, *lengths, f"{ACTOR}=4096"])
