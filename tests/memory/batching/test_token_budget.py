import itertools
import math
import pickle
import random
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_memopt.errors import ConfigError
from verl_memopt.memory.token_budget import GROWTH, HEAD_ROOM, LearnedBudget, PassFigures, budget_metrics
from verl_memopt.memory.token_packing import (
    FINEST,
    RowTokens,
    _best_fit_decreasing,
    _best_single_or_pair,
    _dearest_to_cheapest,
    _swap_once,
    _tight_fill,
    alike,
    balance,
    chains,
    lower_bound,
    pack,
    pack_fixed,
    pack_groups_under,
    spans,
    split_to_count,
)

row_lengths = st.lists(st.integers(1, 60), max_size=40)


def naive_lower_bound(lengths, budget):
    """The bound straight from its definition: exact fractions, one function and one threshold at a time."""
    shares = [Fraction(length, budget) for length in lengths]

    def rounded(share, k):
        return share if ((k + 1) * share).denominator == 1 else Fraction(math.floor((k + 1) * share), k)

    functions = [lambda share: share, *(partial(rounded, k=k) for k in range(1, FINEST + 1))]
    sums = [
        sum(0 if share < low else 1 if share > 1 - low else function(share) for share in shares)
        for function in functions
        for low in {Fraction(0), *(share for share in shares if share <= Fraction(1, 2))}
    ]
    return max(map(math.ceil, sums))


def fewest_bins(lengths, budget):
    """The optimum by trying every assignment of a few rows."""
    for count in range(len(lengths) + 1):
        for places in itertools.product(range(count), repeat=len(lengths)):
            loads = [0] * count
            for length, place in zip(lengths, places, strict=True):
                loads[place] += length
            if all(load <= budget for load in loads):
                return count
    return len(lengths)


@given(row_lengths, st.integers(60, 200), st.integers(1, 8))
def test_every_row_is_packed_once_and_no_bin_exceeds_the_cap(lengths, budget, at_least):
    bins = pack(lengths, budget, num_bins_at_least=at_least)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= budget for rows in bins)
    assert len(bins) >= at_least


@settings(max_examples=30)
@given(row_lengths, st.integers(60, 200))
def test_the_lower_bound_is_that_of_its_definition(lengths, budget):
    assert lower_bound(lengths, budget) == naive_lower_bound(lengths, budget)


@pytest.mark.parametrize(
    ("lengths", "budget", "bins"),
    [
        # Rows over a third of the budget are two a bin: their sum alone, and Martello and Toth's bound, would let 7 hold them.
        ([35] * 20, 100, 10),
        ([26] * 20, 100, 7),
        # Rows are counted up to 16 a bin: 16 of 101 tokens fit into 1,700, and 17 of 95, of which sums would put all in two.
        ([101] * 33, 1700, 3),
        ([95] * 35, 1700, 2),
        # Rows that leave no room for others count whole beside those that are counted.
        ([75] * 4 + [30] * 4, 100, 6),
        ([65] * 4 + [36] * 5, 100, 7),
        ([0, 0], 10, 0),
    ],
)
def test_the_lower_bound_counts_rows_by_how_many_fit_beside_each_other(lengths, budget, bins):
    assert lower_bound(lengths, budget) == bins


@settings(max_examples=30)
@given(st.lists(st.integers(1, 12), max_size=6), st.integers(12, 20))
def test_no_packing_beats_the_lower_bound(lengths, budget):
    assert lower_bound(lengths, budget) <= fewest_bins(lengths, budget)


@given(row_lengths, st.integers(60, 200))
def test_packing_needs_at_least_the_lower_bound_and_at_most_twice_a_perfect_fill(lengths, budget):
    bins = pack(lengths, budget, num_bins_at_least=0)
    assert lower_bound(lengths, budget) <= len(bins)
    # No two bins fit into one, so all but one are more than half full: fewer than twice the bins a perfect fill needs.
    assert len(bins) <= max(2 * math.ceil(sum(lengths) / budget), 1)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 12), max_size=6), st.integers(12, 20))
