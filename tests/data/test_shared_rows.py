"""Rows with shared storage: the same answers as rows that each have their own, and fewer bytes."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.data.batch import Ragged, SharedRows, prompt_rows

PROMPTS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=4)


def shared_and_own(prompts, n):
    shared = prompt_rows([ids for ids in prompts for _ in range(n)])
    own = prompt_rows([list(ids) for ids in prompts for _ in range(n)])
    assert isinstance(own, Ragged)
    return shared, own


def assert_same(shared, own):
    assert torch.equal(shared.flat, own.flat)
    assert torch.equal(shared.lengths, own.lengths)
    assert (shared.sizes(), shared.num_rows) == (own.sizes(), own.num_rows)


@given(PROMPTS, st.integers(1, 4), st.data())
def test_shared_rows_answer_as_rows_of_their_own(prompts, n, data):
    shared, own = shared_and_own(prompts, n)
    assert_same(shared, own)
    chosen = data.draw(st.lists(st.integers(0, own.num_rows - 1), min_size=1, max_size=9))
    assert_same(shared.select(chosen), own.select(chosen))
    again = data.draw(st.lists(st.integers(0, len(chosen) - 1), min_size=1, max_size=5))
    assert_same(shared.select(chosen).select(again), own.select(chosen).select(again))


def test_a_selection_holds_the_prompts_of_its_rows_alone():
    shared, _ = shared_and_own([[1, 2], [3], [4, 5, 6]], 2)
    assert shared.select([5, 4]).stored.flat.tolist() == [4, 5, 6]
    assert shared.select([5, 0]).stored.flat.tolist() == [1, 2, 4, 5, 6]


def num_bytes(rows):
    tensors = [rows.flat, rows.lengths] if isinstance(rows, Ragged) else [rows.stored.flat, rows.stored.lengths, rows.index]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize(("k", "kib"), [(2, 24), (4, 71), (8, 165)])
def test_a_prompt_of_3015_tokens_is_held_once_in_place_of_k_times(k, kib):
    shared, own = shared_and_own([list(range(3015))], k)
    assert own.flat.nbytes - shared.stored.flat.nbytes == (k - 1) * 3015 * 8
    assert num_bytes(own) - num_bytes(shared) == (k - 1) * 3015 * 8 - 8
    assert round((k - 1) * 3015 * 8 / 1024) == kib


def test_the_bytes_saved_follow_the_formula_for_several_prompts_of_unequal_lengths():
    prompts = [[1] * 5, [2] * 700, [3] * 80]
    shared, own = shared_and_own(prompts, 4)
    assert num_bytes(own) - num_bytes(shared) == sum((4 - 1) * len(ids) * 8 - 8 for ids in prompts)


def test_a_process_that_gets_shared_rows_gets_each_prompt_once():
    shared, own = shared_and_own([list(range(3015))], 8)
    sent = pickle.dumps(shared)
    assert_same(pickle.loads(sent), own)
    assert len(pickle.dumps(own)) - len(sent) >= 7 * 3015 * 8 - 2048  # a few names and shapes more
    lists, copies = [list(range(3015))] * 8, [list(range(3015)) for _ in range(8)]
    assert 7 * len(pickle.dumps(lists)) < len(pickle.dumps(copies))


def test_rows_are_shared_by_identity_and_not_by_value():
    assert isinstance(prompt_rows([[1, 2], [1, 2]]), Ragged)
    one = [1, 2]
    assert isinstance(prompt_rows([one, one]), SharedRows)


def test_no_rows_are_plain_rows():
    empty = prompt_rows([])
    assert isinstance(empty, Ragged)
    assert (empty.num_rows, empty.flat.dtype) == (0, torch.int64)
