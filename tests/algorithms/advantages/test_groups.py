import math

import pytest
import torch
from hypothesis import given

from tests.algorithms.advantages.test_outcome import NAN, rows, tensors
from verl_memopt.algorithms.estimators import check_rewards, group_counts, group_statistics, has_signal
from verl_memopt.errors import RewardError


@pytest.mark.parametrize("reward", [math.inf, -math.inf])
def test_an_infinite_reward_is_an_error_that_names_its_row(reward):
    with pytest.raises(RewardError, match=r"train\.jsonl:2: the reward is -?inf"):
        check_rewards(torch.tensor([0.0, reward]), ["train.jsonl:1", "train.jsonl:2"])


def test_a_nan_reward_makes_its_row_invalid():
    assert check_rewards(torch.tensor([0.0, NAN, -1.0]), ["a", "b", "c"]).tolist() == [True, False, True]


def test_groups_that_teach_nothing_are_counted_by_their_reason():
    counts = group_counts(*tensors([1.0, 1.0, 0.0, 1.0, NAN, 3.0, NAN, NAN], [0, 0, 1, 1, 2, 2, 3, 3]))
    assert counts == {"invalid_rows": 3.0, "single_valid_groups": 1.0, "equal_groups_share": 0.75}


def test_no_rows_have_no_equal_groups():
    nothing = torch.zeros(0)
    assert group_counts(nothing, nothing.long(), nothing.bool())["equal_groups_share"] == 0.0


def test_a_single_valid_member_is_its_groups_mean_and_has_no_deviation():
    stats = group_statistics(*tensors([5.0, NAN], [0, 0]))
    assert (stats.count.tolist(), stats.mean.tolist(), stats.std.tolist()) == ([1, 1], [5, 5], [0, 0])
    assert stats.informative.tolist() == [False, False]


@given(rows)
def test_a_group_is_kept_if_two_of_its_members_differ_or_if_it_was_sampled_once(rows):
    rewards, groups, valid = (list(column) for column in zip(*rows, strict=True))
    expected = []
    for i, group in enumerate(groups):
        members = [j for j in range(len(groups)) if groups[j] == group]
        differ = len({rewards[j] for j in members if valid[j]}) > 1
        expected.append(differ or (len(members) == 1 and valid[i]))
    assert has_signal(*tensors(rewards, groups, valid)).tolist() == expected
