import os

import pytest

from verl_memopt.config.values import choices
from verl_memopt.rewards.runner import MANAGERS, num_processes


def test_every_manager_of_the_settings_is_there() -> None:
    assert set(MANAGERS) == set(choices()["reward_model.reward_manager"])


@pytest.mark.parametrize("manager", ["naive", "batch", "dapo"])
def test_a_manager_has_the_processes_that_are_asked_for(manager: str) -> None:
    assert [num_processes(manager, number) for number in (1, 3)] == [1, 3]


def test_a_student_scores_without_reward_processes() -> None:
    assert num_processes("rlt", 3) == 0


def test_prime_uses_every_core() -> None:
    cores = min(64, len(os.sched_getaffinity(0)))
    assert [num_processes("prime", number) for number in (1, cores + 5)] == [cores, cores + 5]
