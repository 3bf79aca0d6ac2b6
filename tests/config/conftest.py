"""The least a run must be told, and ways to say more."""

from collections.abc import Callable
from typing import Any

import pytest

from verl_memopt.config.keys import value_at
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Settings
from verl_memopt.errors import ConfigError

LEAST = {
    "data.train_files": "train.jsonl",
    "data.val_files": None,
    "actor_rollout_ref.model.path": "folder",
    "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "algorithm.adv_estimator": "rloo",
}


@pytest.fixture
def least() -> dict[str, Any]:
    return dict(LEAST)


@pytest.fixture
def settled() -> Callable[[dict[str, Any]], Settings]:
    """Settings from the least keys and some more."""
    return lambda more: settings_from_mapping(LEAST | more)


@pytest.fixture
def complaint(settled: Callable[[dict[str, Any]], Settings]) -> Callable[[dict[str, Any]], str]:
    """The message with which the least keys and some more are refused."""

    def message(more: dict[str, Any]) -> str:
        with pytest.raises(ConfigError) as caught:
            settled(more)
        return str(caught.value)

    return message


@pytest.fixture
def assert_limit(
    settled: Callable[[dict[str, Any]], Settings], complaint: Callable[[dict[str, Any]], str]
) -> Callable[[dict[str, Any], str, list[Any], list[Any]], None]:
    """Check that a key takes the values within a limit, and that those beyond are refused by its name."""

    def check(others: dict[str, Any], key: str, within: list[Any], beyond: list[Any]) -> None:
        for value in within:
            assert value_at(settled(others | {key: value}), key) == value
        for value in beyond:
            assert key in complaint(others | {key: value})

    return check
