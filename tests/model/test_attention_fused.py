import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.model.attention_cases import (
    HEADS,
    LAYOUTS,
    agree,
    flat_inputs,
    gpu_operators_on_a_cpu,
    norm_error,
    rotary_of,
    rotated_before,
    with_gradients,
    with_rotary_gradients,
)
from tests.model.forests import conversations
from tests.tensors import operations_named
from verl_memopt.memory.fused import TILE_ELEMENTS
from verl_memopt.model import attention_dense
from verl_memopt.model.attention import eager_attention
from verl_memopt.model.attention_dense import PACKED_CPU_FLASH, _DenseAttention, dense_attention
from verl_memopt.model.attention_fused import _with_merged, flash_attention, merge
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.rotary import rotary_arguments
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker

SHARED = ((9, (4, 4, 4)), (3, ()), (5, (2, 7)))


def written_out(layout, window=None):
    def attend(*inputs, sinks=None):
        heads_first = (tensor.transpose(0, 1)[None] for tensor in inputs)
        return eager_attention(*heads_first, layout, 0.3, window, sinks=sinks)[0].transpose(0, 1)

    return attend


def dense(layout, rotary=None):
    return lambda *inputs, sinks=None: dense_attention(*inputs, layout, 0.3, rotary, sinks)


def in_passes(layout, rotary=None):
    """Return dense attention without a mask, however few tokens there are."""
    return with_products(0)(layout, rotary)


def with_products(products):
    """Return dense attention whose calls with a mask may compute so many products."""
    kernel = dataclasses.replace(PACKED_CPU_FLASH, masked_products=products)

    def of_layout(layout, rotary=None):
        tables = rotary_arguments(rotary)
        return lambda *inputs, sinks=None: _DenseAttention.apply(*inputs, *tables, layout, 0.3, kernel, sinks)

    return of_layout


def flash(layout, rotary=None, window=None):
    return lambda *inputs, sinks=None: flash_attention(*inputs, layout, 0.3, window, rotary, sinks)


def joined(layout, rotary=None):
    return with_products(3000)(layout, rotary)


@pytest.mark.parametrize("kernel", [dense, in_passes, joined, flash])
@given(layout=LAYOUTS, heads=HEADS)
def test_every_way_to_cut_calls_gives_attention_and_its_gradients(kernel, layout, heads):
    inputs = flat_inputs(layout, *heads)
    with gpu_operators_on_a_cpu():
        found = with_gradients(kernel(layout), inputs)
    assert agree(found, with_gradients(written_out(layout), inputs), 5e-7)


@pytest.mark.parametrize("kernel", [dense, in_passes, joined, flash])
@settings(max_examples=20)
@given(layout=LAYOUTS, heads=HEADS)
def test_a_sink_takes_its_share_of_each_query_once(kernel, layout, heads):
    inputs = *flat_inputs(layout, *heads), 2 * torch.randn(heads[0], generator=torch.Generator().manual_seed(3))
    with gpu_operators_on_a_cpu():
        found = with_gradients(lambda *x: kernel(layout)(*x[:3], sinks=x[3]), inputs)
    assert agree(found, with_gradients(lambda *x: written_out(layout)(*x[:3], sinks=x[3]), inputs), 1e-6)
    if kernel in (in_passes, joined):  # they take no double
        return
    # The gradient of a sink alone. In double, because it is a sum over queries that may cancel.
    wide = [tensor.double() for tensor in inputs]
    with gpu_operators_on_a_cpu():
        found = with_gradients(lambda *x: kernel(layout)(*x[:3], sinks=x[3]), wide)
    assert norm_error(found[4], with_gradients(lambda *x: written_out(layout)(*x[:3], sinks=x[3]), wide)[4]) < 1e-5


