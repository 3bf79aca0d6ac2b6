"""Calls of attention over several key heads and sequences at once, on the kernels of a GPU, written out on a CPU."""

import dataclasses
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from recipe.rloo.memory_study.fake_device import described_efficient_backward
from tests.model.attention_cases import (
    HEADS,
    LAYOUTS,
    agree,
    flat_inputs,
    gpu_operators_on_a_cpu,
    norm_error,
    rotary_of,
    with_gradients,
    with_rotary_gradients,
)
from tests.model.forests import Forest, agent
from tests.model.test_attention_fused import dense, flash, written_out
from tests.tensors import operations_named
from verl_memopt.memory.activation_checkpointing_torch import checkpointed
from verl_memopt.model.attention_dense import PACKED_EFFICIENT, _DenseAttention, calls
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.rotary import rotary_arguments
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker

TILES = st.sampled_from([0, 64, 200, 600, 2**22])
"""Elements of a call: from one key head and one length to everything at once."""


def efficient(layout, tile, rotary=None):
    kernel = dataclasses.replace(PACKED_EFFICIENT, elements=tile)
    return lambda *inputs: _DenseAttention.apply(*inputs, *rotary_arguments(rotary), layout, 0.3, kernel, None)


@settings(max_examples=50)
@given(layout=LAYOUTS, heads=HEADS, tile=TILES)
def test_every_tile_gives_attention_and_its_gradients(layout, heads, tile):
    inputs = flat_inputs(layout, *heads)
    with gpu_operators_on_a_cpu():
        found = with_gradients(efficient(layout, tile), inputs)
    assert agree(found, with_gradients(written_out(layout), inputs), 5e-7)


@settings(max_examples=40)
@given(layout=LAYOUTS, heads=HEADS, tile=TILES, normed=st.booleans())
def test_every_tile_rotates_inside_and_gives_the_gradients_of_norms(layout, heads, tile, normed):
    inputs, rotary = flat_inputs(layout, *heads), rotary_of(sum(layout.trees), normed=normed)
    with gpu_operators_on_a_cpu():
        found, one = (with_rotary_gradients(efficient(layout, size, rotary), inputs, rotary) for size in (tile, 0))
    assert all(norm_error(*pair) <= 2e-6 for pair in zip(found, one, strict=True))


@given(layout=LAYOUTS, rows=st.integers(0, 60))
def test_calls_take_every_sequence_once_and_as_many_as_their_rows_allow(layout, rows):
    segments, others = calls(layout, rows)
    assert [length for call in segments for length in call.query_lengths] == list(layout.segments)
    spans = [(span.queries.length, span.keys.length) for span in layout.spans]
    assert [pair for call in others for pair in zip(call.query_lengths, call.key_lengths, strict=True)] == spans
    # No call has spans of two rounds.
    ends, rounds = list(accumulate(len(call.query_lengths) for call in others)), list[list]()
    for some in accumulate(len(some.spans) for some in layout.rounds):
        count = ends.index(some) + 1 - sum(map(len, rounds))
        rounds.append(others[sum(map(len, rounds)) :][:count])
    for some in (segments, *rounds):
        padded = [(len(call.query_lengths), max(*call.query_lengths, *call.key_lengths)) for call in some]
        alone = [len(set(call.query_lengths)) == 1 if some is segments else len(call.query_lengths) == 1 for call in some]
        assert all(count * longest <= rows or whole for (count, longest), whole in zip(padded, alone, strict=True))
        # The first of the next call, which may be several of one length, had no room.
        for (count, longest), following in zip(padded, some[1:], strict=False):
            first = following.query_lengths[0]
            more = 1 if some is not segments else next(run.count for run in layout.runs if run.start == following.queries.start)
            first = max(first, following.key_lengths[0])
            assert (count + more) * max(longest, first) > rows


FORWARD, BACKWARD = "_efficient_attention_forward", "_efficient_attention_backward"


def kernel_calls(sizes, heads, kv_heads, size=64, tile=None, skipped=None):
    """Gives the calls of kernels of a GPU in a forward and a backward, on fake tensors."""
    kernel = PACKED_EFFICIENT if tile is None else dataclasses.replace(PACKED_EFFICIENT, elements=tile)
    watch, counts = operations_named([FORWARD, BACKWARD])
    with described_efficient_backward(), FakeTensorMode(allow_non_fake_inputs=True), watch:
        layout = PrefixLayout.of(sizes, skipped)
        inputs = [x.requires_grad_() for x in flat_inputs(layout, heads, kv_heads, size=size)]
        out = _DenseAttention.apply(*inputs, *rotary_arguments(None), layout, 0.3, kernel, None)
        grads = torch.autograd.grad(out, inputs, torch.empty_like(out))
    assert [one.shape for one in (out, *grads)] == [inputs[0].shape, *(one.shape for one in inputs)]
    return counts


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (8, 4), (16, 8)])
@pytest.mark.parametrize("lengths", [(20,), (20, 7, 31, 9), tuple(range(5, 21))])
def test_kernel_calls_grow_neither_with_heads_nor_with_lengths_nor_with_prompts(lengths, heads, kv_heads):
    rows, shared = tuple((length, ()) for length in lengths), tuple((9 + length, (length, 4, 11)) for length in lengths)
    assert kernel_calls(rows, heads, kv_heads) == {FORWARD: 1, BACKWARD: 1}
    assert kernel_calls(shared, heads, kv_heads) == {FORWARD: 2, BACKWARD: 2}
    # The queries of a prompt whose first tokens are computed elsewhere, or are skipped, take no further call.
    assert kernel_calls(shared, heads, kv_heads, skipped=(5,) * len(shared)) == {FORWARD: 2, BACKWARD: 2}


