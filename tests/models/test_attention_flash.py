import pytest
import torch
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models.attention_cases import (
    HEADS,
    TREES,
    agree,
    flat_inputs,
    gpu_operators_on_a_cpu,
    rotary_of,
    turned_before,
    with_gradients,
    with_turned_gradients,
)
from verl_memopt.models.attention_eager import eager_attention
from verl_memopt.models.attention_flash import flash_attention
from verl_memopt.models.trees import Trees


def written_out(trees, window=None):
    def attend(*inputs):
        return eager_attention(*(tensor.transpose(0, 1)[None] for tensor in inputs), trees, 0.3, window)[0].transpose(0, 1)

    return attend


@given(TREES, HEADS)
def test_two_calls_over_all_segments_give_attention_and_its_gradients(trees, heads):
    inputs = flat_inputs(trees, *heads)
    with gpu_operators_on_a_cpu():
        found = with_gradients(lambda *x: flash_attention(*x, trees, 0.3, None), inputs)
    assert agree(found, with_gradients(written_out(trees), inputs), 5e-7)


@given(TREES, HEADS)
def test_queries_and_keys_turned_inside_give_what_they_give_turned_before(trees, heads):
    inputs, rotary = flat_inputs(trees, *heads), rotary_of(sum(trees.tokens))
    with gpu_operators_on_a_cpu():
        found = with_turned_gradients(lambda q, k, v: flash_attention(q, k, v, trees, 0.3, None, rotary), inputs, rotary)
        expected = with_turned_gradients(
            lambda q, k, v: flash_attention(*turned_before(rotary, trees, q, k), v, trees, 0.3, None), inputs, rotary
        )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_window_reaches_the_kernel():
    trees = Trees.of(((7, ()), (2, ()), (5, ())))
    inputs = flat_inputs(trees, 4, 2)
    with gpu_operators_on_a_cpu():
        found = with_gradients(lambda *x: flash_attention(*x, trees, 0.3, 3), inputs)
    assert agree(found, with_gradients(written_out(trees, 3), inputs), 1e-6)


@pytest.mark.parametrize("unread", [(0, 0), (4, 0), (4, 6)])
@pytest.mark.parametrize("sizes", [((5, ()), (3, ())), ((5, (4, 4, 1)), (2, (2,)))])
def test_shapes_and_types_on_fake_tensors(sizes, unread):
    with FakeTensorMode(allow_non_fake_inputs=True):
        trees = Trees.of(sizes, unread)
        inputs = flat_inputs(trees, 4, 2, dtype=torch.bfloat16)
        found = with_gradients(lambda *x: flash_attention(*x, trees, 0.3, None), inputs)
    assert [tensor.shape for tensor in found] == [inputs[0].shape, *(tensor.shape for tensor in inputs)]
    assert {tensor.dtype for tensor in found} == {torch.bfloat16}


@pytest.mark.gpu
@pytest.mark.parametrize("unread", [(0, 0, 0), (36, 100, 0)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 3)])
def test_on_a_gpu_the_real_kernels_take_merged_log_sum_exps(heads, unread):
    trees = Trees.of(((37, (20, 20, 3)), (64, ()), (5, (130, 1))), unread)
    exact = flat_inputs(trees, *heads, size=64)
    expected = with_gradients(written_out(trees), exact)
    there = trees.map(lambda tensor: tensor.to("cuda"))
    rounded = [tensor.to("cuda", torch.bfloat16) for tensor in exact]
    found = with_gradients(lambda *x: flash_attention(*x, there, 0.3, None), rounded)
    assert agree([tensor.cpu() for tensor in found], expected, 2e-2)
