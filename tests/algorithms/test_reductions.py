import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.tensors import row_of_each_token
from verl_memopt.algorithms.rows import LOSS_AGG_MODES, GlobalCounts, aggregate, row_means, row_sums

LENGTHS = [3, 0, 5, 1, 2]
SCALE = 7


def naive_loss(rows, mode):
    """Each mode from its name, over padded-free lists of token losses."""
    if mode == "token-mean":
        tokens = [loss for row in rows for loss in row]
        return sum(tokens) / len(tokens)
    if mode == "token-sum":
        return sum(map(sum, rows))
    per_row = [sum(row) / (len(row) or 1) if mode == "seq-mean-token-mean" else sum(row) for row in rows]
    return sum(per_row) / len(rows) / (SCALE if mode == "seq-mean-token-sum-norm" else 1)


def random_rows():
    values = torch.randn(sum(LENGTHS), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return values, list(values.split(LENGTHS))


def shares(rows, bins, mode, counts):
    for indices in bins:
        lengths = torch.tensor([LENGTHS[i] for i in indices])
        values = torch.cat([rows[i] for i in indices])
        yield aggregate(values, row_of_each_token(lengths, len(values)), lengths, mode, counts, SCALE)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_shares_of_micro_batches_sum_to_the_naive_loss_of_the_whole_batch(mode):
    _, rows = random_rows()
    counts = GlobalCounts(tokens=sum(LENGTHS), sequences=len(LENGTHS))
    expected = naive_loss([row.tolist() for row in rows], mode)
    for bins in ([[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[2, 1], [4, 0, 3]]):
        assert sum(shares(rows, bins, mode, counts)).item() == pytest.approx(expected, rel=1e-14)


def test_row_sums_and_means_give_an_empty_row_zero():
    values, rows = random_rows()
    lengths = torch.tensor(LENGTHS)
    row = row_of_each_token(lengths, len(values))
    torch.testing.assert_close(row_sums(values, row, 5), torch.stack([r.sum() for r in rows]), rtol=0, atol=1e-15)
    assert row_means(values, row, lengths)[1] == 0
    assert row_means(values, row, lengths)[2].item() == pytest.approx(rows[2].mean().item(), rel=1e-14)


def test_an_empty_micro_batch_contributes_zero():
    empty = torch.zeros(0)
    nothing = torch.zeros(0, dtype=torch.long)
    for mode in LOSS_AGG_MODES:
        assert aggregate(empty, nothing, nothing, mode, GlobalCounts(4, 2), SCALE).item() == 0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_reductions_run_on_fake_tensors(mode):
    with FakeTensorMode():
        lengths = torch.full((3,), 2)
        loss = aggregate(
            torch.zeros(6, requires_grad=True), row_of_each_token(lengths, 6), lengths, mode, GlobalCounts(6, 3), SCALE
        )
        loss.backward()
    assert loss.shape == ()


def test_a_sum_norm_without_a_scale_factor_names_the_setting_it_needs():
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"^seq-mean-token-sum-norm needs actor\.loss_scale_factor"):
        aggregate(torch.ones(1), one - 1, one, "seq-mean-token-sum-norm", GlobalCounts(1, 1), None)
