import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.modes import OF_REWARDS
from tests.algorithms.ragged import ragged
from verl_memopt.algorithms.estimators import (
    check_rewards,
    gdpo_advantages,
    gpg_advantages,
    group_counts,
    group_statistics,
    grpo_advantages,
    grpo_passk_advantages,
    has_high_entropy,
    has_signal,
    opo_advantages,
    rloo_advantages,
)
from verl_memopt.errors import RewardError

NAN = float("nan")


def naive_rloo(rewards, groups, valid):
    """Leave-one-out row by row: the reward minus the mean of the other valid rewards of the group."""
    result = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i and groups[j] == groups[i] and valid[j]]
        result.append(reward - sum(others) / len(others) if valid[i] and others else 0.0)
    return result


def naive_normalized(advantages, valid):
    """(A - mean) / (std + 1e-4) over the valid rows of the batch; 0 where fewer than two of them or none differ."""
    known = [advantage for advantage, counts in zip(advantages, valid, strict=True) if counts]
    if len(known) < 2 or len(set(known)) == 1:
        return [0.0] * len(advantages)
    mean, std = statistics.fmean(known), statistics.stdev(known)
    return [(advantage - mean) / (std + 1e-4) if counts else 0.0 for advantage, counts in zip(advantages, valid, strict=True)]


def naive_grpo(rewards, groups, valid, by_std):
    result = []
    for i, reward in enumerate(rewards):
        members = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and valid[j]]
        if not valid[i] or len(set(members)) < 2:
            result.append(0.0)
        else:
            scale = statistics.stdev(members) + 1e-6 if by_std else 1.0
            result.append((reward - statistics.fmean(members)) / scale)
    return result


def naive_passk(rewards, groups, valid, by_std):
    """Sorts each group: the first gets its lead over the second."""
    result = [0.0] * len(rewards)
    for name in set(groups):
        members = sorted((i for i, group in enumerate(groups) if group == name and valid[i]), key=lambda i: -rewards[i])
        if len(members) > 1 and rewards[members[0]] > rewards[members[1]]:
            scale = statistics.stdev(rewards[i] for i in members) + 1e-6 if by_std else 1.0
            result[members[0]] = (rewards[members[0]] - rewards[members[1]]) / scale
    return result


def lone(rewards, groups, valid, advantages):
    """Puts the reward itself where a valid row is its whole group."""
    alone = [valid[i] and groups.count(groups[i]) == 1 for i in range(len(rewards))]
    return [rewards[i] if alone[i] else value for i, value in enumerate(advantages)]


def naive_gpg(rewards, groups, valid):
    centred = lone(rewards, groups, valid, naive_grpo(rewards, groups, valid, by_std=False))
    scored = sum(reward != 0 for reward, counts in zip(rewards, valid, strict=True) if counts)
    return [sum(valid) / max(scored, 1) * value for value in centred]


def naive_opo(rewards, groups, valid, lengths):
    result = []
    for i, reward in enumerate(rewards):
        members = [j for j in range(len(rewards)) if groups[j] == groups[i] and valid[j]]
        if valid[i] and groups.count(groups[i]) == 1:
            result.append(reward)
            continue
        if not valid[i] or len({rewards[j] for j in members}) < 2:
            result.append(0.0)
            continue
        tokens = sum(lengths[j] for j in members)
        result.append(reward - (sum(lengths[j] * rewards[j] for j in members) / tokens if tokens else 0.0))
    return result


def tensors(rewards, groups, valid=None):
    valid = [not math.isnan(reward) for reward in rewards] if valid is None else valid
    return torch.tensor(rewards), torch.tensor(groups), torch.tensor(valid, dtype=torch.bool)


rows = st.lists(
    st.tuples(st.sampled_from([-3.0, 0.0, 0.25, 0.5, 1.0]), st.sampled_from([-7, 0, 3, 2**40]), st.booleans()),
    min_size=1,
    max_size=24,
)


