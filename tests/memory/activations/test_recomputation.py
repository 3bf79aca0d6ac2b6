from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import silu
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.memory.recomputed import DOUBLE, EPS, ROUNDING, drawn, gradients, plain_norm, relative, saved_by
from verl_memopt.memory.formulas import PRODUCT_ROWS
from verl_memopt.memory.recompute_elementwise_torch import RMSNorm, Rows, SwiGLU, keep, kept, recomputed_norm, recomputed_products
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker


def plain_products(recomputable, sources, parameters, weights):
    value = plain_norm(*sources, *parameters) if isinstance(recomputable, RMSNorm) else silu(sources[0]) * sources[1]
    return [value @ weight.t() for weight in weights]


def operands(recomputable, rows, dtype=DOUBLE, width=6, outs=(5, 3)):
    sources = tuple(drawn(rows, width, seed=seed, dtype=dtype) for seed in range(recomputable.sources))
    parameters = (drawn(width, seed=7, dtype=dtype),) if isinstance(recomputable, RMSNorm) else ()
    return sources, parameters, [drawn(out, width, seed=20 + out, dtype=dtype) for out in outs]


RECOMPUTABLES = [RMSNorm(EPS), SwiGLU()]


# Numbers.


@pytest.mark.parametrize("recomputable", RECOMPUTABLES, ids=["norm", "gate"])
@settings(deadline=None, max_examples=20)
@given(rows=st.one_of(st.integers(1, 40), st.integers(PRODUCT_ROWS["cpu"] - 2, 3 * PRODUCT_ROWS["cpu"] + 2)))
def test_products_and_their_gradients_are_those_of_autograd(recomputable, rows):
    operand = operands(recomputable, rows)
    tensors = [*operand[0], *operand[1], *operand[2]]
    expected_outs = plain_products(recomputable, *operand)
    expected = gradients(expected_outs, tensors)
    outs = recomputed_products(recomputable, *operand)
    assert all(torch.equal(one, other) for one, other in zip(outs, expected_outs, strict=True))
    for one, other in zip(gradients(outs, tensors), expected, strict=True):
        assert relative(one, other) <= ROUNDING


@pytest.mark.parametrize("recomputable", RECOMPUTABLES, ids=["norm", "gate"])
@settings(deadline=None, max_examples=20)
@given(data=st.data(), rows=st.one_of(st.integers(1, 40), st.integers(PRODUCT_ROWS["cpu"] - 2, 2 * PRODUCT_ROWS["cpu"] + 2)))
def test_products_of_some_rows_are_rows_of_the_products(recomputable, data, rows):
    operand, first = operands(recomputable, rows), data.draw(st.integers(0, rows - 1))
    places = torch.tensor(sorted({first, *data.draw(st.lists(st.integers(0, rows - 1), max_size=60))}))
    tensors = [*operand[0], *operand[1], *operand[2]]
    whole, other = plain_products(recomputable, *operand)
    expected = gradients([whole[places], other], tensors)
    outs = recomputed_products(recomputable, *operand, Rows(places, places.numpy()), (True, False))
    assert all(relative(one, two) <= ROUNDING for one, two in zip(outs, (whole[places], other), strict=True))
    for one, two in zip(gradients(outs, tensors), expected, strict=True):
        assert relative(one, two) <= ROUNDING


@pytest.mark.parametrize("recomputable", RECOMPUTABLES, ids=["norm", "gate"])
def test_a_pack_without_tokens_has_gradients_of_zero(recomputable):
    operand = operands(recomputable, 0)
    tensors = [*operand[0], *operand[1], *operand[2]]
    found = gradients(recomputed_products(recomputable, *operand), tensors)
    assert [one.shape for one in found] == [one.shape for one in tensors]
    assert not any(one.any() for one in found)


