import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

from tests.memory.recomputed import DOUBLE, EPS, ROUNDING, drawn, gradients, plain_norm, relative, saved_by
from verl_memopt.model import decoder
from verl_memopt.model.rotary import apply_rotary, rotary_arguments, rotary_backward, rotary_embedding, weight_sums


def tables(tokens, size, seed=2):
    angles = drawn(tokens, size // 2, seed=seed).detach().repeat(1, 2)
    return angles.cos(), angles.sin()


# Numbers.


@pytest.mark.parametrize("rotated", [2, 6, 8])  # of 8 entries of a head
@pytest.mark.parametrize("with_norm", [False, True])
def test_rotations_are_those_of_transformers(with_norm, rotated):
    tokens, heads, size = 40, 3, 8
    x, weight = drawn(tokens, heads, size), drawn(size, seed=1) if with_norm else None
    cos, sin = tables(tokens, rotated)
    given = (x if weight is None else plain_norm(x, weight)).transpose(0, 1)[None]
    expected = apply_rotary_pos_emb(given, given, cos[None], sin[None])[0][0].transpose(0, 1)
    out, tensors = rotary_embedding(x, weight, EPS, cos, sin), [x] if weight is None else [x, weight]
    assert relative(out, expected) <= ROUNDING
    if weight is None:
        assert relative(decoder.apply_rotary(x, (cos[None], sin[None])), expected) <= ROUNDING
    for one, other in zip(gradients([out], tensors), gradients([expected], tensors), strict=True):
        assert relative(one, other) <= ROUNDING


def test_a_rotation_whose_halves_have_angles_of_their_own_has_its_transpose_for_a_gradient():
    cos, sin = drawn(4, 6, seed=1).detach(), drawn(4, 6, seed=2).detach()
    assert torch.autograd.gradcheck(
        lambda x, weight: rotary_embedding(x, weight, EPS, cos, sin), (drawn(4, 2, 6), drawn(6, seed=3))
    )
    assert torch.autograd.gradcheck(lambda x: rotary_embedding(x, None, EPS, cos, sin), (drawn(4, 2, 6),))


@pytest.mark.parametrize("rotated", [4, 8])
@pytest.mark.parametrize("with_norm", [False, True])
def test_gradients_may_take_the_place_of_what_was_rotated(with_norm, rotated):
    cos, sin = tables(9, rotated)
    whole, weight = drawn(9, 6, 8).detach(), drawn(8, seed=1).detach() if with_norm else None
    x = whole[:, 2:4]  # heads of some, as attention takes them
    above = drawn(9, 2, 8, seed=5).detach()
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(rotary_embedding(leaf, weight, EPS, cos, sin), leaf, above)[0]
    assert torch.equal(apply_rotary(x, weight, EPS, cos, sin), rotary_embedding(x, weight, EPS, cos, sin))
    rotary_backward(above, x, weight, EPS, cos, sin, x, None)
    assert torch.equal(x, expected)


def test_a_wide_weight_multiplies_before_anything_is_rounded():
    x, cos = drawn(50, 3, 8, dtype=torch.bfloat16).detach(), torch.ones(50, 8, dtype=torch.bfloat16)
    weight = drawn(8, seed=1, dtype=torch.float32).detach()
    expected = plain_norm(x.float(), weight).bfloat16()
    assert torch.equal(apply_rotary(x, weight, EPS, cos, torch.zeros_like(cos)), expected)
    assert not torch.equal(apply_rotary(x, weight.bfloat16(), EPS, cos, torch.zeros_like(cos)), expected)


def test_without_tables_nothing_is_rotated():
    x, above, into = drawn(3, 1, 4).detach(), drawn(3, 1, 4, seed=1).detach(), torch.empty(3, 1, 4, dtype=DOUBLE)
    *given, eps = rotary_arguments(None)
    assert apply_rotary(x, None, eps, *given[:2]) is x
    rotary_backward(above, x, None, eps, *given[:2], into, None)
    assert torch.equal(into, above)


def test_sums_are_of_weights_that_learn_and_never_of_half_precision():
    half = torch.ones(4, dtype=torch.bfloat16)
    sums = weight_sums((half, half, None), (True, False, True))
    assert sums[0].dtype == torch.float32
    assert sums[1:] == [None, None]


# Bytes.


def test_a_rotation_without_a_norm_keeps_tables_alone():
    x, table = drawn(10, 2, 4), torch.ones(10, 4, dtype=DOUBLE)
    found, _ = saved_by(lambda: rotary_embedding(x, None, 0.0, table, table))
    assert [one.data_ptr() for one in found] == [table.data_ptr()] * 2
