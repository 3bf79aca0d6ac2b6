"""The least a run must be told, and ways to say more."""

import pytest

from verl_memopt.config.keys import value_at
from verl_memopt.config.loader import settings_from_mapping
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
OVERRIDES = [f"{key}={'null' if value is None else str(value).lower()}" for key, value in LEAST.items()]
"""The same as words of a command."""


@pytest.fixture
def least():
    return dict(LEAST)


@pytest.fixture
def settled():
    return lambda more: settings_from_mapping(LEAST | more)


@pytest.fixture
def complaint(settled):
    """Return the error for the minimal keys and some more."""

    def message(more):
        with pytest.raises(ConfigError) as caught:
            settled(more)
        return str(caught.value)

    return message


@pytest.fixture
def assert_limit(settled, complaint):
    """Check that a key accepts the values within a limit, and that an error names it for those beyond."""

    def check(others, key, within, beyond):
        for value in within:
            assert value_at(settled(others | {key: value}), key) == value
        for value in beyond:
            assert key in complaint(others | {key: value})

    return check