def test_packing_a_few_rows_needs_the_fewest_bins_possible(lengths, budget):
    assert len(pack(lengths, budget, num_bins_at_least=0)) == fewest_bins(lengths, budget)


LONGEST = 8192
ROW_LENGTHS = {
    "uniform": lambda rows, draw: [draw.randint(1, LONGEST) for _ in range(rows)],
    "log-normal": lambda rows, draw: [max(1, min(LONGEST, int(draw.lognormvariate(6.5, 0.8)))) for _ in range(rows)],
    "all equal": lambda rows, draw: [draw.randint(1, LONGEST)] * rows,
    "one giant": lambda rows, draw: [LONGEST, *(draw.randint(1, LONGEST // 16) for _ in range(rows - 1))],
}


@pytest.mark.parametrize("shape", ROW_LENGTHS)
def test_99_of_100_batches_need_at_most_one_bin_over_the_lower_bound(shape):
    draw = random.Random(shape)
    too_many = 0
    for _ in range(200):
        lengths = ROW_LENGTHS[shape](draw.randint(4, 512), draw)
        budget = int(max(lengths) * 16 ** draw.random())
        bins = pack(lengths, budget)
        assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
        assert max(sum(lengths[row] for row in rows) for rows in bins) <= budget
        too_many += len(bins) > lower_bound(lengths, budget) + 1
    assert too_many <= 2


def test_the_refinement_finds_a_perfect_packing_that_best_fit_decreasing_misses():
    # Best-fit-decreasing makes 4+4, 3+3+3, 3: three bins where 4+3+3 twice fills two.
    assert pack([4, 4, 3, 3, 3, 3], 10) == [[0, 2, 3], [1, 4, 5]]


def test_a_row_longer_than_the_cap_is_refused_with_the_key_the_row_its_length_and_the_smallest_budget():
    with pytest.raises(ConfigError) as refusal:
        pack([10, 700, 30], 512, names=["a", "train.jsonl:2", "c"], key="critic.ppo_max_token_len_per_gpu")
    message = str(refusal.value)
    assert message.startswith("critic.ppo_max_token_len_per_gpu=512: train.jsonl:2 has 700 tokens")
    assert "at least 700" in message


@pytest.mark.parametrize("budget", [1, 2, 512])
@pytest.mark.parametrize("others", [[], [1], [1, 1, 1]])
def test_a_row_one_token_over_the_cap_is_refused_wherever_it_stands(budget, others):
    for place in range(len(others) + 1):
        lengths = [*others[:place], budget + 1, *others[place:]]
        with pytest.raises(ConfigError, match=f"row {place} has {budget + 1} tokens.*Raise it to at least {budget + 1},"):
            pack(lengths, budget)
        lengths[place] = budget
        assert sorted(row for rows in pack(lengths, budget) for row in rows) == list(range(len(lengths)))


@pytest.mark.parametrize("budget", [12, 60])
def test_rows_that_fill_a_bin_to_the_last_token_share_it_and_one_token_more_needs_another(budget):
    assert len(pack([budget - 5, 5], budget)) == 1
    assert len(pack([budget - 4, 5], budget)) == 2
    assert lower_bound([budget - 5, 5], budget) == 1
    assert lower_bound([budget - 4, 5], budget) == 2


@pytest.mark.parametrize("packing", [_best_fit_decreasing, partial(_tight_fill, candidates=4, spread=False)])
def test_each_way_of_packing_alone_fills_a_bin_to_the_last_token_and_not_beyond(packing):
    assert len(packing([55, 5], 60)) == len(packing([50, 6, 4], 60)) == 1
    assert len(packing([56, 5], 60)) == len(packing([50, 6, 5], 60)) == 2


def test_bins_that_are_asked_for_are_empty_without_rows_and_else_split_off_by_tokens():
    assert pack([], 10, num_bins_at_least=0) == []
    assert pack([], 10, num_bins_at_least=2) == [[], []]
    assert pack([9, 1, 8, 2], 20, num_bins_at_least=2) == [[0, 1], [2, 3]]


def test_fixed_packing_cuts_consecutive_rows_and_leaves_the_rest_in_the_last_bin():
    assert pack_fixed(5, 2) == [[0, 1], [2, 3], [4]]
    assert pack_fixed(2, 1) == [[0], [1]]
    assert pack_fixed(0, 2) == []
    with pytest.raises(AssertionError):
        pack_fixed(2, 0)


@given(row_lengths, st.integers(0, 30))
def test_splitting_keeps_every_row_and_gives_exactly_the_count(lengths, more):
    bins = pack(lengths, 120, num_bins_at_least=0)
    split = split_to_count(bins, len(bins) + more, lengths)
    assert len(split) == len(bins) + more
    assert sorted(row for rows in split for row in rows) == list(range(len(lengths)))
    assert sum(not rows for rows in split) == max(0, len(split) - len(lengths))


@pytest.mark.parametrize(
    ("bins", "count", "lengths", "split"),
    [
        ([[0], [1, 2], [3, 4]], 4, [50, 10, 10, 10, 9], [[0], [1], [3, 4], [2]]),
        ([[0], [1, 2, 3]], 3, [1, 1, 1, 1], [[0], [1, 3], [2]]),
        ([[0]], 3, [50], [[0], [], []]),
        # Halves are even in tokens, 9 | 8, then 2 beside 8 and 1 beside 9, and none is empty.
        ([[0, 1, 2, 3]], 2, [9, 1, 8, 2], [[0, 1], [2, 3]]),
        ([[0, 1]], 2, [0, 0], [[0], [1]]),
        # The bin with the most tokens, whatever its number of rows; the halves of 40 tokens are larger than the bin of 10.
        ([[0, 1, 2], [3, 4]], 3, [1, 1, 1, 50, 40], [[0, 1, 2], [3], [4]]),
        ([[0, 1, 2, 3], [4, 5]], 4, [10, 10, 10, 10, 5, 5], [[0], [4, 5], [1, 3], [2]]),
    ],
)
def test_the_largest_bin_is_halved_first_and_single_rows_stay_whole(bins, count, lengths, split):
    assert split_to_count(bins, count, lengths) == split


@given(st.integers(1, 6), st.integers(0, 8), st.randoms(use_true_random=False))
def test_balanced_parts_hold_equal_numbers_of_rows_in_order(num_parts, rows_per_part, draw):
    costs = [draw.randint(1, 1000) for _ in range(num_parts * rows_per_part)]
    parts = balance(costs, num_parts)
    assert sorted(row for part in parts for row in part) == list(range(len(costs)))
    assert all(part == sorted(part) and len(part) == rows_per_part for part in parts)


def test_256_log_normal_rows_are_balanced_within_one_percent_over_8_ranks():
    draw = random.Random(1)
    costs = [draw.lognormvariate(6.5, 0.8) for _ in range(256)]
    totals = [sum(costs[row] for row in part) for part in balance(costs, 8)]
    assert max(totals) <= 1.01 * sum(totals) / 8


def test_two_long_rows_go_to_different_ranks():
    assert balance([100, 100, 1, 1], 2) == [[0, 2], [1, 3]]


def test_the_dearest_unit_goes_first_and_each_next_one_to_the_cheapest_part_with_a_place():
    assert _dearest_to_cheapest([5, 9, 1, 4], 2) == [[1, 2], [0, 3]]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6))
def test_a_swap_is_the_one_that_evens_out_two_parts_most(pairs):
    first, second = zip(*pairs, strict=True)
    weights, parts = [*first, *second], [list(range(len(first))), list(range(len(first), 2 * len(first)))]
    before = sum(first) - sum(second)
    best = min(abs(before - 2 * (one - other)) for one in first for other in second)
    assert _swap_once(weights, parts) == (best < abs(before))
    after = sum(weights[unit] for unit in parts[0]) - sum(weights[unit] for unit in parts[1])
    assert abs(after) == min(best, abs(before))


@given(st.lists(st.integers(1, 1000), min_size=12, max_size=12))
def test_no_swap_between_the_dearest_and_the_cheapest_part_would_help_any_more(costs):
    parts = sorted(balance(costs, 2), key=lambda part: sum(costs[row] for row in part))
    gap = sum(costs[row] for row in parts[1]) - sum(costs[row] for row in parts[0])
    assert all(abs(gap - 2 * (costs[one] - costs[other])) >= gap for one in parts[1] for other in parts[0])


@pytest.mark.parametrize("spread", [False, True])
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 40))
def test_a_bin_is_filled_by_the_best_of_all_singles_and_pairs_where_there_are_candidates_enough(spread, left, more):
    left, room = sorted(left), min(left) + more
    choices = [(one,) for one in range(len(left))] + [(one, two) for one in range(len(left)) for two in range(one)]
    found = _best_single_or_pair(left, room, 100, spread)
    assert found in choices
    assert sum(left[place] for place in found) == max(
        total for total in (sum(left[place] for place in choice) for choice in choices) if total <= room
    )