@given(rows)
def test_advantages_equal_the_row_by_row_definitions_for_any_order_of_rows_and_any_group_ids(rows):
    rewards, groups, valid = (list(column) for column in zip(*rows, strict=True))
    arguments = tensors(rewards, groups, valid)
    left_out = lone(rewards, groups, valid, naive_rloo(rewards, groups, valid))
    relative = [naive_grpo(rewards, groups, valid, by_std=by_std) for by_std in (True, False)]
    for ours, naive in [
        (rloo_advantages(*arguments), left_out),
        (grpo_advantages(*arguments), lone([reward / (1 + 1e-6) for reward in rewards], groups, valid, relative[0])),
        (grpo_advantages(*arguments, normalize_by_std=False), lone(rewards, groups, valid, relative[1])),
        (grpo_passk_advantages(*arguments), naive_passk(rewards, groups, valid, by_std=True)),
        (grpo_passk_advantages(*arguments, normalize_by_std=False), naive_passk(rewards, groups, valid, by_std=False)),
        (gpg_advantages(*arguments), naive_gpg(rewards, groups, valid)),
    ]:
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, torch.tensor(naive), rtol=1e-6, atol=1e-6)


@given(ragged())
def test_opo_equals_the_reward_minus_the_length_weighted_mean(sample):
    rewards, groups, valid = sample.rows(0), sample.groups(1), sample.rows(2, (0.0, 1.0, 1.0)).bool()
    expected = naive_opo(rewards.tolist(), groups.tolist(), valid.tolist(), list(sample.sizes))
    advantages = opo_advantages(rewards.float(), groups, valid, sample.lengths)
    torch.testing.assert_close(advantages, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_opo_of_equal_rewards_and_of_one_valid_member_of_several_is_exactly_zero():
    rewards, groups, valid = tensors([0.1, 0.1, 0.1, 7.0, NAN, 3.0], [0, 0, 0, 1, 2, 2])
    advantages = opo_advantages(rewards, groups, valid, torch.tensor([3, 1, 7, 2, 5, 5]))
    assert advantages.tolist() == [0.0, 0.0, 0.0, 7.0, 0.0, 0.0]


@pytest.mark.parametrize("by_std", [True, False])
def test_gdpo_whitens_over_tokens_the_weighted_sum_of_each_rewards_group_advantages(by_std):
    rewards = [[1.0, 0.2], [0.0, 0.4], [1.0, 0.9], [0.0, 0.9], [5.0, 5.0], [2.0, -1.0]]
    groups, valid, lengths, weights = [0, 0, 7, 7, 7, 3], [True, True, True, True, False, True], [3, 1, 2, 4, 2, 5], [0.5, 2.0]
    sums = [0.0] * 6
    for reward, weight in enumerate(weights):
        column = [row[reward] for row in rewards]
        each = lone(column, groups, valid, naive_grpo(column, groups, valid, by_std=by_std))
        sums = [total + weight * one for total, one in zip(sums, each, strict=True)]
    tokens = [(sums[row], valid[row]) for row, length in enumerate(lengths) for _ in range(length)]
    known = [value for value, counts in tokens if counts]
    mean, scale = statistics.fmean(known), math.sqrt(statistics.variance(known) + 1e-8)
    expected = [(value - mean) / scale if counts else 0.0 for value, counts in tokens]
    row = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
    given = torch.tensor(rewards), torch.tensor(groups), torch.tensor(valid), row
    assert gdpo_advantages(*given, by_std, weights).tolist() == pytest.approx(expected, abs=1e-5)
    assert gdpo_advantages(*given).tolist() == gdpo_advantages(*given, True, weights=[1.0, 1.0]).tolist()
    assert gdpo_advantages(*given, by_std).tolist() == gdpo_advantages(*given, by_std, weights=[1.0, 1.0]).tolist()


def test_a_reward_that_does_not_apply_to_a_row_adds_nothing_to_it_and_counts_in_no_group_of_gdpo():
    rewards = [[1.0, NAN], [0.0, 0.5], [0.5, 0.9], [NAN, NAN]]
    given = torch.tensor(rewards), torch.zeros(4, dtype=torch.long), torch.tensor([True, True, True, False]), torch.arange(4)
    first = naive_grpo([1.0, 0.0, 0.5], [0] * 3, [True] * 3, by_std=True)
    second = naive_grpo([0.5, 0.9], [0] * 2, [True] * 2, by_std=True)
    sums = [first[0], first[1] + second[0], first[2] + second[1]]
    mean, scale = statistics.fmean(sums), statistics.stdev(sums) + 1e-4  # over rows, as TRL's normalize_then_sum
    expected = [*((each - mean) / scale for each in sums), 0.0]
    assert gdpo_advantages(*given, whiten_over="rows").tolist() == pytest.approx(expected, abs=1e-5)


def test_gdpo_keeps_its_digits_where_rewards_cancel():
    # Each reward alone is of the size of 1 after its group's normalisation, and their weighted sum is of the size of 1e-4.
    first = [0.1, 0.7, 0.2, 0.9, 0.4, 0.3]
    rewards = [[one, 1.0 - one * (1 + place * 1e-4)] for place, one in enumerate(first)]
    groups, valid = [0, 0, 0, 4, 4, 4], [True] * 6
    given = torch.tensor(rewards)
    sums = [0.0] * 6
    for column in given.double().T.tolist():
        sums = [total + one for total, one in zip(sums, naive_grpo(column, groups, valid, by_std=True), strict=True)]
    mean, scale = statistics.fmean(sums), math.sqrt(statistics.variance(sums) + 1e-8)
    expected = [(each - mean) / scale for each in sums]
    found = gdpo_advantages(given, torch.tensor(groups), torch.tensor(valid), torch.arange(6)).tolist()
    assert found == pytest.approx(expected, abs=2e-6)
    assert max(map(abs, expected)) > 0.4


def test_the_deviation_of_the_whole_step_and_what_is_added_to_it_may_be_chosen():
    rewards, groups, valid = [1.0, 0.0, 0.5, 0.4, 3.0, 7.0], [0, 0, 4, 4, 4, 0], [True] * 5 + [False]
    means = {0: 0.5, 4: 1.3}
    scale = statistics.stdev(rewards[:5]) + 1e-4
    expected = [(reward - means[group]) / scale for reward, group in zip(rewards[:5], groups[:5], strict=True)] + [0.0]
    given = torch.tensor(rewards), torch.tensor(groups), torch.tensor(valid)
    assert grpo_advantages(*given, True, 1e-4, "batch").tolist() == pytest.approx(expected, rel=1e-6)
    pair, share = (torch.tensor([1.0, 0.0]), torch.tensor([3, 3]), torch.tensor([True, True])), 0.5 / (math.sqrt(0.5) + 0.5)
    assert grpo_advantages(*pair, True, 0.5).tolist() == pytest.approx([share, -share])


def test_gdpo_may_be_whitened_over_rows_as_trl_does():
    rewards, groups, weights = [[1.0, 0.2], [0.0, 0.4], [1.0, 0.9], [0.5, 0.8]], [0, 0, 7, 7], [0.5, 2.0]
    sums = [0.0] * 4
    for column, weight in zip(zip(*rewards, strict=True), weights, strict=True):
        for at in range(4):
            members = [column[other] for other in range(4) if groups[other] == groups[at]]
            sums[at] += weight * (column[at] - statistics.fmean(members)) / (statistics.stdev(members) + 1e-4)
    expected = [(each - statistics.fmean(sums)) / (statistics.stdev(sums) + 1e-4) for each in sums]
    row = torch.tensor([0, 0, 0, 1, 2, 3, 3])
    given = torch.tensor(rewards), torch.tensor(groups), torch.ones(4, dtype=torch.bool), row
    found = gdpo_advantages(*given, True, weights, 1e-4, "rows")
    assert found.tolist() == pytest.approx([expected[at] for at in row], rel=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.45, 0.8])
