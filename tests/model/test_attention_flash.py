import pytest
import torch
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.model.attention_cases import (
    HEADS,
    LAYOUTS,
    agree,
    flat_inputs,
    gpu_operators_on_a_cpu,
    rotary_of,
    rotated_before,
    with_gradients,
    with_rotary_gradients,
)
from verl_memopt.model.attention import eager_attention
from verl_memopt.model.attention_fused import flash_attention
from verl_memopt.model.packing import PrefixLayout


def written_out(layout, window=None):
    def attend(*inputs):
        return eager_attention(*(tensor.transpose(0, 1)[None] for tensor in inputs), layout, 0.3, window)[0].transpose(0, 1)

    return attend


@given(LAYOUTS, HEADS)
def test_two_calls_over_all_segments_give_attention_and_its_gradients(layout, heads):
    inputs = flat_inputs(layout, *heads)
    with gpu_operators_on_a_cpu():
        found = with_gradients(lambda *x: flash_attention(*x, layout, 0.3, None), inputs)
    assert agree(found, with_gradients(written_out(layout), inputs), 5e-7)


@given(LAYOUTS, HEADS)
def test_queries_and_keys_rotated_inside_give_what_they_give_rotated_before(layout, heads):
    inputs, rotary = flat_inputs(layout, *heads), rotary_of(sum(layout.tokens))
    with gpu_operators_on_a_cpu():
        found = with_rotary_gradients(lambda q, k, v: flash_attention(q, k, v, layout, 0.3, None, rotary), inputs, rotary)
        expected = with_rotary_gradients(
            lambda q, k, v: flash_attention(*rotated_before(rotary, layout, q, k), v, layout, 0.3, None), inputs, rotary
        )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_window_reaches_the_kernel():
    layout = PrefixLayout.of(((7, ()), (2, ()), (5, ())))
    inputs = flat_inputs(layout, 4, 2)
    with gpu_operators_on_a_cpu():
        found = with_gradients(lambda *x: flash_attention(*x, layout, 0.3, 3), inputs)
    assert agree(found, with_gradients(written_out(layout, 3), inputs), 1e-6)


@pytest.mark.parametrize("skipped", [(0, 0), (4, 0), (4, 6)])
@pytest.mark.parametrize("sizes", [((5, ()), (3, ())), ((5, (4, 4, 1)), (2, (2,)))])
def test_shapes_and_types_on_fake_tensors(sizes, skipped):
    with FakeTensorMode(allow_non_fake_inputs=True):
        layout = PrefixLayout.of(sizes, skipped)
        inputs = flat_inputs(layout, 4, 2, dtype=torch.bfloat16)
        found = with_gradients(lambda *x: flash_attention(*x, layout, 0.3, None), inputs)
    assert [tensor.shape for tensor in found] == [inputs[0].shape, *(tensor.shape for tensor in inputs)]
    assert {tensor.dtype for tensor in found} == {torch.bfloat16}


@pytest.mark.gpu
@pytest.mark.parametrize("skipped", [(0, 0, 0), (36, 100, 0)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 3)])
def test_on_a_gpu_the_real_kernels_take_merged_log_sum_exps(heads, skipped):
    layout = PrefixLayout.of(((37, (20, 20, 3)), (64, ()), (5, (130, 1))), skipped)
    exact = flat_inputs(layout, *heads, size=64)
    expected = with_gradients(written_out(layout), exact)
    there = layout.map(lambda tensor: tensor.to("cuda"))
    rounded = [tensor.to("cuda", torch.bfloat16) for tensor in exact]
    found = with_gradients(lambda *x: flash_attention(*x, there, 0.3, None), rounded)
    assert agree([tensor.cpu() for tensor in found], expected, 2e-2)
