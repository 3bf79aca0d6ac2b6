import pytest
import torch

from verl_memopt.memory.logit_tiles import ROWS_AT_ONCE, clamped, hidden_gradient, is_inside

WIDTH = 8
TARGETS = torch.tensor([-3, -1, 0, 4, 9, 10, 25])
"""Some of them outside of ten columns."""


def gradient_of(targets, columns, seed=0):
    """Return a gradient of logits as of softmax: small negative terms, and at targets inside nearly 1."""
    matrix = -torch.rand(len(targets), columns, generator=torch.Generator().manual_seed(seed)) / columns
    inside = (targets >= 0) & (targets < columns)
    matrix[inside, targets[inside]] += 1.0
    return matrix


def weights(columns, seed=1):
    return torch.randn(columns, WIDTH, generator=torch.Generator().manual_seed(seed))


def distance(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def test_a_product_is_the_plain_one_wherever_the_targets_lie():
    matrix, weight = gradient_of(TARGETS, 10), weights(10)
    out = torch.full((len(TARGETS), WIDTH), torch.nan)
    assert hidden_gradient(matrix, weight, TARGETS, out) is out
    torch.testing.assert_close(out, matrix @ weight, atol=1e-6, rtol=1e-6)


def test_the_gradient_of_the_logits_is_the_same_afterwards():
    matrix = gradient_of(TARGETS, 10)
    before = matrix.clone()
    hidden_gradient(matrix, weights(10), TARGETS, torch.empty(len(TARGETS), WIDTH))
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("rows", [1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1])
def test_every_row_gets_its_targets_term(rows):
    targets = torch.arange(rows) % 10
    matrix, weight = gradient_of(targets, 10), weights(10)
    found = hidden_gradient(matrix, weight, targets, torch.empty(rows, WIDTH))
    torch.testing.assert_close(found, matrix @ weight, atol=1e-6, rtol=1e-6)


def test_on_a_long_vocabulary_it_is_several_times_nearer_to_the_exact_product():
    columns = 150_000
    targets = torch.arange(16) * 9_000
    # Targets whose rows are large, and others that point one way, as embeddings of a trained model do.
    matrix, weight = gradient_of(targets, columns), 0.05 * weights(columns) + 1.0
    weight[targets] *= 100
    exact = matrix.double() @ weight.double()
    found = hidden_gradient(matrix.clone(), weight, targets, torch.empty(16, WIDTH))
    assert distance(found, exact) < 5e-7
    assert distance(found, exact) < distance(matrix @ weight, exact) / 3


def test_in_half_precision_it_is_the_plain_product():
    matrix, weight = gradient_of(TARGETS, 10).bfloat16(), weights(10).bfloat16()
    out = torch.empty(len(TARGETS), WIDTH, dtype=torch.bfloat16)
    assert torch.equal(hidden_gradient(matrix, weight, TARGETS, out), matrix @ weight)


def test_targets_outside_are_clamped_and_told_apart():
    logits = torch.empty(len(TARGETS), 10)
    assert is_inside(TARGETS, logits).tolist() == [False, False, True, True, True, False, False]
    assert clamped(TARGETS, logits)[:, 0].tolist() == [0, 0, 0, 4, 9, 9, 9]