def test_a_single_row_is_taken_before_a_pair_of_the_same_size():
    assert _best_single_or_pair([2, 3, 5], 6, 100, False) == (2,)


def test_two_candidates_are_the_largest_or_spread_over_all_rows():
    left = [4, 20, 20, 21, 24, 24]
    assert _best_single_or_pair(left, 25, 2, False) == (5,)
    assert _best_single_or_pair(left, 25, 2, True) == (3, 0)
    assert _tight_fill([50, *left], 75, 2, True)[0] == [0, 4, 1]
    assert _tight_fill([50, *left], 75, 2, False)[0] == [0, 5]


def test_candidates_spread_over_all_rows_find_a_perfect_packing_that_the_largest_alone_miss():
    draw = random.Random(166)
    lengths = [draw.randint(1, 498) for _ in range(150)]
    assert min(len(_tight_fill(lengths, 997, candidates, False)) for candidates in (4, 16, 32, 64, 128, 256)) == 39
    assert len(pack(lengths, 997)) == lower_bound(lengths, 997) == 38


BUDGET = 1_000_000


def passes(budget, count, fixed, per_token, fill=lambda: 1.0, budget_bytes=BUDGET):
    """Runs passes whose peak is ``fixed + per_token x tokens`` and gives the cap after each."""
    caps = []
    for _ in range(count):
        fullest = max(int(budget.cap * fill()), 1)
        budget.learn(fullest, PassFigures(int(fixed + per_token * fullest), budget_bytes))
        caps.append(budget.cap)
    return caps