def test_kernel_calls_grow_with_the_rounds_of_a_forest_alone():
    layout = agent(16).pack().layout
    watch, counts = operations_named([FORWARD, BACKWARD])
    with described_efficient_backward(), FakeTensorMode(allow_non_fake_inputs=True), watch:
        inputs = [x.requires_grad_() for x in flat_inputs(layout, 8, 4, size=16)]
        out = efficient(layout, 2**22)(*inputs)
        torch.autograd.grad(out, inputs, torch.empty_like(out))
    assert counts == {FORWARD: 1 + len(layout.rounds), BACKWARD: 1 + len(layout.rounds)} == {FORWARD: 4, BACKWARD: 4}


@pytest.mark.parametrize("attend", [flash, lambda layout: efficient(layout, 2**22)], ids=["flash", "efficient"])
def test_many_rounds_are_summed_in_fp32(attend):
    # A binary tree of 8 levels: a query is in up to 7 rounds, and a key in up to 7 spans. One round is rounded once.
    nodes, size = 2**8 - 1, 6
    parents = (-1, *((node - 1) // 2 for node in range(1, nodes)))
    layout = Forest((size,) * nodes, parents, (tuple(range(size, size * nodes)),)).pack().layout
    assert len(layout.rounds) == 7
    rounded = [tensor.bfloat16() for tensor in flat_inputs(layout, 2, 2, size=32)]
    truth = with_gradients(written_out(layout), [tensor.float() for tensor in rounded])
    with gpu_operators_on_a_cpu():
        found = with_gradients(attend(layout), rounded)
    once = with_gradients(dense(layout), rounded)
    for one, other, right in zip(found, once, truth, strict=True):
        assert norm_error(one, right) <= 1.45 * norm_error(other, right)


def test_selective_checkpointing_keeps_what_the_kernel_gave_and_changes_no_bit():
    layout = PrefixLayout.of(((9, (4, 4, 2)), (3, ()), (5, (2, 7))))
    inputs, attend = flat_inputs(layout, 4, 2), efficient(layout, 2**22)
    with gpu_operators_on_a_cpu():
        expected = with_gradients(attend, inputs)
        watch, counts = operations_named([FORWARD, BACKWARD])
        with watch:
            found = with_gradients(lambda *some: checkpointed(attend, *some, mode="selective"), inputs)
    assert counts == {FORWARD: 2, BACKWARD: 2}
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_of_many_tokens_a_call_takes_the_heads_that_a_tile_has_room_for():
    rows = ((64, ()),) * 8
    # 8 x 64 queries of 2 heads of 64, for each of 8 key heads.
    for at_once in (1, 2, 4, 8):
        tile = 8 * 64 * 2 * 64 * at_once
        assert kernel_calls(rows, 16, 8, tile=tile) == {FORWARD: 8 // at_once, BACKWARD: 8 // at_once}
    # 3 have room, and 2 divide 8.
    assert kernel_calls(rows, 16, 8, tile=8 * 64 * 2 * 64 * 3)[FORWARD] == 4


def test_a_long_sequence_among_short_ones_is_not_padded_to_a_workspace_of_all():
    layout = PrefixLayout.of(((4000, ()), *((16 + place % 2, ()) for place in range(200))))
    segments, _ = calls(layout, 8192)
    assert [len(call.query_lengths) for call in segments] == [2, 199]
    assert max(len(call.query_lengths) * max(call.query_lengths) for call in segments) <= 8192


def backward_peak(layout, heads, kv_heads, size, tile):
    """Gives the bytes that a backward with a rotary makes beside what it is given, on fake tensors."""
    kernel = dataclasses.replace(PACKED_EFFICIENT, elements=tile)
    with described_efficient_backward(), FakeTensorMode(allow_non_fake_inputs=True):
        given = [x.contiguous().requires_grad_() * 1 for x in flat_inputs(layout, heads, kv_heads, size=size)]
        tables = [torch.empty(len(given[1]), size) for _ in range(2)]
        out = _DenseAttention.apply(*given, *tables, None, None, 0.0, layout, 0.3, kernel, None)
        above = torch.empty_like(out)
        with ByteTracker() as tracker:
            tracker.mark("inputs", [*given, out, above, *tables])
            before = tracker.total()
            torch.autograd.grad(out, given, above)
            return tracker.peaks[DEVICE].bytes - before


@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("answers", [0, 3000])
def test_what_a_backward_makes_beside_is_of_the_heads_of_a_tile(at_once, answers):
    prompt, size, each, kv_heads = 1000, 32, 2, 4
    layout = PrefixLayout.of(((prompt, (answers // 3,) * 3 if answers else ()),))
    tokens = prompt + answers
    found = backward_peak(layout, each * kv_heads, kv_heads, size, tokens * each * size * at_once)
    # Queries and keys turned. In a kernel's call keys and values repeated for query heads, if there are several key heads; a copy
    # of the columns of the output, if there are more of them; and gradients of queries and of repeated keys and values.
    repeated, columns = 2 * each * (at_once > 1), each * (at_once < kv_heads)
    first = tokens * (each + 1 + repeated + columns + 3 * each)
    # The prefix pass has these of answers and of the prompt, beside the gradients of the first.
    second = tokens * (2 * each + 3) + answers * (columns + each) + prompt * (repeated + 2 * each)
    expected = 4 * size * at_once * max(first, second if answers else 0)
    assert expected <= found <= 1.06 * expected
