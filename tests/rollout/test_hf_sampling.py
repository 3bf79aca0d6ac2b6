from __future__ import annotations

import math

import torch

from tests.rollout.tools import sampling
from verl_memopt.rollout.hf_engine import RowSampler, filtered, penalized

INF = math.inf


def test_top_k_keeps_the_k_largest_and_ties_with_the_last() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]])
    assert filtered(logits, 2, 1.0).tolist() == [[3.0, -INF, 2.0, 2.0, -INF]]
    assert filtered(logits, 1, 1.0).tolist() == [[3.0, -INF, -INF, -INF, -INF]]


def test_top_p_keeps_the_smallest_set_that_reaches_p_and_at_least_the_likeliest() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = [
        [index for index, value in enumerate(filtered(logits, -1, p)[0].tolist()) if value > -INF] for p in (0.01, 0.7, 0.9, 1.0)
    ]
    assert kept == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_top_p_counts_only_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert (filtered(logits, 2, 0.5)[0] > -INF).tolist() == [True, False, False, False]


def test_repetition_penalty_lowers_positive_and_negative_logits_of_seen_tokens_only() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0]])
    seen = torch.tensor([[True, True, False]])
    assert penalized(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0]]


def test_left_padding_counts_as_no_seen_token() -> None:
    ids = torch.tensor([[0, 0, 1, 2]])
    sampler = RowSampler(sampling(do_sample=False, repetition_penalty=2.0), [0], torch.tensor([[0, 0, 1]]), processed=True)
    assert sampler(ids, torch.full((1, 4), 2.0)).tolist() == [[2.0, 1.0, 1.0, 2.0]]


def test_draws_follow_the_softmax() -> None:
    probabilities = torch.tensor([0.6, 0.3, 0.1])
    rows = 4000
    sampler = RowSampler(sampling(), list(range(rows)), torch.ones(rows, 1, dtype=torch.long), processed=True)
    drawn = sampler(torch.zeros(rows, 1, dtype=torch.long), probabilities.log().expand(rows, 3)).argmax(-1)
    shares = torch.bincount(drawn, minlength=3) / rows
    three_deviations = 3 * (probabilities * (1 - probabilities) / rows).sqrt()
    assert ((shares - probabilities).abs() <= three_deviations).all()


def test_processed_log_probs_are_of_the_filtered_distribution_and_raw_ones_of_the_models() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for processed, expected in ((True, 0.0), (False, math.log(0.5))):
        sampler = RowSampler(sampling(top_k=1, temperature=0.5), [0], torch.ones(1, 1, dtype=torch.long), processed)
        sampler(torch.zeros(1, 1, dtype=torch.long), logits)
        assert abs(sampler.log_probs[0].item() - expected) < 1e-6
