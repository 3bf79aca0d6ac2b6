from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.forests import forests
from verl_memopt.model import delta_rule
from verl_memopt.model.delta_rule import DeltaShape, gated_delta_rule
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.state_chunks import TAIL, state_chunks, state_tiles

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=5, value_dim=3)
CHANNELS = 2 * SHAPE.keys + SHAPE.values

SIZES = ((16,), (32,), (64,), (64, 32))


def inputs(tokens, seed=0, dtype=torch.float64):
    """Gives qkv, b, a, filters, A_log and dt_bias."""
    generator = torch.Generator().manual_seed(seed)
    heads = SHAPE.value_heads
    sizes = (tokens, CHANNELS), (tokens, heads), (tokens, heads), (CHANNELS, 1, TAIL + 1), (heads,), (heads,)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def by_token(qkv, b, a, filters, a_log, dt_bias):
    """Gives the outputs of a row, token by token, as the formula has it."""
    tokens, repeats = len(qkv), SHAPE.value_heads // SHAPE.key_heads
    padded = torch.cat([qkv.new_zeros(TAIL, CHANNELS), qkv])
    mixed = torch.nn.functional.silu(sum(padded[tap : tap + tokens] * filters[:, 0, tap] for tap in range(TAIL + 1)))
    q, k, v = mixed.split([SHAPE.keys, SHAPE.keys, SHAPE.values], 1)
    q, k = (states.view(tokens, SHAPE.key_heads, -1).repeat_interleave(repeats, 1) for states in (q, k))
    q, k = (states / (states.square().sum(-1, keepdim=True) + 1e-6).sqrt() for states in (q, k))
    q, v = q / SHAPE.key_dim**0.5, v.view(tokens, SHAPE.value_heads, -1)
    decay = (-a_log.exp() * torch.nn.functional.softplus(a + dt_bias)).exp()
    state, outputs = qkv.new_zeros(SHAPE.state), []
    for at in range(tokens):
        state = state * decay[at][:, None, None]
        new = b[at].sigmoid()[:, None] * (v[at] - (state * k[at][:, :, None]).sum(1))
        state = state + k[at][:, :, None] * new[:, None]
        outputs.append((state * q[at][:, :, None]).sum(1))
    return torch.stack(outputs).flatten(1)


def paths(layout):
    """Gives the tokens on the path to each token that no other token sees, itself included."""
    places = np.arange(len(layout.stops))
    seen = [np.flatnonzero((places <= token) & (layout.stops > token)) for token in places]
    inner = {tuple(path[:-1]) for path in map(tuple, seen)}
    return [torch.from_numpy(path) for path in seen if tuple(path) not in inner]


def gradients(outputs, tensors, weights):
    return torch.autograd.grad((outputs * weights).sum(), tensors)


def assert_exact(layout, found, tensors, seed=0):
    """Compare outputs [T, n] and gradients with those of each path alone."""
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    total, done = 0, set()
    for path in paths(layout):
        alone = by_token(*(tensor[path] for tensor in tensors[:3]), *tensors[3:])
        torch.testing.assert_close(found[path], alone, rtol=0, atol=1e-12)
        new = [place for place, token in enumerate(path.tolist()) if token not in done]
        done |= set(path.tolist())
        total = total + (alone[new] * weights[path[new]]).sum()
    assert len(done) == len(found)
    for one, other in zip(gradients(found, tensors, weights), torch.autograd.grad(total, tensors), strict=True):
        assert (one - other).norm() <= 1e-11 * max(other.norm(), 1e-3)


def rule(layout, tensors, sizes=(64, 32)):
    return gated_delta_rule(*tensors[:3], tuple(tensors[3:]), state_chunks(layout, None, sizes), SHAPE)[0]


@pytest.fixture(params=[1, 2**16, 2**23], ids=["a chunk at a time", "some", "all at once"])
def elements(request, monkeypatch):
    monkeypatch.setitem(delta_rule.ELEMENTS, "cpu", request.param)