@pytest.mark.parametrize(("kernel", "bound"), [(dense, 1e-6), (in_passes, 1e-6), (joined, 1e-6), (flash, 0.0)])
@settings(deadline=None)
@given(layout=LAYOUTS, heads=HEADS, normed=st.booleans(), rotated=st.sampled_from([4, 8]))
def test_queries_and_keys_rotated_inside_give_what_they_give_rotated_before(kernel, bound, layout, heads, normed, rotated):
    inputs, rotary = flat_inputs(layout, *heads), rotary_of(sum(layout.trees), normed=normed, rotated=rotated)
    with gpu_operators_on_a_cpu():
        found = with_rotary_gradients(kernel(layout, rotary), inputs, rotary)
        before = with_rotary_gradients(lambda q, k, v: kernel(layout)(*rotated_before(rotary, layout, q, k), v), inputs, rotary)
    assert all(torch.equal(one, other) for one, other in zip(found[:4], before[:4], strict=True))
    # Of the norms' weights, summed head by head where kernels take one key head.
    assert all(norm_error(one, other) <= bound for one, other in zip(found[4:], before[4:], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_tokens_of_all_heads_and_sequences_are_one_call_as_near_to_double_as_many_calls(dtype):
    layout, name = PrefixLayout.of(SHARED), "aten::_scaled_dot_product_flash_attention_for_cpu"
    inputs = flat_inputs(layout, 4, 2, size=16, dtype=dtype)
    expected = with_gradients(written_out(layout), [tensor.double() for tensor in inputs])
    errors, found = [], []
    for kernel in (dense, in_passes):
        watch, counts = operations_named([name.removeprefix("aten::")])
        with watch:
            outputs = with_gradients(kernel(layout), inputs)
        found.append(counts)
        errors.append([norm_error(one, other) for one, other in zip(outputs, expected, strict=True)])
    # For each of two key heads: six runs of equal lengths, and two prefixes.
    assert [sum(counts.values()) for counts in found] == [1, 2 * (6 + 2)]
    assert all(one <= max(1.05 * other, 3e-7) for one, other in zip(*errors, strict=True)), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("elements", "at_once"), [(0, 1), (2**18, 2)])
def test_short_segments_of_a_path_are_one_call_as_near_to_double_as_many_calls(monkeypatch, dtype, elements, at_once):
    monkeypatch.setattr(attention_dense, "JOINED_ELEMENTS", elements)
    talks = conversations(40, *[[(5, 30)] * 6] * 3)
    layout, name = talks.pack().last_block.layout, "_scaled_dot_product_flash_attention_for_cpu"
    inputs = flat_inputs(layout, 4, 2, size=16, dtype=dtype)
    expected = with_gradients(written_out(layout), [tensor.double() for tensor in inputs])
    errors, found = [], []
    for kernel in (with_products(2**15), in_passes):
        watch, counts = operations_named([name])
        with watch:
            outputs = with_gradients(kernel(layout), inputs)
        found.append(sum(counts.values()))
        errors.append([norm_error(one, other) for one, other in zip(outputs, expected, strict=True)])
    # Three paths of six segments, and the prompt that the others see. In passes, a path has at least 5 spans beside its segments.
    assert found[0] == 2 // at_once * (3 + 1)
    assert found[1] > 2 * 3 * 5
    assert all(one <= max(1.1 * other, 3e-7) for one, other in zip(*errors, strict=True)), errors


def test_a_window_reaches_the_kernel():
    layout = PrefixLayout.of(((7, ()), (2, ()), (5, ())))
    inputs = flat_inputs(layout, 4, 2)
    with gpu_operators_on_a_cpu():
        found = with_gradients(flash(layout, window=3), inputs)
    assert agree(found, with_gradients(written_out(layout, 3), inputs), 1e-6)


def test_attention_over_two_sets_of_keys_merges_into_that_over_both():
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(shape, generator=generator) for shape in ((3, 8), (10, 8), (10, 8)))

    def over(some):
        scores = query @ keys[some].T
        return scores.softmax(-1) @ values[some], scores.logsumexp(-1)

    found = merge(*over(slice(0, 4)), *over(slice(4, 10)))
    for one, other in zip(found, over(slice(0, 10)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_scores_far_apart_merge_without_overflow():
    near, far = torch.tensor([1.0]), torch.tensor([3.0])
    out, lse = merge(near[:, None], torch.tensor([500.0]), far[:, None], torch.tensor([-500.0]))
    assert (out.item(), lse.item()) == (1.0, 500.0)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_half_precision_is_as_near_to_float_as_without_sharing(heads):
    exact = flat_inputs(PrefixLayout.of(((300, (90,) * 8),)), *heads, size=32)
    shared, rounded = PrefixLayout.of(((300, (90,) * 8),)), [tensor.bfloat16() for tensor in exact]
    expected = with_gradients(dense(shared), [tensor.float() for tensor in rounded])
    repeated = PrefixLayout.of(((390, ()),) * 8)
    # Row by row: the prompt's tokens, then those of one suffix.
    places = torch.cat([torch.cat([torch.arange(300), 300 + 90 * row + torch.arange(90)]) for row in range(8)])
    naive = with_gradients(lambda *x: _own(dense(repeated)(*(tensor[places] for tensor in x))), rounded)
    found = with_gradients(dense(shared), rounded)
    for one, other, right in zip(found, naive, expected, strict=True):
        assert norm_error(one, right) <= norm_error(other, right)


def _own(rows):
    """Gives the outputs of the shared group from those of its eight rows: the prompt's from the first."""
    rows = rows.unflatten(0, (8, 390))
    return torch.cat([rows[0, :300], rows[:, 300:].flatten(0, 1)])


def peaks(layout, heads=4, kv_heads=2, size=16, attention=dense):
    inputs = [tensor.contiguous().requires_grad_() for tensor in flat_inputs(layout, heads, kv_heads, size=size)]
    found = []
    with ByteTracker() as tracker:
        tracker.mark("inputs", inputs)
        for _ in range(2):
            tracker.enter("attention")
            before = tracker.total()
            out = attention(layout)(*inputs)
            found.append(tracker.total() - before)
            gradients = torch.autograd.grad(out, inputs, out.detach())
            found.append(tracker.peaks[DEVICE].bytes - before)
            del out, gradients
    return found[2:]


def test_with_a_rotary_it_keeps_what_was_not_rotated_and_puts_gradients_in_its_place():
    layout = PrefixLayout.of(SHARED)
    inputs = [tensor.contiguous().requires_grad_() for tensor in flat_inputs(layout, 4, 2, size=16)]
    rotary = rotary_of(38, size=16)
    given = [tensor * 1 for tensor in inputs]
    with ByteTracker() as tracker:
        tracker.mark("inputs", [*given, rotary.cos, rotary.sin, *rotary.norms])
        before = tracker.total()
        out = dense_attention(*given, layout, 0.3, rotary)
        # The output, its log-sum-exps, and the layout's mask.
        assert tracker.total() - before == 38 * 4 * (16 + 1) * 4 + 38 * 38 * 4
        gradients = torch.autograd.grad(out, given, out.detach())
    assert [one.data_ptr() for one in gradients] == [one.data_ptr() for one in given]


def test_a_second_backward_over_what_gradients_have_taken_the_place_of_is_an_error():
    layout, rotary = PrefixLayout.of(SHARED), rotary_of(38)
    given = [tensor.requires_grad_() * 1 for tensor in flat_inputs(layout, 4, 2)]
    out = dense_attention(*given, layout, 0.3, rotary).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_what_a_backward_makes_beside_is_of_one_key_head():
    layout, tokens, suffixes, size = PrefixLayout.of(((100, (512,) * 6),)), 100 + 512 * 6, 512 * 6, 32
    of_token, each = size * 4, 2
    for kv_heads in (2, 4):
        rotary = rotary_of(tokens, size=size)
        inputs = [x.contiguous().requires_grad_() for x in flat_inputs(layout, each * kv_heads, kv_heads, size=size)]
        given = [tensor * 1 for tensor in inputs]
        out = dense_attention(*given, layout, 0.3, rotary)
        above = torch.ones_like(out)
        with ByteTracker() as tracker:
            tracker.mark("inputs", [*given, out, above, rotary.cos, rotary.sin, *rotary.norms])
            before = tracker.total()
            torch.autograd.grad(out, given, above)
            found = tracker.peaks[DEVICE].bytes - before
        # Queries and a key rotated, a gradient of each and of a value; of the call over suffixes three gradients for each head,
        # one of them summed over heads.
        expected = of_token * (tokens * (each + 1 + each + 2) + suffixes * (3 * each + 1))
        assert abs(found / expected - 1) < 0.05


def test_answers_of_several_groups_are_merged_without_a_tensor_in_fp32_of_their_size():
    tokens, heads, size = 4000, 4, 64
    places = torch.arange(0, tokens, 2)
    out, other = (torch.randn(rows, heads, size, dtype=torch.bfloat16) for rows in (tokens, len(places)))
    lse, other_lse = torch.randn(heads, tokens), torch.randn(heads, len(places))
    with ByteTracker() as tracker:
        tracker.mark("inputs", [out, lse, other, other_lse, places])
        before = tracker.total()
        _with_merged(out, lse, places, other, other_lse)
        found = tracker.peaks[DEVICE].bytes - before
    # Results and copies of what is merged, and in fp32 three tensors of a tile.
    assert found <= (tokens + len(places)) * heads * (2 * size + 2 * 4) + 3 * 4 * TILE_ELEMENTS["cpu"]


def test_bytes_grow_with_tokens_not_with_their_square():
    one, two, four = (peaks(PrefixLayout.of(((128 * times, (32 * times,) * 4),)))[1] for times in (1, 2, 4))
    assert (two, four) == (2 * one, 4 * one)


def test_nothing_is_held_for_pairs_of_tokens():
    layout, tokens, sizes = PrefixLayout.of(((1024, (64,) * 16),)), 1024 + 64 * 16, {"heads": 2, "kv_heads": 1, "size": 8}
    assert peaks(layout, **sizes)[1] < tokens**2  # bytes: a mask has one for each pair, scores have four for each pair and head
    assert peaks(layout, **sizes, attention=written_out)[1] > tokens**2 * 4 * 2


def test_fake_tensors_give_the_bytes_of_real_ones():
    layout = PrefixLayout.of(SHARED)
    expected = peaks(layout)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert peaks(layout.map(fake.from_tensor)) == expected