@pytest.mark.parametrize(
    ("cap", "fullest", "peak", "following"),
    [
        (1000, 1000, 800_000, int(1000 * 0.95 / 0.8)),
        (1000, 1000, 100_000, 1250),  # grows by a quarter at most
        (1000, 1000, 1_900_000, 500),
        (1000, 400, 100_000, 1000),  # micro-batches that are not full raise no cap
        (1000, 900, 100_000, 1125),
        (5000, 1000, BUDGET, 950),  # and a peak over the budget lowers it from what was computed
    ],
)
def test_the_next_cap_is_the_formula(cap, fullest, peak, following):
    budget = LearnedBudget(5000, cap=cap)
    budget.learn(fullest, PassFigures(peak, BUDGET))
    assert budget.cap == following
    assert (GROWTH, HEAD_ROOM) == (1.25, 0.95)


@pytest.mark.parametrize("fixed", [0, 300_000, 900_000])
@pytest.mark.parametrize("first", [100, 60_000])
def test_the_cap_approaches_the_budget_from_one_side(fixed, first):
    per_token = 20
    caps = passes(LearnedBudget(1_000_000, cap=first), 300, fixed, per_token)
    best = (HEAD_ROOM * BUDGET - fixed) / per_token
    assert caps[-1] == pytest.approx(best, rel=0.02)
    assert caps == sorted(caps, reverse=first > best)


