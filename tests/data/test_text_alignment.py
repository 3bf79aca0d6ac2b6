"""Responses in the tokens of another tokenizer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.data.text_alignment import Retold, encoded_ends, matching, text_ends
from verl_memopt.model.tiny import build_tokenizer


@pytest.fixture(scope="module")
def policy():
    return build_tokenizer(320)


@pytest.fixture(scope="module")
def teacher():
    """Bytes and merges of other strings, with other numbers."""
    return build_tokenizer(330, "naïve naïve — the sums of the sums ∑∑ 中中文 " * 4, "{{ messages[0].content }}>")


@given(text=st.text(max_size=20))
def test_tokens_end_where_their_text_ends(policy, teacher, text):
    for tokenizer in (policy, teacher):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        read, ends = text_ends(tokenizer, ids)
        assert read == tokenizer.decode(ids) == text
        assert ends == sorted(ends)
        assert len(ends) == len(ids)
        again, own = encoded_ends(tokenizer, text)
        assert again == ids
        assert own[-1:] == ends[-1:] == [len(text)][: len(ids)]


@given(ids=st.lists(st.integers(3, 319), min_size=1, max_size=20))
def test_runs_have_the_same_text_and_cover_all_tokens(policy, teacher, ids):
    """Whatever is sampled, bytes that are no characters included."""
    retold = Retold(policy, teacher, [1], ids)
    places = [0, 0]
    for own, theirs in retold.runs:
        assert [own.start, theirs.start] == places
        places = [own.stop, theirs.stop]
        assert own.start < own.stop
        assert theirs.start < theirs.stop
    assert places == [len(ids), len(retold.ids)]


def test_runs_are_as_short_as_the_text_allows():
    assert list(matching([1, 2, 3, 6], [2, 3, 4, 6])) == [
        (slice(0, 2), slice(0, 1)), (slice(2, 3), slice(1, 2)), (slice(3, 4), slice(2, 4)),
    ]  # fmt: skip
    # Tokens without text of their own belong to what comes before them.
    assert list(matching([1, 1, 2], [1, 2, 2])) == [(slice(0, 2), slice(0, 1)), (slice(2, 3), slice(1, 3))]


def test_the_token_that_ends_a_turn_stands_for_that_of_the_teacher(policy, teacher):
    ids = [*policy("the sums", add_special_tokens=False).input_ids, policy.eos_token_id]
    retold = Retold(policy, teacher, [policy.eos_token_id], ids)
    assert teacher.decode(retold.ids[:-1]) == "the sums"
    assert retold.ids[-1] == teacher.eos_token_id
    assert retold.runs[-1] == (slice(len(ids) - 1, len(ids)), slice(len(retold.ids) - 1, len(retold.ids)))
    assert Retold(policy, teacher, [policy.eos_token_id], []).ids == []
    assert Retold(policy, teacher, [policy.eos_token_id], ids[-1:]).ids == [teacher.eos_token_id]


def test_tokens_of_a_run_have_its_estimate_and_share_it(policy, teacher):
    ids = policy("xx the sums of", add_special_tokens=False).input_ids
    retold = Retold(policy, teacher, [], ids)
    assert max(own.stop - own.start for own, _ in retold.runs) > 1
    draw = torch.Generator().manual_seed(0)
    one, other = -torch.rand(len(ids), generator=draw), -torch.rand(len(retold.ids), generator=draw)
    found, shares = retold.in_runs(one, other)
    estimate = one - found
    for own, theirs in retold.runs:
        torch.testing.assert_close(estimate[own], (one[own].sum() - other[theirs].sum()).expand(own.stop - own.start))
    torch.testing.assert_close((estimate * shares).sum(), one.sum() - other.sum())
