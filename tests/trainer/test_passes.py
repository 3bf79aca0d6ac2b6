from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.conftest import AR
from verl_memopt.errors import ConfigError
from verl_memopt.memory.token_packing import RowTokens
from verl_memopt.trainer.micro_batching import (
    Budget,
    budgets,
    cut_ranks,
    mini_batch_rows,
    rows_per_rank,
    uneven_shares,
    update_gives_old_log_probs,
    updates_per_step,
)

BY_TOKENS = Budget(True, 10, None, "some.key")
BY_ROWS = Budget(False, 0, 2, "some.key")
alone = RowTokens.alone


def test_uneven_shares_hold_every_row_once_and_groups_whole():
    tokens = RowTokens((5,) * 7, (1, 2, 3, 4, 5, 6, 7), (0, 0, 1, 1, 2, 2, 3))
    shares = uneven_shares(tokens, 2)
    assert sorted(chain.from_iterable(shares)) == list(range(7))
    owners = {
        group: {rank for rank, share in enumerate(shares) for row in share if tokens.groups[row] == group} for group in range(4)
    }
    assert {len(ranks) for ranks in owners.values()} == {1}
    costs = [tokens.select(share).cost(range(len(share))) for share in shares]
    assert max(costs) - min(costs) <= 16
    assert uneven_shares(tokens, 1) == [list(range(7))]


def test_ranks_without_a_row_have_an_empty_share_and_a_group_is_cut_only_for_want_of_groups():
    assert sorted(map(len, uneven_shares(alone([3, 4]), 4))) == [0, 0, 1, 1]
    assert uneven_shares(alone([]), 2) == [[], []]
    shares = uneven_shares(RowTokens((5,) * 6, (2,) * 6, (0,) * 6), 4)
    assert sorted(map(len, shares)) == [1, 1, 2, 2]
    lengths = alone([9, 0, 0, 0, 0])
    assert sorted(map(len, uneven_shares(lengths, 2))) == [1, 4]


def test_mini_batches_are_whole_groups_in_order_or_in_that_of_a_seed():
    assert mini_batch_rows(4, 3, 2, None) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    plain, shuffled = mini_batch_rows(16, 3, 4, None), mini_batch_rows(16, 3, 4, 1)
    assert shuffled != plain
    assert sorted(chain.from_iterable(shuffled)) == sorted(chain.from_iterable(plain))
    for rows in shuffled:
        assert all(rows[i : i + 3] == [rows[i], rows[i] + 1, rows[i] + 2] and rows[i] % 3 == 0 for i in range(0, 12, 3))
    assert mini_batch_rows(16, 1, 4, 1) == mini_batch_rows(16, 1, 4, 1)
    assert mini_batch_rows(16, 1, 4, 1) != mini_batch_rows(16, 1, 4, 2)


def test_rows_are_dealt_as_they_stand_unless_balancing_evens_out_their_tokens():
    assert rows_per_rank(alone([1, 2, 3]), [2, 0], 1, True) == [[2, 0]]
    assert rows_per_rank(alone([9, 1, 1, 1]), [3, 2, 1, 0], 2, False) == [[3, 2], [1, 0]]
    tokens = [9, 7, 1, 1]
    shares = rows_per_rank(alone(tokens), range(4), 2, True)
    assert sorted(sum(tokens[row] for row in rows) for rows in shares) == [8, 10]
    assert [len(rows) for rows in shares] == [2, 2]
    tokens = [100, 5, 100, 1, 1, 5]
    shares = rows_per_rank(alone(tokens), [1, 3, 4, 5], 2, True)
    assert sorted(chain.from_iterable(shares)) == [1, 3, 4, 5]
    assert [sum(tokens[row] for row in rows) for rows in shares] == [6, 6]


@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_every_row_is_on_one_rank_and_all_ranks_have_as_many(data, world, share, even_out):
    rows = data.draw(st.permutations(range(world * share)))
    tokens = data.draw(st.lists(st.integers(0, 50), min_size=world * share, max_size=world * share))
    shares = rows_per_rank(alone(tokens), rows, world, even_out)
    assert sorted(chain.from_iterable(shares)) == sorted(rows)
    assert {len(each) for each in shares} == {share}


def test_a_share_that_does_not_come_out_even_is_a_broken_invariant():
    with pytest.raises(AssertionError):
        rows_per_rank(alone([1, 1, 1]), range(3), 2, False)


def test_a_token_budget_is_a_hard_cap_that_a_row_may_fill_and_a_row_budget_cuts_by_count():
    assert BY_TOKENS.micro_batches(alone([6, 5, 4, 5]), "abcd") == [[0, 2], [1, 3]]
    assert BY_TOKENS.micro_batches(alone([10, 10]), "ab") == [[0], [1]]
    with pytest.raises(ConfigError, match=r"some\.key=10: b has 11 tokens"):
        BY_TOKENS.micro_batches(alone([10, 11]), "ab")
    assert BY_ROWS.micro_batches(alone([60, 1, 1]), "abc") == [[0, 1], [2]]


