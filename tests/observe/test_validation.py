"""Validation statistics by hand: two prompts, two samples each."""

import math

from verl_memopt.observe.metrics import ValidationRow, headline_score, validation_metrics


def rows(*scores_of_prompts, source="toy", extra=None):
    return [
        ValidationRow(f"prompt {i}", source, score, extra[i][j] if extra else {})
        for i, scores in enumerate(scores_of_prompts)
        for j, score in enumerate(scores)
    ]


def test_one_sample_a_prompt_gives_the_mean_alone():
    assert validation_metrics(rows([1.0], [0.0], [0.0], [1.0])) == {"val-core/toy/reward/mean@1": 0.5}


def test_best_and_worst_are_taken_within_a_prompt_and_averaged_over_prompts():
    metrics = validation_metrics(rows([1.0, 0.0], [0.5, 0.5]))
    assert metrics["val-core/toy/reward/mean@2"] == 0.5
    assert metrics["val-core/toy/reward/best@2/mean"] == 0.75
    assert metrics["val-aux/toy/reward/worst@2/mean"] == 0.25
    assert math.isclose(metrics["val-aux/toy/reward/std@2"], math.sqrt(0.5) / 2)
    assert not any("maj@" in name for name in metrics)


def test_the_majority_answer_scores_once_a_prompt_and_ties_go_to_the_earliest():
    extra = [[{"pred": "7"}, {"pred": "8"}, {"pred": "8"}], [{"pred": "1"}, {"pred": "2"}, {"pred": "3"}]]
    metrics = validation_metrics(rows([1.0, 0.0, 0.0], [1.0, 0.0, 0.0], extra=extra))
    assert metrics["val-core/toy/reward/maj@3/mean"] == (0.0 + 1.0) / 2


def test_accuracy_is_the_core_where_the_reward_function_returns_it():
    extra = [[{"acc": 1, "note": "text"}], [{"acc": 0, "note": "text"}]]
    metrics = validation_metrics(rows([0.9], [0.1], extra=extra))
    assert metrics == {"val-core/toy/acc/mean@1": 0.5, "val-aux/toy/reward/mean@1": 0.5}


def test_data_sources_are_kept_apart_and_the_headline_averages_them():
    metrics = validation_metrics(rows([1.0], source="a") + rows([0.0], [0.0], source="b"))
    assert metrics == {"val-core/a/reward/mean@1": 1.0, "val-core/b/reward/mean@1": 0.0}
    assert headline_score(metrics) == 0.5
    assert headline_score({"critic/score/mean": 1.0}) is None
