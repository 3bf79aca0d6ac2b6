import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.memory.quantized_frozen_torch import FORMATS
from verl_memopt.recipes.rlt.rank_check import ACCEPTED, rank_correlation, spearman

KEY = "reward_model.model.quantization"


def naive_spearman(one, other):
    """Pearson's correlation of mean ranks, with the ranks from sorting."""

    def ranks(values):
        ordered = sorted(values)
        places = {value: [i for i, each in enumerate(ordered) if each == value] for value in values}
        return [sum(places[value]) / len(places[value]) for value in values]

    a, b = ranks(one), ranks(other)
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    top = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return top / math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))


def test_orders_by_hand():
    rising = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert spearman(rising, torch.tensor([-5.0, 0.0, 0.1, 99.0])) == pytest.approx(1.0)
    assert spearman(rising, -rising) == pytest.approx(-1.0)
    # One pair of neighbours swapped: 1 - 6 x 2 / (4 x 15).
    assert spearman(rising, torch.tensor([1.0, 3.0, 2.0, 4.0])) == pytest.approx(0.8)
    assert math.isnan(spearman(rising, torch.ones(4)))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_ties_share_their_mean_rank(pairs):
    one, other = ([float(pair[place]) for pair in pairs] for place in (0, 1))
    result = spearman(torch.tensor(one), torch.tensor(other))
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert math.isnan(result)
    else:
        assert result == pytest.approx(naive_spearman(one, other), abs=1e-9)


def test_groups_count_alike_whatever_their_size_and_their_mean():
    exact = torch.tensor([0.0, 1.0, 2.0, 3.0, 100.0, 101.0])
    rewards = torch.tensor([0.0, 1.0, 2.0, 3.0, 101.0, 100.0])
    agreement = rank_correlation(rewards, exact, [0, 0, 0, 0, 1, 1])
    assert (agreement.mean, agreement.lowest, agreement.num_groups) == (0.0, -1.0, 2)


def test_rows_without_a_reward_and_groups_without_an_order_are_left_out():
    exact = torch.tensor([0.0, 1.0, 2.0, 5.0, 5.0, 7.0])
    rewards = torch.tensor([0.0, math.nan, 2.0, 1.0, 2.0, 3.0])
    agreement = rank_correlation(rewards, exact, [0, 0, 0, 1, 1, 2])
    assert (agreement.mean, agreement.num_groups) == (1.0, 1)
    nothing = rank_correlation(rewards, exact, list(range(6)))
    assert nothing.num_groups == 0
    assert nothing.warning("nf4", KEY) is None


def test_a_low_agreement_is_warned_of_with_the_way_out():
    rewards = torch.tensor([1.0, 3.0, 2.0, 4.0])
    agreement = rank_correlation(rewards, torch.tensor([1.0, 2.0, 3.0, 4.0]), [0] * 4)
    text = agreement.warning("nf4", KEY)
    assert text.startswith(f"{KEY}=nf4: ")
    assert "0.800 only (mean over 1 groups; 0.95 is expected)" in text
    assert text.endswith(f"Set {KEY}=int8 or none.")
    assert agreement.warning("int8", KEY).endswith(f"Set {KEY}=none.")
    assert rank_correlation(rewards, rewards, [0] * 4).warning("int8", KEY) is None


def test_each_quantisation_has_its_bound():
    assert ACCEPTED.keys() == FORMATS.keys()