def test_a_cap_that_has_settled_moves_by_less_than_a_tenth_under_noisy_batches():
    draw = random.Random(3)
    budget = LearnedBudget(1_000_000, cap=60_000)
    caps = passes(budget, 400, 300_000, 20, fill=lambda: draw.uniform(0.93, 1.0))
    settled = caps[100:]
    steps = [abs(after - before) / before for before, after in itertools.pairwise(settled)]
    assert max(steps) < 0.1
    assert (max(settled) - min(settled)) / max(settled) < 0.1


def test_the_maximum_is_the_first_cap_and_never_passed_and_a_long_row_has_room_up_to_it():
    assert LearnedBudget(4096).cap == 4096
    assert max(passes(LearnedBudget(5000, cap=1000), 50, 0, 1)) == 5000
    budget = LearnedBudget(5000, cap=1000)
    assert [budget.tokens(longest) for longest in (10, 3000, 9000)] == [1000, 3000, 5000]


def test_a_peak_that_is_not_of_the_micro_batches_lowers_the_cap_once():
    """The optimizer step has the peak, whatever the cap is."""
    budget = LearnedBudget(10_000)
    caps = []
    for _ in range(10):
        budget.learn(budget.cap, PassFigures(990_000, BUDGET))
        caps.append(budget.cap)
    assert set(caps) == {int(10_000 * 0.95 / 0.99)}


@pytest.mark.parametrize("figures", [PassFigures(), PassFigures(10, None), PassFigures(None, 10), PassFigures(0, 10)])
def test_without_a_measured_peak_and_a_limit_nothing_is_learned(figures):
    budget = LearnedBudget(5000, cap=1000)
    budget.learn(1000, figures)
    assert budget.cap == 1000


def test_an_error_lowers_the_cap_to_where_the_pass_went_on():
    budget = LearnedBudget(5000)
    budget.learn(5000, PassFigures(10, BUDGET, cap_after_error=1200, retries=2))
    assert budget.cap == 1200
    assert budget_metrics({"ref": budget}) == {"perf/token_budget/ref": 1200.0, "perf/token_budget/ref_retries": 2.0}
    assert budget_metrics({"ref": budget})["perf/token_budget/ref_retries"] == 0.0
    budget.learn(1200, PassFigures(10, BUDGET))
    assert budget.cap == 1500


def test_a_restored_budget_goes_on_alike():
    one = LearnedBudget(10_000)
    passes(one, 3, 0, 200)
    other = LearnedBudget(10_000)
    other.load_state_dict(one.state_dict())
    assert passes(other, 5, 990_000, 0) == passes(one, 5, 990_000, 0)
    lower = LearnedBudget(100)
    lower.load_state_dict(one.state_dict())
    assert lower.cap == 100


TOKENS = RowTokens(prompts=(10, 10, 10, 4, 0), answers=(3, 4, 5, 6, 0), groups=(0, 0, 0, 1, 1))


def test_rows_know_what_the_last_block_skips_and_how_many_sequences_they_are():
    assert TOKENS.skipped([0, 1, 2]) == 9  # all of the prompt but its last token
    assert TOKENS.skipped([0, 1, 2, 3, 4]) == 9 + 3
    assert TOKENS.skipped([4]) == 0
    assert RowTokens((2,), (15,), (0,)).skipped([0]) == 0  # one of 17 is too few
    assert [TOKENS.segments(rows) for rows in ([0], [0, 3], [0, 1], [0, 1, 2, 3])] == [1, 2, 3, 5]


