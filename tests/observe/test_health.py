import math

import pytest

from verl_memopt.trainer.update_guard import ZERO_STEPS, Health, Score

SAMPLES = 4
HALF, NONE, ALL = [1.0, 0.0, 0.0, 1.0], [0.0] * 4, [1.0] * 4
"""Answers to one prompt."""


def seen(health, groups, norm=1.0, advantages=0.0, steps=1):
    """Gives what a run is told in some steps whose prompts have these answers."""
    metrics = {"actor/grad_norm": norm, "critic/advantages/min": -advantages, "critic/advantages/max": advantages}
    scores = [score for group in groups for score in group]
    return [text for step in range(steps) for text in health.step(step + 1, scores, SAMPLES, metrics)]


def test_a_score_has_the_mean_and_the_standard_error_of_its_prompts():
    score = Score.of([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], 2)  # prompts of 0.5, 1 and 0
    assert score.mean == pytest.approx(0.5)
    assert score.error == pytest.approx(0.5 / math.sqrt(3))
    assert Score.of([1.0, 0.0], 2).error == math.inf


def test_a_score_is_above_another_beyond_so_many_standard_errors_of_the_difference():
    high, low = Score.of([1.0, 0.0] * 50, 1), Score.of([0.0, 0.0, 0.0, 1.0] * 25, 1)
    assert math.hypot(high.error, low.error) == pytest.approx(0.0664, abs=1e-4)
    assert high.above(low, 3.7)
    assert not high.above(low, 3.8)
    assert not low.above(high, 0.0)


def test_gradients_of_zero_while_all_answers_fail_are_told_once_with_the_score_then_and_now():
    health = Health(validates=True)
    assert seen(health, [HALF] * 32) == []
    assert seen(health, [NONE] * 32, norm=0.0, steps=ZERO_STEPS - 1) == []
    (text,) = seen(health, [NONE] * 32, norm=0.0, steps=10)
    assert text.startswith("the gradient has been exactly 0 for 5 steps, because all answers to a prompt score the same.")
    assert "The mean score is 0.000; in the first steps it was 0.500." in text


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ([HALF, NONE] * 16, [ALL] * 32, 0),  # the task is solved
        ([HALF, NONE] * 16, [ALL] * 30 + [NONE] * 2, 0),  # all but hopeless prompts are solved
        ([], [NONE] * 32, 1),  # a reward that never differs
    ],
)
def test_gradients_of_zero_are_told_where_they_are_a_fault(before, now, told):
    health = Health(validates=True)
    assert not before or seen(health, before) == []
    assert len(seen(health, now, norm=0.0, steps=20)) == told


def test_a_single_step_with_a_gradient_begins_the_count_again():
    health = Health(validates=True)
    seen(health, [HALF] * 32)
    for _ in range(5):
        assert seen(health, [NONE] * 32, norm=0.0, steps=ZERO_STEPS - 1) == []
        assert seen(health, [HALF] * 32) == []


def test_few_hard_prompts_that_score_alike_by_chance_are_not_told():
    health = Health(validates=True)
    seen(health, [HALF] * 2, steps=20)
    assert seen(health, [NONE] * 2, norm=0.0, steps=31) == []
    assert len(seen(health, [NONE] * 2, norm=0.0)) == 1


def test_a_gradient_of_zero_with_advantages_is_told_however_few_the_prompts():
    (text,) = seen(Health(validates=True), [HALF] * 2, norm=0.0, advantages=0.5, steps=ZERO_STEPS)
    assert "although the advantages are not" in text


def test_a_validation_below_the_first_by_more_than_its_noise_is_told_once_with_its_figures():
    health = Health(validates=True)
    assert health.validation(0, [1.0, 0.0] * 50, 1) == []
    # 0.37 is 0.13 below, and two standard errors of the difference are 0.14.
    assert health.validation(10, [1.0] * 37 + [0.0] * 63, 1) == []
    assert health.validation(20, [1.0, 0.0] * 50, 1) == []
    (text,) = health.validation(30, [0.0] * 100, 1)
    assert text.startswith("the validation score is below its start: 0.000 (0.000) at step 30, 0.500 (0.050) at the start")
    assert health.validation(40, [0.0] * 100, 1) == []


def test_the_reward_stands_for_a_validation_only_where_there_is_none():
    for validates, count in ((True, 0), (False, 1)):
        health = Health(validates)
        assert seen(health, [HALF, ALL] * 16) == []
        found = seen(health, [NONE, HALF] * 16, steps=5)
        assert len(found) == count
        assert health.collapsed
    assert found[0].startswith("the training reward is below its start: 0.250 (0.045) at step 1, 0.750 (0.045) at the start")


def test_a_reward_within_its_noise_has_not_collapsed_and_one_that_recovers_has_not_either():
    health = Health(validates=False)
    seen(health, [HALF, ALL, NONE, HALF] * 8)
    assert seen(health, [HALF, NONE, NONE, HALF] * 8, steps=5) == []
    assert not health.collapsed
    seen(health, [NONE] * 32)
    assert health.collapsed
    seen(health, [HALF] * 32)
    assert not health.collapsed


def test_a_resumed_run_knows_what_it_was_told_and_what_it_began_with():
    def story(restarts):
        health, found = Health(validates=False), []
        for number, groups in enumerate([[HALF, ALL] * 4] * 6 + [[NONE] * 8] * 16):
            found.append(seen(health, groups, norm=float(number < 6)))
            found.append(health.validation(number, [float(number < 6)] * 9, 1))
            if restarts:
                state, health = health.state_dict(), Health(validates=False)
                health.load_state_dict(state)
        return found

    assert story(restarts=True) == story(restarts=False)
    assert sum(map(len, story(restarts=True))) == 3


def test_steps_without_an_update_of_the_policy_say_nothing_about_its_gradient():
    health = Health(validates=True)
    for step in range(1, 20):
        assert health.step(step, [0.0] * 8, 2, {"critic/grad_norm": 0.0}) == []


def test_a_step_with_more_than_a_tenth_of_its_answers_without_a_score_is_told_once():
    health, scores = Health(validates=True), HALF * 10
    assert health.step(1, scores, SAMPLES, {"reward/invalid_rows": 4.0}) == []
    (text,) = health.step(2, scores, SAMPLES, {"reward/invalid_rows": 5.0})
    assert text.startswith("5 of 40 answers of step 2 have no score (NaN), so nothing is learned from them.")
    assert health.step(3, scores, SAMPLES, {"reward/invalid_rows": 40.0}) == []


def test_answers_without_a_score_change_no_other_warning():
    health, metrics = Health(validates=False), {"actor/grad_norm": 1.0}
    assert [health.step(step, [1.0, 1.0, math.nan, 1.0] * 32, SAMPLES, metrics) for step in range(3)] == [[]] * 3
    assert health.step(4, [math.nan] * 8, SAMPLES, {"actor/grad_norm": 0.0}) == []
    (text,) = health.step(5, [0.0, math.nan, math.nan, 0.0] * 32, SAMPLES, metrics)
    assert text.startswith("the training reward is below its start: ")
    assert Score.of([1.0, math.nan, math.nan, math.nan], 2) == Score(1, 1.0, 1.0)
