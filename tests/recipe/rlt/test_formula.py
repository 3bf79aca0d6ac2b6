"""The reductions and the formula against naive references, every edge case, and what the trainer makes of a reward."""

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.recipe.rlt import naive
from verl_memopt.algorithms.estimators import check_rewards, grpo_advantages, rloo_advantages
from verl_memopt.data.batch import Ragged
from verl_memopt.errors import RewardError
from verl_memopt.recipes.rlt.formula import REDUCTIONS, TRANSFORMS, reduce_rows, rlt_scores
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student_rows import EMPTY_THINK, NO_END_TAG, OK, SKIPPED, THINK_TRUNCATED, StudentRows

LOG_PROB = st.floats(-20, 0, width=32)
SAMPLES = st.lists(
    st.tuples(st.lists(LOG_PROB, min_size=1, max_size=7), st.lists(st.tuples(LOG_PROB, LOG_PROB), max_size=7), st.booleans()),
    min_size=1,
    max_size=5,
)
"""s, pairs of u and v, and whether there is an end tag, of each row."""


def weighted(names):
    """Draws a few different reductions with weights."""
    chosen = st.lists(st.sampled_from(sorted(names)), min_size=1, max_size=3, unique=True)
    return chosen.flatmap(lambda n: st.tuples(st.just(n), st.lists(st.floats(-3, 5), min_size=len(n), max_size=len(n))))


@st.composite
def any_settings(draw):
    """Draws transforms, clips, reductions and estimators. No value of exp_norm is so large that fp32 has no digits left."""
    (log_names, log_weights), (kl_names, kl_weights) = draw(weighted(REDUCTIONS)), draw(weighted(REDUCTIONS))
    return RltReward(
        answer_log_prob_coeff=log_weights,
        reduction_log_prob_fn=log_names,
        kl_penalty_reward_coeff=kl_weights,
        reduction_kl_fn=kl_names,
        normalize_log_prob_fn=draw(st.sampled_from(sorted(TRANSFORMS))),
        normalize_kl_fn=draw(st.sampled_from(sorted(TRANSFORMS))),
        clip_log_prob=draw(st.sampled_from([0.5, 3.0, 100.0])),
        clip_kl=draw(st.sampled_from([0.5, 3.0, 100.0])),
        use_schulman_kl_estimation=draw(st.booleans()),
        include_teacher_think_entropy=draw(st.booleans()),
        empty_think_kl=draw(st.sampled_from([0.0, 1.0, 2.5])),
        not_matched_penalty=draw(st.sampled_from([0.0, -1.0, -0.25])),
    )


def rows_of(think_lengths, solution_lengths, matched, status=None):
    parts = torch.tensor([[2, k, 3, s, 1] for k, s in zip(think_lengths, solution_lengths, strict=True)], dtype=torch.int64)
    number = len(parts)
    return StudentRows(
        ids=Ragged.from_rows([[0] * int(length) for length in parts.sum(1)], torch.int64),
        parts=parts,
        status=torch.zeros(number, dtype=torch.int8) if status is None else torch.tensor(status, dtype=torch.int8),
        matched=torch.tensor(matched),
        has_text_after=torch.zeros(number, dtype=torch.bool),
    )


def flat(rows):
    return torch.tensor([value for row in rows for value in row], dtype=torch.float32)


def scores_of(settings, samples, status=None):
    s, pairs, matched = zip(*samples, strict=True)
    rows = rows_of([len(row) for row in pairs], [len(row) for row in s], matched, status)
    u, v = flat([[pair[0] for pair in row] for row in pairs]), flat([[pair[1] for pair in row] for row in pairs])
    return rlt_scores(settings, rows, u, v, flat(s), [f"f:{place + 1}" for place in range(len(samples))])


def expected_of(settings, s, pairs, matched):
    return naive.reward(settings, s, [pair[0] for pair in pairs], [pair[1] for pair in pairs], matched)


@given(SAMPLES, any_settings())
@example([([-1.0], [], True)], RltReward())
@example([([-1.0], [], False)], RltReward(use_schulman_kl_estimation=True))
def test_the_reward_is_the_naive_one(samples, settings):
    scores = scores_of(settings, samples)
    expected = torch.tensor([expected_of(settings, *sample) for sample in samples], dtype=torch.float64)
    for value, reference in zip((scores.reward, scores.r_ss, scores.r_kl), expected.T, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), reference, rtol=1e-6, atol=1e-5)