FAMILY = RowTokens(prompts=(10, 10), answers=(3, 5), groups=(0, 0))
APART = RowTokens(prompts=(10, 2), answers=(5, 1), groups=(0, 1))


def test_a_group_costs_its_prompt_once_and_every_answer():
    assert TOKENS.cost([0, 1, 2]) == 10 + 3 + 4 + 5
    assert TOKENS.cost([0, 3, 4]) == 10 + 3 + 4 + 6
    assert TOKENS.cost([4]) == 0
    assert TOKENS.row_lengths() == [13, 14, 15, 10, 0]
    assert RowTokens.alone([7, 8]).cost([0, 1]) == 15


def test_only_answers_beside_another_of_their_group_are_suffixes():
    assert TOKENS.suffixes([0, 1, 3]) == 3 + 4
    assert TOKENS.suffixes([0, 3]) == 0
    assert TOKENS.suffixes([]) == 0


@pytest.mark.parametrize(
    ("tokens", "budget", "bins"),
    [
        (TOKENS, 22, [[0, 1, 2], [3, 4]]),
        (TOKENS, 32, [[0, 1, 2, 3, 4]]),
        (TOKENS, 18, [[0, 2], [1], [3, 4]]),  # a group over the budget is cut, and each part pays the prompt
        # A group may fill the budget to the last token, as may its longest row, or a row without others.
        (FAMILY, 18, [[0, 1]]),
        (FAMILY, 17, [[0], [1]]),
        (FAMILY, 15, [[0], [1]]),
        (APART, 15, [[0], [1]]),
        # Answers of one token to a prompt as long as the budget fit together.
        (RowTokens(prompts=(10, 10), answers=(0, 0), groups=(0, 0)), 10, [[0, 1]]),
    ],
)
def test_groups_stay_whole_where_the_budget_allows_and_are_cut_elsewhere(tokens, budget, bins):
    assert sorted(pack_groups_under(tokens, budget, "abcde")) == bins


def test_parts_of_a_group_that_one_prompt_is_kept_to_stay_neighbours():
    tokens = RowTokens(prompts=(10,) * 6, answers=(4, 4, 4, 5, 5, 3), groups=(0, 0, 0, 1, 1, 2))
    assert pack_groups_under(tokens, 18, "abcdef") == [[5], [0, 1], [2], [3], [4]]


@pytest.mark.parametrize(("tokens", "row"), [(TOKENS, "c"), (FAMILY, "b"), (APART, "a")])
def test_a_row_over_the_budget_is_named(tokens, row):
    with pytest.raises(ConfigError, match=rf"ppo_max_token_len_per_gpu=14: {row} has 15 tokens.*Raise it to at least 15"):
        pack_groups_under(tokens, 14, "abcde")
    with pytest.raises(ConfigError, match=rf"^critic.ppo_max_token_len_per_gpu=14: {row} has 15 tokens"):
        pack_groups_under(tokens, 14, "abcde", key="critic.ppo_max_token_len_per_gpu")


@given(st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 20), min_size=1, max_size=6)), min_size=1, max_size=8))
def test_no_micro_batch_computes_more_than_the_budget_and_every_row_is_in_one(groups):
    rows = [(prompt, answer, number) for number, (prompt, answers) in enumerate(groups) for answer in answers]
    tokens = RowTokens(*(tuple(part) for part in zip(*rows, strict=True)))
    bins = pack_groups_under(tokens, 50, [str(row) for row in range(len(rows))])
    assert sorted(row for members in bins for row in members) == list(range(len(rows)))
    assert all(tokens.cost(members) <= 50 for members in bins)