def test_every_rank_runs_as_many_micro_batches_as_the_busiest_if_need_be_empty_ones():
    cut = cut_ranks([alone([10, 10, 10]), alone([2, 2, 1])], ["abc", "def"], BY_TOKENS)
    assert [len(bins) for bins in cut] == [3, 3]
    assert [sorted(chain.from_iterable(bins)) for bins in cut] == [[0, 1, 2], [0, 1, 2]]
    assert cut_ranks([alone([10, 10]), alone([3])], ["ab", "c"], BY_TOKENS) == [[[0], [1]], [[0], []]]


GROUPS = RowTokens(prompts=(5,) * 8, answers=(1, 2, 3, 4, 1, 1, 1, 9), groups=(0, 0, 0, 0, 1, 1, 1, 1))


def test_groups_stay_whole_where_they_can_and_ranks_are_balanced_by_what_is_computed():
    assert sorted(rows_per_rank(GROUPS, range(8), 2, True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    shares = rows_per_rank(GROUPS, range(8), 4, True)
    assert sorted(shares) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    tokens = RowTokens(prompts=(90, 90, 50, 50, 10, 10, 20, 20), answers=(10, 0) * 4, groups=(0, 0, 1, 1, 2, 2, 3, 3))
    # Computed: 100, 60, 20 and 30 with one prompt a group; evenly dealt, 120 and 90.
    assert sorted(rows_per_rank(tokens, range(8), 2, True)) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_scoring_passes_follow_the_actors_budget_unless_they_have_their_own(settled):
    update, old, reference = budgets(settled().actor_rollout_ref)
    assert (update.by_tokens, update.max_tokens, update.rows) == (True, 40, None)
    assert (old.by_tokens, old.max_tokens, old.rows) == (True, 40, None)
    assert (reference.by_tokens, reference.max_tokens, reference.rows) == (True, 40, None)
    more = {
        f"{AR}.rollout.log_prob_max_token_len_per_gpu": 50,
        f"{AR}.ref.log_prob_use_dynamic_bsz": False,
        f"{AR}.ref.log_prob_micro_batch_size_per_gpu": 3,
    }
    update, old, reference = budgets(settled(more).actor_rollout_ref)
    assert (update.max_tokens, old.max_tokens) == (40, 50)
    assert (reference.by_tokens, reference.rows) == (False, 3)


@pytest.mark.parametrize(
    ("which", "key"),
    [
        (0, f"{AR}.actor.ppo_max_token_len_per_gpu"),
        (1, f"{AR}.rollout.log_prob_max_token_len_per_gpu"),
        (2, f"{AR}.ref.log_prob_max_token_len_per_gpu"),
    ],
)
def test_a_row_over_a_budget_is_told_under_the_key_of_its_pass(settled, which, key):
    with pytest.raises(ConfigError, match=f"{key}=40: rows:7 has 41 tokens"):
        budgets(settled().actor_rollout_ref)[which].micro_batches(RowTokens.alone([41]), ["rows:7"])


@pytest.mark.parametrize(
    ("more", "left_out"),
    [
        ({}, True),
        ({f"{AR}.actor.old_log_prob_pass": "always"}, False),
        ({f"{AR}.actor.ppo_epochs": 2}, False),
        ({f"{AR}.actor.ppo_mini_batch_size": 1}, False),
        ({"algorithm.use_kl_in_reward": True}, False),
        ({f"{AR}.actor.calculate_entropy": True}, False),
        ({f"{AR}.actor.use_kl_loss": True}, True),
        ({f"{AR}.actor.policy_loss.loss_mode": "cispo"}, True),
        ({f"{AR}.actor.policy_loss.loss_mode": "clip_cov"}, False),
        ({f"{AR}.actor.policy_loss.loss_mode": "kl_cov"}, False),
        ({"algorithm.rollout_correction.rollout_is": "token"}, False),
        ({"algorithm.rollout_correction.preset": "decoupled_k3_rs"}, False),
        ({"algorithm.rollout_correction.preset": "bypass_pg_is"}, True),
        ({"algorithm.use_pf_ppo": True}, False),
        ({"algorithm.adv_estimator": "remax"}, True),
        ({"algorithm.adv_estimator": "optimal_token_baseline", f"{AR}.actor.calculate_sum_pi_squared": True}, False),
    ],
)
def test_the_old_pass_is_left_out_where_one_update_follows_a_rollout_and_nothing_else_reads_it(settled, more, left_out):
    batch = settled().data.train_batch_size
    values = {f"{AR}.actor.old_log_prob_pass": "auto", f"{AR}.actor.ppo_mini_batch_size": batch, **more}
    settings = settled(values)
    found = update_gives_old_log_probs(settings.actor_rollout_ref.actor, batch, settings.algorithm)
    assert found is left_out


@pytest.mark.parametrize(("mini", "epochs", "updates"), [(4, 1, 1), (2, 1, 2), (2, 3, 6)])
def test_a_step_has_one_update_per_mini_batch_and_pass(mini, epochs, updates):
    assert updates_per_step(4, mini, epochs) == updates
