import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.algorithms.kl import PF_PPO_METHODS, overlong_penalty, pf_ppo_weights, resample_rows

NAN = float("nan")


@given(st.lists(st.integers(0, 120), min_size=1), st.integers(1, 100), st.sampled_from([0.5, 1.0, 2.0]))
def test_the_penalty_follows_the_three_cases_of_the_paper(lengths, buffer, factor):
    expected = []
    for length in lengths:
        if length <= 100 - buffer:
            expected.append(0.0)
        elif length <= 100:
            expected.append(((100 - buffer) - length) / buffer * factor)
        else:
            expected.append(-factor)
    penalty = overlong_penalty(torch.tensor(lengths), 100, buffer, factor)
    assert penalty.tolist() == pytest.approx(expected, rel=1e-6)


def test_weights_of_each_method_by_hand():
    scores, valid = torch.tensor([-2.0, 1.0, 3.0, NAN, 3.0]), torch.tensor([True, True, True, False, True])
    expected = {"pow": [4.0, 1.0, 9.0, 0.0, 9.0], "max_min": [1.0, 0.0, 1.0, 0.0, 1.0], "max_random": [0.1, 0.1, 0.4, 0.0, 0.4]}
    for method in PF_PPO_METHODS:
        assert pf_ppo_weights(scores, valid, method, 2.0).tolist() == pytest.approx(expected[method], abs=2e-8)


@pytest.mark.parametrize("method", PF_PPO_METHODS)
@pytest.mark.parametrize("score", [0.0, 0.1])
def test_equal_scores_are_drawn_alike(method, score):
    weights = pf_ppo_weights(torch.full((4,), score), torch.ones(4, dtype=torch.bool), method, 2.0)
    assert weights.unique().numel() == 1
    assert weights[0] > 0


def test_rows_are_drawn_in_proportion_to_their_weights_and_never_without_one():
    weights = torch.tensor([3.0, 0.0, 1.0] * 1000, dtype=torch.float64)
    drawn = resample_rows(weights, torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn % 3, minlength=3)
    assert drawn.shape == (3000,)
    assert counts[1] == 0
    assert counts[0].item() == pytest.approx(2250, abs=4 * (3000 * 0.75 * 0.25) ** 0.5)
    assert torch.equal(drawn, resample_rows(weights, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("method", PF_PPO_METHODS)
def test_no_rows_have_no_weights(method):
    assert pf_ppo_weights(torch.zeros(0), torch.zeros(0, dtype=torch.bool), method, 2.0).shape == (0,)


def test_a_buffer_of_no_length_is_no_buffer():
    with pytest.raises(AssertionError, match=r"\(100, 0\)|\(0, 100\)"):
        overlong_penalty(torch.tensor([50]), 100, 0, 1.0)
