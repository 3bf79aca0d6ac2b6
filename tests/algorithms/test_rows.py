import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from tests.algorithms.ragged import Ragged, ragged
from verl_memopt.algorithms.rows import dense_ids, is_last, positions, reverse_scan


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


def test_scans_run_without_tokens_and_on_fake_tensors():
    nothing = torch.zeros(0, dtype=torch.int64)
    assert reverse_scan(torch.zeros(0), nothing, 0.9).shape == (0,)
    with FakeTensorMode():
        assert reverse_scan(torch.zeros(6), torch.zeros(6, dtype=torch.int64), 0.9).shape == (6,)
