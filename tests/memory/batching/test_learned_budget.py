import itertools
import random

import pytest

from verl_memopt.memory.adaptive_budget import GROWTH, HEAD_ROOM, LearnedBudget, PassFigures, budget_metrics

BUDGET = 1_000_000


def passes(budget, count, fixed, per_token, fill=lambda: 1.0, budget_bytes=BUDGET):
    """Runs passes whose peak is ``fixed + per_token x tokens`` and gives the cap after each."""
    caps = []
    for _ in range(count):
        fullest = max(int(budget.cap * fill()), 1)
        budget.learn(fullest, PassFigures(int(fixed + per_token * fullest), budget_bytes))
        caps.append(budget.cap)
    return caps


def test_the_first_cap_is_the_maximum():
    assert LearnedBudget(4096).cap == 4096


def test_the_next_cap_is_the_formula():
    budget = LearnedBudget(4096, cap=1000)
    budget.learn(1000, PassFigures(800_000, BUDGET))
    assert budget.cap == int(1000 * 0.95 / 0.8)
    budget = LearnedBudget(4096, cap=1000)
    budget.learn(1000, PassFigures(100_000, BUDGET))
    assert budget.cap == 1250
    budget = LearnedBudget(4096, cap=1000)
    budget.learn(1000, PassFigures(1_900_000, BUDGET))
    assert budget.cap == 500
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


def test_the_maximum_is_never_passed():
    assert max(passes(LearnedBudget(5000, cap=1000), 50, 0, 1)) == 5000


def test_a_long_row_has_room_up_to_the_maximum():
    budget = LearnedBudget(5000, cap=1000)
    assert [budget.tokens(longest) for longest in (10, 3000, 9000)] == [1000, 3000, 5000]


def test_micro_batches_that_are_not_full_raise_no_cap():
    budget = LearnedBudget(5000, cap=1000)
    budget.learn(400, PassFigures(100_000, BUDGET))
    assert budget.cap == 1000
    budget.learn(900, PassFigures(100_000, BUDGET))
    assert budget.cap == 1125


def test_a_peak_over_the_budget_lowers_the_cap_from_what_was_computed():
    budget = LearnedBudget(5000)
    budget.learn(1000, PassFigures(BUDGET, BUDGET))
    assert budget.cap == 950


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
