import statistics

import pytest
import torch
from hypothesis import given

from tests.algorithms.ragged import Ragged, ragged
from verl_memopt.algorithms.losses import ValueTokens, explained_variance, value_loss
from verl_memopt.algorithms.rows import LOSS_AGG_MODES, GlobalCounts


def naive_value_loss(predictions, values, returns, mode, clip):
    rows, scale = [], 4
    for row in zip(predictions, values, returns, strict=True):
        terms = []
        for prediction, value, target in zip(*row, strict=True):
            held = min(max(prediction, value - clip), value + clip)
            terms.append(0.5 * max((prediction - target) ** 2, (held - target) ** 2))
        rows.append(terms)
    if mode in ("token-mean", "token-sum"):
        return sum(map(sum, rows)) / (max(sum(map(len, rows)), 1) if mode == "token-mean" else 1)
    sums = [sum(row) / (max(len(row), 1) if mode == "seq-mean-token-mean" else 1) for row in rows]
    return sum(sums) / len(rows) / (scale if mode == "seq-mean-token-sum-norm" else 1)


@pytest.mark.parametrize("rejects", [False, True])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_value_loss_equals_the_row_by_row_definition_over_kept_tokens_however_rows_are_cut(mode, rejects):
    @given(ragged())
    def check(sample):
        values, targets = sample.tokens(0), sample.tokens(2)
        predictions = (values + sample.tokens(1)).requires_grad_()
        kept = (torch.arange(len(values)) % 3 != 1) | (not rejects)
        flags, flats = sample.lists(kept), (predictions.detach(), values, targets)
        lengths = torch.tensor([sum(row) for row in flags], dtype=torch.int64)
        counts = GlobalCounts(max(int(kept.sum()), 1), len(sample.sizes))

        def loss_of(predictions, values, targets, kept, row, lengths):
            rejected = kept if rejects else None
            return value_loss(ValueTokens(predictions, values, targets, row, lengths, counts, rejected), 0.5, mode, 4)

        whole, metrics = loss_of(predictions, values, targets, kept, sample.row, lengths)
        lists = [
            [[value for value, keep in zip(*row, strict=True) if keep] for row in zip(sample.lists(flat), flags, strict=True)]
            for flat in flats
        ]
        assert whole.item() == pytest.approx(naive_value_loss(*lists, mode, 0.5), rel=1e-10, abs=1e-12)
        assert metrics["vpred_mean"].item() == pytest.approx(sum(map(sum, lists[0])) / counts.tokens, rel=1e-6, abs=1e-7)
        whole.backward()
        assert not predictions.grad[~kept].any()
        parts = zip(*(flat.split(list(sample.sizes)) for flat in (*flats, kept)), lengths, strict=True)
        shares = [loss_of(*part, torch.zeros_like(part[0], dtype=torch.int64), length[None]) for *part, length in parts]
        assert sum(loss for loss, _ in shares).item() == pytest.approx(whole.item(), rel=1e-10, abs=1e-12)
        for name, value in metrics.items():
            assert sum(m[name] for _, m in shares).item() == pytest.approx(value.item(), rel=1e-6, abs=1e-7)

    check()


@pytest.mark.parametrize(
    ("prediction", "target", "gradient", "clipped"),
    [(0.3, 1.0, -0.7, 0), (0.9, 2.0, 0.0, 1), (0.9, 0.6, 0.3, 0), (-0.9, -2.0, 0.0, 1)],
)
def test_a_prediction_that_went_far_towards_its_target_has_no_gradient(prediction, target, gradient, clipped):
    leaf, zero = torch.tensor([prediction], requires_grad=True), torch.tensor([0])
    tokens = ValueTokens(leaf, torch.zeros(1), torch.tensor([target]), zero, zero + 1, GlobalCounts(1, 1))
    loss, metrics = value_loss(tokens, 0.5, "token-mean")
    loss.backward()
    assert leaf.grad.item() == pytest.approx(gradient)
    assert metrics["vf_clipfrac"].item() == clipped
    assert metrics["vpred_mean"].item() == pytest.approx(prediction)


def test_explained_variance_is_one_for_the_returns_zero_for_a_constant_and_negative_beyond():
    sample = Ragged((30,), 0)
    returns = sample.tokens(0)
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.zeros(30), returns) == pytest.approx(0, abs=1e-4)
    values = sample.tokens(1)
    errors, spread = statistics.variance((returns - values).tolist()), statistics.variance(returns.tolist())
    assert explained_variance(values, returns) == pytest.approx(1 - errors / (spread + 1e-5))
    assert explained_variance(torch.ones(1), torch.ones(1)) == 0
    assert explained_variance(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 2.0])) == pytest.approx(0.75, abs=1e-5)


def test_metrics_are_shares_of_the_tokens_of_the_mini_batch():
    row, lengths = torch.tensor([0, 0]), torch.tensor([2])
    predictions, targets = torch.tensor([0.9, 0.1]), torch.tensor([2.0, 0.1])
    tokens = ValueTokens(predictions, torch.zeros(2), targets, row, lengths, GlobalCounts(4, 1))
    loss, metrics = value_loss(tokens, 0.5, "token-mean")
    assert metrics.keys() == {"vf_loss", "vf_clipfrac", "vpred_mean"}
    assert metrics["vf_loss"] == loss
    assert not metrics["vf_loss"].requires_grad
    assert (metrics["vf_clipfrac"].item(), metrics["vpred_mean"].item()) == pytest.approx((0.25, 0.25))
