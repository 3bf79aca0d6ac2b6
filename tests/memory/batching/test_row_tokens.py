import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.errors import ConfigError
from verl_memopt.memory.token_packing import RowTokens, chains, pack_groups_under

TOKENS = RowTokens(prompts=(10, 10, 10, 4, 0), answers=(3, 4, 5, 6, 0), groups=(0, 0, 0, 1, 1))


def test_a_group_costs_its_prompt_once_and_every_answer():
    assert TOKENS.cost([0, 1, 2]) == 10 + 3 + 4 + 5
    assert TOKENS.cost([0, 3, 4]) == 10 + 3 + 4 + 6
    assert TOKENS.cost([4]) == 0
    assert TOKENS.each() == [13, 14, 15, 10, 0]


def test_rows_that_share_nothing_cost_their_sum():
    assert RowTokens.alone([7, 8]).cost([0, 1]) == 15


def test_groups_stay_whole_where_the_budget_allows():
    assert sorted(pack_groups_under(TOKENS, 22, "abcde")) == [[0, 1, 2], [3, 4]]
    assert pack_groups_under(TOKENS, 32, "abcde") == [[0, 1, 2, 3, 4]]


def test_a_group_over_the_budget_is_cut_and_each_part_pays_the_prompt():
    bins = pack_groups_under(TOKENS, 18, "abcde")
    assert sorted(bins) == [[0, 2], [1], [3, 4]]


def test_parts_of_a_group_that_one_prompt_is_kept_to_stay_neighbours():
    tokens = RowTokens(prompts=(10,) * 6, answers=(4, 4, 4, 5, 5, 3), groups=(0, 0, 0, 1, 1, 2))
    assert pack_groups_under(tokens, 18, "abcdef") == [[5], [0, 1], [2], [3], [4]]


def test_a_row_over_the_budget_is_named():
    with pytest.raises(ConfigError, match=r"ppo_max_token_len_per_gpu=14: c has 15 tokens.*Raise it to at least 15"):
        pack_groups_under(TOKENS, 14, "abcde")


FAMILY = RowTokens(prompts=(10, 10), answers=(3, 5), groups=(0, 0))


def test_a_group_that_fills_the_budget_to_the_last_token_stays_whole_and_one_token_more_is_cut():
    assert pack_groups_under(FAMILY, 18, "ab") == [[0, 1]]
    assert sorted(pack_groups_under(FAMILY, 17, "ab")) == [[0], [1]]


def test_the_longest_row_of_a_group_may_fill_the_budget_and_one_token_more_is_refused():
    assert sorted(pack_groups_under(FAMILY, 15, "ab")) == [[0], [1]]
    with pytest.raises(ConfigError, match=r"=14: b has 15 tokens.*Raise it to at least 15"):
        pack_groups_under(FAMILY, 14, "ab")


def test_a_row_without_others_of_its_group_may_fill_the_budget_and_one_token_more_is_refused():
    tokens = RowTokens(prompts=(10, 2), answers=(5, 1), groups=(0, 1))
    assert sorted(pack_groups_under(tokens, 15, "ab")) == [[0], [1]]
    with pytest.raises(ConfigError, match=r"=14: a has 15 tokens"):
        pack_groups_under(tokens, 14, "ab")


def test_answers_of_one_token_to_a_prompt_as_long_as_the_budget_fit_together():
    tokens = RowTokens(prompts=(10, 10), answers=(0, 0), groups=(0, 0))
    assert pack_groups_under(tokens, 10, "ab") == [[0, 1]]


@given(st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 20), min_size=1, max_size=6)), min_size=1, max_size=8))
def test_no_micro_batch_computes_more_than_the_budget_and_every_row_is_in_one(groups):
    rows = [(prompt, answer, number) for number, (prompt, answers) in enumerate(groups) for answer in answers]
    tokens = RowTokens(*(tuple(part) for part in zip(*rows, strict=True)))
    bins = pack_groups_under(tokens, 50, [str(row) for row in range(len(rows))])
    assert sorted(row for members in bins for row in members) == list(range(len(rows)))
    assert all(tokens.cost(members) <= 50 for members in bins)


def test_only_answers_beside_another_of_their_group_are_suffixes():
    assert TOKENS.suffixes([0, 1, 3]) == 3 + 4
    assert TOKENS.suffixes([0, 3]) == 0
    assert TOKENS.suffixes([]) == 0


def test_neighbours_of_one_group_no_longer_than_the_prompt_are_a_chain():
    tokens = RowTokens(prompts=(10,) * 10, answers=(5, 5, 11, 2, 0) * 2, groups=(0,) * 5 + (1,) * 5)
    assert chains([[0, 1], [3, 4], [5, 6], [8]], tokens) == [[[0, 1], [3, 4]], [[5, 6], [8]]]
    assert chains([[0, 1], [2], [3]], tokens) == [[[0, 1]], [[2]], [[3]]]  # 11 are more than the prompt's 10
    assert chains([[0, 5], [1, 6]], tokens) == [[[0, 5]], [[1, 6]]]
    assert chains([[0], [4], [1]], tokens) == [[[0]], [[4]], [[1]]]  # nothing to compute for an answer of one token


def test_rows_that_compute_their_own_prompts_are_no_chain():
    assert chains([[0], [1]], RowTokens(prompts=(10, 10), answers=(5, 5), groups=(0, 1))) == [[[0]], [[1]]]