@pytest.mark.parametrize("frozen", ["sources", "parameters", "weights", "one weight"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen):
    operand = operands(RMSNorm(EPS), 50)
    expected = gradients(plain_products(RMSNorm(EPS), *operand), [*operand[0], *operand[1], *operand[2]])
    operand = operands(RMSNorm(EPS), 50)
    chosen = {"sources": operand[0], "parameters": operand[1], "weights": operand[2], "one weight": operand[2][:1]}[frozen]
    for tensor in chosen:
        tensor.requires_grad_(False)
    tensors = [*operand[0], *operand[1], *operand[2]]
    asked = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
    found = gradients(recomputed_products(RMSNorm(EPS), *operand), [tensors[place] for place in asked])
    for one, place in zip(found, asked, strict=True):
        assert relative(one, expected[place]) <= ROUNDING


@pytest.mark.parametrize("recomputable", RECOMPUTABLES, ids=["norm", "gate"])
def test_bfloat16_is_as_near_to_the_truth_as_autograd_but_for_one_rounding(recomputable):
    rows, width = 3 * PRODUCT_ROWS["cpu"], 64
    given = operands(recomputable, rows, torch.bfloat16, width)
    tensors = [*given[0], *given[1], *given[2]]
    doubles = [[one.detach().double().requires_grad_() for one in some] for some in given]
    truth = gradients(plain_products(recomputable, *doubles), [one for some in doubles for one in some])
    plain = gradients(plain_products(recomputable, *given), tensors)
    found = gradients(recomputed_products(recomputable, *given), tensors)
    for one, other, true in zip(found, plain, truth, strict=True):
        # A weight's gradient is rounded to 8 bits for each tile, and once more when they are summed.
        assert relative(one.double(), true) <= relative(other.double(), true) + 2**-9


def test_a_norm_alone_is_that_of_transformers_to_the_bit():
    x, norm = drawn(300, 16, dtype=torch.float32), Qwen3RMSNorm(16, EPS)
    norm.weight = nn.Parameter(drawn(16, seed=1, dtype=torch.float32).detach())
    expected, out = norm(x), recomputed_norm(x, norm.weight, EPS)
    assert torch.equal(out, expected)
    for one, other in zip(gradients([out], [x, norm.weight]), gradients([expected], [x, norm.weight]), strict=True):
        assert relative(one, other) <= 1e-6  # in fp32


# Bytes.


@pytest.mark.parametrize("recomputable", RECOMPUTABLES, ids=["norm", "gate"])
def test_sources_parameters_and_weights_are_all_that_is_kept(recomputable):
    operand = operands(recomputable, 30)
    found, _ = saved_by(lambda: recomputed_products(recomputable, *operand))
    given = [*operand[0], *operand[1], *operand[2]]
    assert [one.data_ptr() for one in found] == [one.data_ptr() for one in given]


def test_the_gradients_of_a_gate_take_the_place_of_what_it_was_made_of():
    rows, width = 4 * PRODUCT_ROWS["cpu"], 64
    sources, _, (weight,) = operands(SwiGLU(), rows, torch.float32, width, outs=(8,))
    leaves = [source.detach().requires_grad_() for source in sources]
    with ByteTracker() as tracker:
        gate, up = (leaf * 1 for leaf in leaves)
        (out,) = recomputed_products(SwiGLU(), (gate, up), (), [weight])
        above = torch.ones_like(out)
        before = tracker.total()
        tracker.enter("backward")
        del gate, up
        out.backward(above)
        found = tracker.peaks[DEVICE].bytes - before
    # One tile of the value beside gate and up, the weight's gradient and a few tiles of elementwise statements.
    tile = PRODUCT_ROWS["cpu"] * width * 4
    assert tile <= found <= 1.2 * tile + 3 * 2**17 * 4


# A graph runs backward once.


def test_a_second_backward_is_an_error():
    operand = operands(RMSNorm(EPS), 5)
    out = recomputed_products(RMSNorm(EPS), *operand)[0].sum()
    out.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="runs backward once"):
        out.backward()


def test_nothing_is_kept_where_nothing_learns():
    assert keep(torch.ones(2)) is None
    assert keep(torch.ones(2, requires_grad=True)) is not None


def test_what_is_kept_holds_a_tensor_of_its_node():
    """Before torch 2.13 a node gives up its tensors once no tensor refers to it, and every backward failed."""
    weight = torch.arange(2.0, requires_grad=True)
    held = keep(weight)
    (output,) = held
    assert output.numel() == 0
    assert [one.tolist() for one in kept(SimpleNamespace(kept=held))] == [[0.0, 1.0]]