GROUPS = [
    [(1, ())],
    [(130, (3, 64, 1, 65))],
    [(2, (1, 2, 70)), (63, (5, 5)), (1, (4,)), (64, (1, 1, 100))],
    [(0, (3, 66)), (200, ())],
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("groups", GROUPS)
def test_prompts_and_answers_are_computed_as_rows_alone_token_by_token(groups, sizes, elements):
    layout = PrefixLayout.of(tuple(groups))
    tensors = inputs(len(layout.stops))
    assert_exact(layout, rule(layout, tensors, sizes), tensors)


@settings(max_examples=30, deadline=None)
@given(
    forest=forests(size=40).filter(lambda forest: forest.places),
    sizes=st.sampled_from(((4,), (16,), (64, 32))),
    seed=st.integers(0, 9),
)
def test_trees_are_computed_as_their_paths(forest, sizes, seed):
    layout = forest.pack().layout
    tensors = inputs(len(layout.stops), seed)
    assert_exact(layout, rule(layout, tensors, sizes), tensors)


@settings(max_examples=30, deadline=None)
@given(forest=forests(size=20).filter(lambda forest: forest.places), size=st.sampled_from((1, 3, 17)), seed=st.integers(0, 9))
def test_tiles_hand_states_on(forest, size, seed):
    layout = forest.pack().layout
    tensors = inputs(len(layout.stops), seed)
    tails, states, found = [], [], []
    for tile in state_tiles(layout, size):
        given = None if not len(tile.given) else tuple(torch.cat(some)[tile.given] for some in (tails, states))
        own = [tensor[tile.rows] for tensor in tensors[:3]]
        out, tail, state = gated_delta_rule(*own, tuple(tensors[3:]), tile.chunks, SHAPE, given)
        found.append(out)
        tails.append(tail)
        states.append(state)
    assert_exact(layout, torch.cat(found), tensors)


def test_no_token_of_a_row_changes_the_next_row():
    layout = PrefixLayout.of(((7, ()), (70, ())))
    tensors = inputs(77)
    first = rule(layout, tensors)
    before = gradients(first[7:], tensors[:3], torch.ones_like(first[7:]))
    with torch.no_grad():
        for tensor in tensors[:3]:
            tensor[:7] += 1
    second = rule(layout, tensors)
    assert torch.equal(first[7:], second[7:])
    for one, other in zip(before, gradients(second[7:], tensors[:3], torch.ones_like(second[7:])), strict=True):
        assert torch.equal(one, other)
        assert not one[:7].any()


def test_equal_answers_give_the_prompt_the_gradient_of_one_as_often():
    tensors = inputs(20)
    answer = [tensor.detach()[12:] for tensor in tensors[:3]]
    found = []
    for count in (1, 3):
        own = [
            torch.cat([tensor.detach()[:12], *[part] * count]).requires_grad_()
            for tensor, part in zip(tensors, answer, strict=False)
        ]
        out = rule(PrefixLayout.of(((12, (8,) * count),)), [*own, *tensors[3:]])
        found.append([grad[:12] for grad in torch.autograd.grad(out[12:].sum(), own)])
    for one, three in zip(*found, strict=True):
        torch.testing.assert_close(3 * one, three, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_in_fp32_all_gradients_are_near_the_exact_ones_however_strong_the_decay(scale):
    exact = inputs(300, seed=1)
    with torch.no_grad():
        exact[0] *= scale
        exact[4].copy_(torch.linspace(0.01, 16, SHAPE.value_heads).log())
    out = by_token(*exact)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    short = [tensor.detach().float().requires_grad_() for tensor in exact]
    found = rule(PrefixLayout.of(((300, ()),)), short)
    assert (found - out).norm() <= 5e-7 * out.norm()
    for one, other in zip(gradients(found, short, weights.float()), gradients(out, exact, weights), strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm()


def test_in_half_precision_states_stay_in_fp32_and_strong_decays_finite():
    tensors = inputs(200, dtype=torch.bfloat16)
    with torch.no_grad():
        tensors[4].fill_(np.log(16.0))
    chunks = state_chunks(PrefixLayout.of(((200, ()),)))
    out, tails, states = gated_delta_rule(*tensors[:3], tuple(tensors[3:]), chunks, SHAPE)
    assert (out.dtype, tails.dtype, states.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert all(grad.isfinite().all() for grad in gradients(out, tensors, torch.ones_like(out)))


@settings(max_examples=50, deadline=None)
@given(forest=forests(size=60).filter(lambda forest: forest.places), size=st.sampled_from((4, 16, 64)), most=st.integers(1, 9))
def test_each_token_is_in_one_chunk_whose_parent_is_in_the_round_before(forest, size, most):
    layout = forest.pack().layout
    chunks = state_chunks(layout, None, (size,))
    own = chunks.own[chunks.own > 0] - chunks.first_row
    assert sorted(own.tolist()) == list(range(len(layout.stops)))
    for chunk, above in enumerate(chunks.parent.tolist()):
        assert chunks.rounds[chunk] == (0 if above < 0 else chunks.rounds[above] + 1)
    batches = chunks.batches(most)
    assert [batch.chunks.start for batch in batches] == [0, *(batch.chunks.stop for batch in batches[:-1])]
    for batch in batches:
        whole = [part.first and part.last for part in batch.parts]
        assert all(whole) or len(whole) == 1
        assert all(one.chunks.stop == other.chunks.start for one, other in pairwise(batch.parts))