# Conversations. Nodes: 0 is a system prompt of 20 tokens, 1 and 4 are tasks of 30, the others are one row's own. Row 3 went back
# to the system prompt once.
TREES = RowTokens.of_paths(
    (
        ((0, 20), (1, 30), (2, 10)),
        ((0, 20), (1, 30), (3, 15)),
        ((0, 20), (4, 30), (5, 12)),
        ((0, 20), (4, 30), (6, 8), (7, 5)),
        ((0, 20), (1, 7)),
        (),
    ),
    (0, 0, 1, 1, 0, 0),
)


def test_conversations_cost_each_node_once_and_of_a_node_what_the_longest_needs():
    assert TREES.cost([0, 1]) == 20 + 30 + 10 + 15
    assert TREES.cost([0, 4]) == 60
    assert TREES.cost([4, 5]) == 27
    assert TREES.row_lengths() == [60, 65, 62, 63, 27, 0]
    assert TREES.select([3, 0]).cost([0, 1]) == 63 + 40
    assert TREES.families() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("budget", "bins"),
    [
        (130, [[0, 1, 2, 3, 4, 5]]),
        (129, [[0, 1, 4], [2, 3, 5]]),  # the rows of a task stay together
        (75, [[0, 1, 4, 5], [2, 3]]),
        (74, [[0, 4], [1], [2], [3], [5]]),
    ],
)
def test_conversations_are_cut_where_they_share_least(budget, bins):
    found = pack_groups_under(TREES, budget, "abcdef")
    assert sorted(row for rows in found for row in rows) == list(range(6))
    assert all(TREES.cost(rows) <= budget for rows in found)
    # The least number of tokens that cuts of these rows into so many parts compute.
    assert sum(map(TREES.cost, found)) == sum(map(TREES.cost, bins))


def test_a_conversation_over_the_budget_is_named():
    with pytest.raises(ConfigError, match=r"ppo_max_token_len_per_gpu=64: b has 65 tokens.*Raise it to at least 65"):
        pack_groups_under(TREES, 64, "abcdef")


def test_conversations_over_the_budget_are_in_parts_with_those_that_share_tokens_if_that_is_allowed():
    apart = RowTokens.of_paths((*TREES.paths, ((9, 50),)), (*TREES.groups, 2))
    together, single = pack_groups_under(apart, 64, "abcdefg", in_parts=True)[::-1][:2]
    assert (together, together.budget) == ([0, 1, 2, 3, 4, 5], 64)
    assert single == [6]
    arrived = pickle.loads(pickle.dumps(together))
    assert (arrived, arrived.budget, arrived.problem) == (together, 64, together.problem)
    # A row of one turn is refused.
    with pytest.raises(ConfigError, match="c has 15 tokens"):
        pack_groups_under(TOKENS, 14, "abcde", in_parts=True)


def test_conversations_that_have_tokens_in_common_only_by_pairs_are_cut_between_neighbours():
    ring = RowTokens.of_paths((((0, 5), (1, 5)), ((1, 5), (2, 5)), ((2, 5), (3, 5)), ((0, 5), (3, 5))), (0,) * 4)
    found = pack_groups_under(ring, 15, "abcd")
    assert sorted(row for rows in found for row in rows) == [0, 1, 2, 3]
    assert [ring.cost(rows) for rows in found] == [15, 15]


def test_splitting_conversations_keeps_those_of_one_task_together():
    assert sorted(TREES.split([[0, 1, 2, 3]], 2)) == [[0, 1], [2, 3]]
    assert sorted(map(len, TREES.split([[0, 1, 2, 3, 4]], 7))) == [0, 0, 1, 1, 1, 1, 1]