S, U, V = [-0.5, -1.5, -0.25], [-2.0, -1.0], [-0.5, -1.25]
PAIRS = list(zip(U, V, strict=True))


def one(settings, pairs=PAIRS, matched=True, s=S):
    return scores_of(settings, [(s, pairs, matched)])


def test_the_default_reward_by_hand():
    scores = one(RltReward())
    r_ss = -2.25 / 3 + 0.01 * -1.5
    r_kl = 3 * (1.5 - 0.25) / 2 + 0.03 * 1.5
    torch.testing.assert_close(scores.r_ss, torch.tensor([r_ss]))
    torch.testing.assert_close(scores.r_kl, torch.tensor([r_kl]))
    torch.testing.assert_close(scores.reward, torch.tensor([r_ss - r_kl]))
    assert scores.match.tolist() == [0.0]


def test_parts_name_each_reduction_and_its_share():
    scores = one(RltReward())
    assert list(scores.parts) == [
        f"{name}{end}"
        for name in ("answer_log_prob/mean", "answer_log_prob/min", "reasoning_kl/mean", "reasoning_kl/max")
        for end in ("", "/weighted")
    ]
    assert scores.parts["reasoning_kl/max"].item() == 1.5
    assert scores.parts["reasoning_kl/max/weighted"].item() == pytest.approx(0.045)
    assert (scores.num_think.tolist(), scores.num_solution.tolist()) == ([2], [3])
    assert scores.num_think.dtype == scores.num_solution.dtype == torch.int32


ESTIMATORS = ({}, {"use_schulman_kl_estimation": True}, {"include_teacher_think_entropy": False})


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
def test_an_empty_explanation_costs_the_same_with_every_estimator_and_reduction(estimator):
    scores = one(RltReward(**estimator), [])
    assert scores.r_kl.item() == pytest.approx(3.03)
    assert scores.reward.item() == pytest.approx(-2.25 / 3 - 0.015 - 3.03, abs=1e-6)
    for name in REDUCTIONS:
        assert one(RltReward(**estimator, reduction_kl_fn=[name], kl_penalty_reward_coeff=[2.0]), []).r_kl.item() == 2.0


def test_a_skipped_row_has_no_reward_and_leaves_its_group():
    samples = [(S, PAIRS, True), ([], [], False), ([-3.0], PAIRS, True), ([-0.1], [], True)]
    scores = scores_of(RltReward(), samples, [OK, SKIPPED, OK, EMPTY_THINK])
    assert (scores.reward[1].item(), scores.match[1].item(), scores.r_kl[1].item()) == (0.0, 0.0, 0.0)
    rewards, group = scores.training_rewards(), torch.zeros(4, dtype=torch.int64)
    valid = check_rewards(rewards, [""] * 4)
    assert valid.tolist() == [True, False, True, True]
    advantages = grpo_advantages(rewards, group, valid)
    kept = torch.tensor([0, 2, 3])
    expected = grpo_advantages(rewards[kept], group[kept], valid[kept])
    assert advantages[1] == 0
    torch.testing.assert_close(advantages[kept], expected, rtol=0, atol=0)
    assert scores.metrics()["num_rows"] == 4
    assert scores.metrics()["status/skipped"] == 0.25
    assert scores.metrics()["reward"] == pytest.approx(scores.reward[kept].mean().item())


@pytest.mark.parametrize("advantages", [grpo_advantages, rloo_advantages])
@given(values=st.lists(LOG_PROB, min_size=2, max_size=6), shift=st.integers(-64, 64))
def test_a_shift_of_all_rewards_moves_no_advantage_and_equal_rewards_give_zero(advantages, values, shift):
    rewards = scores_of(RltReward(), [([value], [(-1.0, value)], True) for value in values]).training_rewards().double()
    group, valid = torch.zeros(len(values), dtype=torch.int64), torch.ones(len(values), dtype=torch.bool)
    one, shifted = advantages(rewards, group, valid), advantages(rewards + shift, group, valid)
    torch.testing.assert_close(one, shifted, rtol=1e-5, atol=1e-5)
    same = torch.full_like(rewards, rewards[0].item())
    assert advantages(same, group, valid).tolist() == [0.0] * len(values)