def test_the_tokens_of_high_entropy_are_those_at_the_quantile_or_above_it(share):
    entropy = torch.rand(23, generator=torch.Generator().manual_seed(2))
    entropy[3] = entropy[11]
    kept = torch.arange(23) % 4 != 1
    found = has_high_entropy(entropy, kept, share)
    assert torch.equal(found, (entropy >= torch.quantile(entropy[kept], 1 - share)) & kept)
    assert torch.equal(has_high_entropy(entropy, None, share), entropy >= torch.quantile(entropy, 1 - share))
    assert found.any()
    assert has_high_entropy(entropy, torch.zeros(23, dtype=torch.bool), share).sum() == 0


def test_gpg_counts_the_rows_whose_reward_is_not_0_as_verl():
    # alpha = 8 / 5, and 0.75 or -0.25 above the mean; by the paper alpha = 8 / 4.
    given = tensors([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0], [0] * 4 + [1] * 4)
    assert gpg_advantages(*given).tolist() == pytest.approx([1.2, -0.4, -0.4, -0.4, 0, 0, 0, 0])
    assert gpg_advantages(*given, counts="informative").tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0])


@given(rows)
def test_single_responses_are_normalized_over_the_step(rows):
    rewards, _, valid = (list(column) for column in zip(*rows, strict=True))
    normalized = rloo_advantages(torch.tensor(rewards), torch.arange(len(rewards)), torch.tensor(valid), normalize=True)
    torch.testing.assert_close(normalized, torch.tensor(naive_normalized(rewards, valid)), rtol=1e-6, atol=1e-6)


