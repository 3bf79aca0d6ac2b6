import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.data.batch import Ragged, token_index

ROWS = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=6)


def lists(ragged):
    return [row.tolist() for row in ragged.rows()]


@given(ROWS)
def test_rows_come_back_as_they_went_in(rows):
    assert lists(Ragged.from_rows(rows, torch.int64)) == rows


@given(ROWS, st.data())
def test_select_gives_the_chosen_rows_in_the_order_chosen(rows, data):
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if rows else []
    assert lists(Ragged.from_rows(rows, torch.int64).select(chosen)) == [rows[index] for index in chosen]


@given(ROWS, ROWS)
def test_join_gives_the_rows_of_both(first, second):
    parts = [Ragged.from_rows(rows, torch.int64) for rows in (first, second)]
    assert lists(Ragged.join(parts)) == first + second


def test_nothing_is_padded():
    ragged = Ragged.from_rows([[1], [2, 3, 4], []], torch.int64)
    assert ragged.flat.tolist() == [1, 2, 3, 4]
    assert ragged.num_rows == 3


def test_a_ragged_tensor_survives_pickling():
    ragged = pickle.loads(pickle.dumps(Ragged.from_rows([[1, 2], []], torch.int64)))
    assert lists(ragged) == [[1, 2], []]


def test_token_index_points_at_the_tokens_of_the_chosen_rows():
    assert token_index([2, 0, 3], [2, 0]).tolist() == [2, 3, 4, 0, 1]


def test_rows_get_the_dtype_that_was_asked_for():
    for rows in ([[1], [2]], [[]], [torch.tensor([1, 2]), torch.tensor([3.0])]):
        assert Ragged.from_rows(rows, torch.float64).flat.dtype == torch.float64
