import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.ragged import Ragged, ragged
from tests.tensors import row_of_each_token
from verl_memopt.algorithms.kl import PF_PPO_METHODS, overlong_penalty, pf_ppo_weights
from verl_memopt.algorithms.rows import (
    LOSS_AGG_MODES,
    GlobalCounts,
    aggregate,
    dense_ids,
    is_last,
    positions,
    reverse_scan,
    row_means,
    row_sums,
)


@given(ragged())
def test_places_count_from_the_start_of_each_row_and_the_last_is_the_last(sample):
    assert positions(sample.row, sample.lengths).tolist() == [place for size in sample.sizes for place in range(size)]
    assert is_last(sample.row, sample.lengths).tolist() == [p == size - 1 for size in sample.sizes for p in range(size)]


def naive_scan(rows, decay):
    """Walks each row from its end."""
    result = []
    for row in rows:
        sums, running = [], 0.0
        for value in reversed(row):
            running = value + decay * running
            sums.append(running)
        result += reversed(sums)
    return result


@given(ragged(longest=40), st.sampled_from([0.0, 0.5, 0.95, 0.999, 1.0]))
def test_a_scan_by_doubling_equals_a_walk_from_the_end(sample, decay):
    values = sample.tokens(0)
    expected = torch.tensor(naive_scan(sample.lists(values), decay), dtype=torch.float64)
    torch.testing.assert_close(reverse_scan(values, sample.row, decay), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("decay", [0.9, 1.0])
def test_a_scan_of_a_thousand_rows_equals_a_walk(decay):
    sample = Ragged(tuple((37 * i) % 211 for i in range(1000)), 5)
    values = sample.tokens(0)
    expected = torch.tensor(naive_scan(sample.lists(values), decay), dtype=torch.float64)
    torch.testing.assert_close(reverse_scan(values, sample.row, decay), expected, rtol=1e-12, atol=1e-12)


@given(st.lists(st.sampled_from([-5, 0, 3, 2**40]), min_size=1, max_size=30))
def test_ids_are_equal_where_keys_are_equal_and_dense(keys):
    ids = dense_ids(torch.tensor(keys)).tolist()
    assert set(ids) == set(range(len(set(keys))))
    assert len(set(zip(keys, ids, strict=True))) == len(set(keys))


def test_scans_run_without_tokens():
    assert reverse_scan(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0.9).shape == (0,)


LENGTHS = [3, 0, 5, 1, 2]
SCALE = 7


def naive_loss(rows, mode):
    """Each mode from its name, over padded-free lists of token losses."""
    if mode == "token-mean":
        tokens = [loss for row in rows for loss in row]
        return sum(tokens) / len(tokens)
    if mode == "token-sum":
        return sum(map(sum, rows))
    per_row = [sum(row) / (len(row) or 1) if mode == "seq-mean-token-mean" else sum(row) for row in rows]
    return sum(per_row) / len(rows) / (SCALE if mode == "seq-mean-token-sum-norm" else 1)


def random_rows():
    values = torch.randn(sum(LENGTHS), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return values, list(values.split(LENGTHS))


def shares(rows, bins, mode, counts):
    for indices in bins:
        lengths = torch.tensor([LENGTHS[i] for i in indices])
        values = torch.cat([rows[i] for i in indices])
        yield aggregate(values, row_of_each_token(lengths, len(values)), lengths, mode, counts, SCALE)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_shares_of_micro_batches_sum_to_the_naive_loss_of_the_whole_batch(mode):
    _, rows = random_rows()
    counts = GlobalCounts(tokens=sum(LENGTHS), sequences=len(LENGTHS))
    expected = naive_loss([row.tolist() for row in rows], mode)
    for bins in ([[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[2, 1], [4, 0, 3]]):
        assert sum(shares(rows, bins, mode, counts)).item() == pytest.approx(expected, rel=1e-14)


def test_row_sums_and_means_give_an_empty_row_zero():
    values, rows = random_rows()
    lengths = torch.tensor(LENGTHS)
    row = row_of_each_token(lengths, len(values))
    torch.testing.assert_close(row_sums(values, row, 5), torch.stack([r.sum() for r in rows]), rtol=0, atol=1e-15)
    assert row_means(values, row, lengths)[1] == 0
    assert row_means(values, row, lengths)[2].item() == pytest.approx(rows[2].mean().item(), rel=1e-14)


def test_an_empty_micro_batch_contributes_zero():
    empty = torch.zeros(0)
    nothing = torch.zeros(0, dtype=torch.long)
    for mode in LOSS_AGG_MODES:
        assert aggregate(empty, nothing, nothing, mode, GlobalCounts(4, 2), SCALE).item() == 0


def test_a_sum_norm_without_a_scale_factor_names_the_setting_it_needs():
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"^seq-mean-token-sum-norm needs actor\.loss_scale_factor"):
        aggregate(torch.ones(1), one - 1, one, "seq-mean-token-sum-norm", GlobalCounts(1, 1), None)


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


@pytest.mark.parametrize("method", PF_PPO_METHODS)
def test_no_rows_have_no_weights(method):
    assert pf_ppo_weights(torch.zeros(0), torch.zeros(0, dtype=torch.bool), method, 2.0).shape == (0,)


def test_a_buffer_of_no_length_is_no_buffer():
    with pytest.raises(AssertionError, match=r"\(100, 0\)|\(0, 100\)"):
        overlong_penalty(torch.tensor([50]), 100, 0, 1.0)