@given(st.integers(0, 10_000), st.integers(0, 30))
def test_no_micro_batch_of_a_random_forest_computes_more_than_the_budget(seed, more):
    draw = random.Random(seed)
    sizes = [draw.randint(1, 9) for _ in range(12)]
    parent = [-1, *(draw.randint(-1, node - 1) for node in range(1, 12))]

    def path():
        ends, own = [draw.randrange(12) for _ in range(draw.randint(0, 3))], {}
        for node in ends:
            own.setdefault(node, draw.randint(1, sizes[node]))
            while (node := parent[node]) >= 0:
                own[node] = sizes[node]
        return tuple(sorted(own.items()))

    tokens = RowTokens.of_paths(tuple(path() for _ in range(9)), [row // 3 for row in range(9)])
    budget = max(*tokens.row_lengths(), 1) + more
    found = pack_groups_under(tokens, budget, "abcdefghi")
    assert sorted(row for rows in found for row in rows) == list(range(9))
    assert all(tokens.cost(rows) <= budget for rows in found)


def test_neighbours_of_one_group_no_longer_than_the_prompt_are_a_chain():
    tokens = RowTokens(prompts=(10,) * 10, answers=(5, 5, 11, 2, 0) * 2, groups=(0,) * 5 + (1,) * 5)
    assert chains([[0, 1], [3, 4], [5, 6], [8]], tokens) == [[[0, 1], [3, 4]], [[5, 6], [8]]]
    assert chains([[0, 1], [2], [3]], tokens) == [[[0, 1]], [[2]], [[3]]]  # 11 are more than the prompt's 10
    assert chains([[0, 5], [1, 6]], tokens) == [[[0, 5]], [[1, 6]]]
    assert chains([[0], [4], [1]], tokens) == [[[0]], [[4]], [[1]]]  # nothing to compute for an answer of one token
    assert chains([[0], [1]], RowTokens(prompts=(10, 10), answers=(5, 5), groups=(0, 1))) == [[[0]], [[1]]]


def test_ranks_carry_prompts_over_the_same_micro_batches():
    # The first rank has a chain of three parts, the second two of two, the third none.
    tokens = RowTokens(prompts=(10,) * 6, answers=(4,) * 6, groups=(0, 0, 0, 1, 1, 2))
    cut = [[[0], [1], [2], [3, 4], [5]], [[5], [0], [1], [3], [4]], [[0, 1], [2, 3]]]
    aligned = alike(cut, [tokens] * 3)
    # A worker gets its part by pickle.
    assert [pickle.loads(pickle.dumps(each)).spans for each in aligned] == [(3, 2)] * 3
    assert aligned == [
        [[0], [1], [2], [5], [3, 4]],
        [[0], [1], [5], [3], [4]],
        [[2, 3], [0, 1], [], [], []],
    ]
    reading = [[read for _, read in spans(each, tokens)] for each in aligned]
    assert reading == [[3, 0], [2, 2], [0, 0]]


def test_longer_chains_come_first_whatever_their_order_was():
    tokens = RowTokens(prompts=(10,) * 5, answers=(4,) * 5, groups=(0, 0, 1, 1, 1))
    aligned = alike([[[0], [1], [2], [3], [4]], [[2], [3], [4], [0], [1]]], [tokens] * 2)
    assert aligned == [[[2], [3], [4], [0], [1]]] * 2


def test_micro_batches_that_share_a_prompt_read_it_together_down_to_two_and_to_one_token():
    tokens = RowTokens(prompts=(10,) * 5, answers=(1, 1, 4, 4, 4), groups=(0, 0, 1, 1, 2))
    assert spans([[0], [1], [2], [3], [4]], tokens) == [([[0], [1]], 2), ([[2], [3]], 2), ([[4]], None)]


def test_what_is_beside_the_chains_follows_them_in_as_many_micro_batches_on_each_rank():
    with_chain = RowTokens(prompts=(10,) * 4, answers=(4,) * 4, groups=(0, 0, 1, 2))
    without = RowTokens(prompts=(10,) * 4, answers=(4,) * 4, groups=(0, 1, 2, 3))
    aligned = alike([[[0], [1], [2, 3]], [[0], [1], [2], [3]]], [with_chain, without])
    assert aligned == [[[0], [1], [2], [3]], [[3], [2], [0], [1]]]