def test_normalized_advantages_of_equal_rewards_are_exactly_zero_beside_groups_that_differ():
    rewards, groups, valid = tensors([0.1, 0.1, 0.1, 1.0, 0.3, 7.0, NAN, NAN, 2.0], [0, 0, 0, 1, 1, 2, 2, 3, 3])
    advantages = rloo_advantages(rewards, groups, valid, normalize=True)
    assert [place for place, advantage in enumerate(advantages.tolist()) if advantage != 0.0] == [3, 4]
    # Seven valid rows of 0 but for 0.7 and -0.7: the variance is 2 * 0.49 / 6.
    assert advantages[3].item() == pytest.approx(0.7 / (math.sqrt(0.98 / 6) + 1e-4), rel=1e-6)


@pytest.mark.parametrize("name", OF_REWARDS)
def test_equal_rewards_that_do_not_sum_exactly_give_exactly_zero(name):
    assert torch.equal(OF_REWARDS[name](*tensors([0.1] * 3 + [1 / 3] * 7, [0] * 3 + [1] * 7)), torch.zeros(10))


@pytest.mark.parametrize("name", sorted(OF_REWARDS.keys() - {"gpg"}))  # whose factor counts the rows of the whole batch
def test_a_group_with_one_valid_member_gets_zero_and_an_invalid_row_changes_no_other(name):
    alone = OF_REWARDS[name](*tensors([5.0, NAN, 1.0, 0.0], [0, 0, 1, 1]))
    assert torch.equal(alone[:2], torch.zeros(2))
    with_invalid = OF_REWARDS[name](*tensors([1.0, 0.0, NAN], [1, 1, 1]))
    assert torch.equal(with_invalid, torch.cat([alone[2:], torch.zeros(1)]))


@pytest.mark.parametrize("reward", [math.inf, -math.inf])
def test_an_infinite_reward_is_an_error_that_names_its_row_and_nan_makes_a_row_invalid(reward):
    with pytest.raises(RewardError, match=r"train\.jsonl:2: the reward is -?inf"):
        check_rewards(torch.tensor([0.0, reward]), ["train.jsonl:1", "train.jsonl:2"])
    assert check_rewards(torch.tensor([0.0, NAN, -1.0]), ["a", "b", "c"]).tolist() == [True, False, True]


def test_groups_that_teach_nothing_are_counted_by_their_reason():
    counts = group_counts(*tensors([1.0, 1.0, 0.0, 1.0, NAN, 3.0, NAN, NAN], [0, 0, 1, 1, 2, 2, 3, 3]))
    assert counts == {"invalid_rows": 3.0, "single_valid_groups": 1.0, "equal_groups_share": 0.75}
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