@pytest.mark.parametrize(
    ("which", "value", "message"),
    [
        ("s", math.nan, "the student's log-probs of the solution"),
        ("u", math.inf, "student's log-probs of the expl"),
        ("v", -math.inf, "the teacher's log-probs"),
    ],
)
def test_a_log_prob_that_is_not_finite_names_its_row(which, value, message):
    good = (S, PAIRS, True)
    bad = {
        "s": ([-1.0, value], PAIRS, True),
        "u": (S, [(-1.0, -1.0), (value, -1.0)], True),
        "v": (S, [(-1.0, -1.0), (-1.0, value)], True),
    }[which]
    with pytest.raises(RewardError, match=rf"^f:3: .*{message}.* contain {value!s}\. The model is broken"):
        scores_of(RltReward(), [good, (S, [], True), bad])


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
@pytest.mark.parametrize("transform", sorted(TRANSFORMS))
@pytest.mark.parametrize("u", [-1e4, -1e-8])
def test_a_reward_is_finite_however_far_apart_the_models_are(estimator, transform, u):
    names = sorted(REDUCTIONS)
    weights = [0.0, *[1.0] * (len(names) - 1)]
    settings = RltReward(
        **estimator,
        normalize_kl_fn=transform,
        normalize_log_prob_fn=transform,
        reduction_kl_fn=names,
        kl_penalty_reward_coeff=weights,
        reduction_log_prob_fn=names,
        answer_log_prob_coeff=weights,
    )
    scores = one(settings, [(u, -1e-8), (-1e4 - u, -1e4)], s=[-1e4, -1e-8])
    assert all(bool(torch.isfinite(value).all()) for value in (scores.reward, scores.r_ss, scores.r_kl, *scores.parts.values()))


def test_the_teacher_may_be_missing_where_nothing_reads_it():
    settings = RltReward(include_teacher_think_entropy=False)
    scores = rlt_scores(settings, rows_of([2], [3], [True]), torch.tensor(U), None, torch.tensor(S), ["f:1"])
    assert torch.equal(scores.reward, one(settings).reward)


def test_metrics_are_means_over_scored_rows_and_shares_of_statuses():
    samples = [(S, PAIRS, True), (S, PAIRS, False), (S, [], True), (S, PAIRS[:1], False)]
    scores = scores_of(RltReward(), samples, [OK, NO_END_TAG, EMPTY_THINK, THINK_TRUNCATED])
    metrics = dataclasses.replace(scores, has_text_after=torch.tensor([True, False, False, False])).metrics()
    shares = {name.removeprefix("status/"): value for name, value in metrics.items() if name.startswith("status/")}
    assert shares == {"ok": 0.25, "no_end_tag": 0.25, "empty_think": 0.25, "think_truncated": 0.25, "skipped": 0.0}
    assert (metrics["match"], metrics["text_after_end_tag"], metrics["think_tokens"]) == (-0.5, 0.25, 5 / 4)
    assert metrics["r_ss"] == pytest.approx(-0.765, abs=1e-6)
    metrics = scores_of(RltReward(), [([], [], False)], [SKIPPED]).metrics()
    assert metrics["status/skipped"] == 1.0
    assert "reward" not in metrics


def test_every_reduction_and_transform_of_the_settings_exists():
    from typing import get_args

    from verl_memopt.recipes.rlt.settings import Reduction, Transform

    assert set(get_args(Reduction)) == set(REDUCTIONS)
    assert set(get_args(Transform)) == set(TRANSFORMS)


# Reductions over ragged rows against the same reductions of each row alone.


VALUES = st.floats(-1e4, 1e4, width=32)
ROWS = st.lists(st.lists(VALUES, max_size=9), max_size=6)


def flat_with_lengths(rows):
    values = torch.tensor([value for row in rows for value in row], dtype=torch.float32)
    return values, torch.tensor([len(row) for row in rows], dtype=torch.int64)


@given(rows=ROWS)
def test_rows_are_reduced_one_by_one(rows):
    for name in REDUCTIONS:
        expected = torch.tensor([naive.reduced(name, row) if row else 0.0 for row in rows], dtype=torch.float64)
        torch.testing.assert_close(reduce_rows(name, *flat_with_lengths(rows)), expected, rtol=1e-12, atol=1e-9)


def test_four_values_by_hand():
    values, lengths = torch.tensor([4.0, 1.0, 3.0, 2.0]), torch.tensor([4])
    by_hand = {"mean": 2.5, "sum": 10, "min": 1, "max": 4, "median": 2, "first_quartile": 1.75, "last_quartile": 3.25}
    assert {name: reduce_rows(name, values, lengths).item() for name in REDUCTIONS} == by_hand
    for name in REDUCTIONS:
        assert reduce_rows(name, torch.zeros(0), torch.tensor([0, 0])).tolist() == [0.0, 0.0]
        assert reduce_rows(name, torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []
