"""Layouts and tensors on which kernels of attention are compared, and GPU kernels' contracts fulfilled on a CPU."""

import dataclasses
from contextlib import contextmanager

import torch
from hypothesis import strategies as st

from tests.model.forests import conversations, forests
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.rotary import Rotary

SUFFIXES = st.one_of(st.lists(st.integers(1, 6), max_size=5), st.integers(2, 6).map(lambda count: [4] * count))
SIZES = st.lists(st.tuples(st.integers(1, 9), SUFFIXES.map(tuple)), min_size=1, max_size=4).map(tuple)
"""Sizes of groups: prefixes alone, and prefixes with suffixes of different and of equal lengths."""
SKIPPED = st.one_of(st.just((0,) * 4), st.tuples(*[st.integers(0, 8)] * 4))


def _layout(sizes, skipped):
    """Return a layout in which every other prefix may come from elsewhere."""
    skipped = skipped[: len(sizes)]
    groups = zip(sizes, skipped, strict=True)
    return PrefixLayout.of(
        tuple((prefix % 2 if suffixes and more else prefix, suffixes) for (prefix, suffixes), more in groups), skipped
    )


def _of_forest(forest, pruned):
    pack = forest.pack()
    return pack.last_block.layout if pruned and pack.last_block is not None else pack.layout


# Behind most answers there are so many tokens that a pruned last block skips them.
TURNS = st.lists(st.tuples(st.integers(1, 6), st.integers(12, 24)), min_size=1, max_size=6)
CONVERSATIONS = st.lists(TURNS, min_size=1, max_size=3).map(lambda turns: conversations(7, *turns))
LAYOUTS = st.one_of(
    st.builds(_layout, SIZES, SKIPPED),
    st.builds(_of_forest, forests(rows=12), st.booleans()),
    st.builds(_of_forest, CONVERSATIONS, st.just(True)),
)
"""Layouts of these sizes, with and without skipped tokens, and of forests, whose queries may be anywhere."""
HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)])
"""Query heads and key heads."""


def random_inputs(layout, heads, kv_heads, size=8, dtype=torch.float32, seed=0):
    generator, keys = torch.Generator().manual_seed(seed), sum(layout.trees)
    counts = (sum(layout.segments), heads), (keys, kv_heads), (keys, kv_heads)
    shapes = [(1, tokens, count, size) for tokens, count in counts]
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]


def flat_inputs(layout, heads, kv_heads, **options):
    """Return query [T, heads, size], key and value [T, kv heads, size]."""
    return [tensor[0].transpose(0, 1) for tensor in random_inputs(layout, heads, kv_heads, **options)]


def with_gradients(attend, inputs):
    """Return the output of attention and the gradients of its three inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = attend(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def rotary_of(tokens, size=8, normed=True, dtype=torch.float32, rotated=None):
    """Return random rotary tables for the first ``rotated`` entries of heads (None = for all), with or without norms that have
    weights."""
    generator = torch.Generator().manual_seed(4)
    angles = torch.randn(tokens, (size if rotated is None else rotated) // 2, generator=generator).repeat(1, 2)
    norms = tuple((1 + torch.rand(size, generator=generator)).to(dtype).requires_grad_() if normed else None for _ in range(2))
    return Rotary(angles.cos().to(dtype), angles.sin().to(dtype), norms, 1e-6)


def rotated_before(rotary, layout, query, key):
    """Rotate query and key before attention is called."""
    cos, sin = layout.at_queries(rotary.cos, rotary.sin)
    return dataclasses.replace(rotary, cos=cos, sin=sin).query(query), rotary.key(key)


def with_rotary_gradients(attend, inputs, rotary):
    """Return the output and the gradients of query, key, value and of the norms' weights; attend: (q, k, v) -> output."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = attend(*(leaf * 1 for leaf in leaves))  # of no leaf, as in a model: attention may write over them
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    asked = [*leaves, *(norm for norm in rotary.norms if norm is not None)]
    return [out.detach(), *torch.autograd.grad(out, asked, weights)]


def norm_error(found, expected):
    """Return the norm of the difference as a share of the expected norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def agree(found, expected, tolerance):
    """Return whether outputs agree, and gradients as one vector.

    AttentionArgs few keys a softmax leaves of one gradient the small difference of large terms, whose rounding is of their size.
    """
    apart = [norm_error(found[0], expected[0])]
    if len(found) > 1:
        apart.append(norm_error(*(torch.cat([tensor.flatten() for tensor in some[1:]]) for some in (found, expected))))
    return max(apart) < tolerance


# What torch says of its GPU kernels, written out. Nothing here takes part in how kernels are put together.


def attention_of_one(q, k, v, hidden, scale):
    """Return output [H, L, D] and log-sum-exp [H, L] of queries [H, L, D] and keys [H, M, D]. ``hidden``: bool [L, M]."""
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def gradient_of_one(grad, q, k, v, out, lse, hidden, scale):
    """Return the gradients of q, k and v for a given output and log-sum-exp, which may cover more keys than these."""
    shares = ((q @ k.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf")) - lse[..., None]).exp()
    inner = shares * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    return inner @ k, inner.transpose(-1, -2) @ q, shares.transpose(-1, -2) @ grad


def _hidden(queries, keys, causal, left=-1):
    # The last query of a causal call has the position of the last key.
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    return hidden | (distance > left) if left >= 0 else hidden


def flash_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout, causal, debug,
    *, scale, window_size_left, window_size_right,
):  # fmt: skip
    assert not dropout
    assert not debug
    if cu_seqlens_q is None:
        assert window_size_left == window_size_right == -1
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = attention_of_one(q, k, v, _hidden(q.shape[2], k.shape[2], causal), scale)
        return out.transpose(1, 2), lse.float(), torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)
    assert (max_seqlen_q, max_seqlen_k) == tuple(int(cu_seqlens.diff().max()) for cu_seqlens in (cu_seqlens_q, cu_seqlens_k))
    assert window_size_right == (0 if causal else -1)
    outs, lses = [], []
    for q_, k_, v_ in _segments(q, k, v, cu_seqlens_q, cu_seqlens_k):
        out, lse = attention_of_one(q_, k_, v_, _hidden(q_.shape[1], k_.shape[1], causal, window_size_left), scale)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    none = torch.empty(0)
    return torch.cat(outs), torch.cat(lses, 1).float(), torch.zeros(2, dtype=torch.uint64), none, none


def flash_backward(
    grad, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout, causal, state, unused,
    *, scale, window_size_left, window_size_right,
):  # fmt: skip
    assert lse.is_contiguous()
    if cu_seqlens_q is None:
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        parts = gradient_of_one(grad, q, k, v, out, lse, _hidden(q.shape[2], k.shape[2], causal), scale)
        return tuple(part.transpose(1, 2) for part in parts)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    assert grad.is_contiguous()
    kv_heads, queries, keys = k.shape[1], cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for place, (q_, k_, v_) in enumerate(_segments(q, k, v, cu_seqlens_q, cu_seqlens_k)):
        here, there = slice(*queries[place : place + 2]), slice(*keys[place : place + 2])
        hidden = _hidden(q_.shape[1], k_.shape[1], causal, window_size_left)
        given = grad[here].transpose(0, 1), q_, k_, v_, out[here].transpose(0, 1), lse[:, here]
        parts = gradient_of_one(*given, hidden, scale)
        dq[here] = parts[0].transpose(0, 1)
        for target, part in zip((dk, dv), parts[1:], strict=True):
            target[there] = part.unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1)
    return dq, dk, dv


def _segments(q, k, v, cu_seqlens_q, cu_seqlens_k):
    repeats = q.shape[1] // k.shape[1]
    sizes = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    for q_, k_, v_ in zip(q.split(sizes[0]), k.split(sizes[1]), v.split(sizes[1]), strict=True):
        yield q_.transpose(0, 1), *(x.transpose(0, 1).repeat_interleave(repeats, 0) for x in (k_, v_))


def efficient_forward(q, k, v, bias, with_lse, dropout=0.0, causal=False, *, scale=None):
    assert bias is None
    assert with_lse
    out, lse = attention_of_one(q, k, v, _hidden(q.shape[2], k.shape[2], causal), scale)
    padded = torch.full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), float("inf"))
    padded[..., : lse.shape[2]] = lse
    return out, padded, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout, needed, causal=False, *, scale=None):
    assert out.transpose(1, 2).is_contiguous()
    assert lse.shape[2] % 32 == 0
    assert lse.is_contiguous()
    assert torch.all(lse[..., q.shape[2] :] == float("inf"))
    hidden = _hidden(q.shape[2], k.shape[2], causal)
    return *gradient_of_one(grad, q, k, v, out, lse[..., : q.shape[2]], hidden, scale), torch.empty(0)


def packed_efficient_forward(
    q, k, v, bias, starts_q, starts_k, max_q, max_k, dropout, mask_type, with_lse=False, *, scale=None, seqlen_k=None,
    window_size=None,
):  # fmt: skip
    assert (bias, dropout, with_lse, seqlen_k, window_size) == (None, 0.0, True, None, None)
    out, lse = (torch.full(sizes, float("nan")) for sizes in (q.shape, (len(starts_q) - 1, q.shape[2], -(-max_q // 32) * 32)))
    for place, (here, there, hidden) in enumerate(_sequences(q, k, v, starts_q, starts_k, max_q, max_k, mask_type)):
        inputs = (x[0, rows].transpose(0, 1) for x, rows in ((q, here), (k, there), (v, there)))
        part, part_lse = attention_of_one(*inputs, hidden, scale)
        out[0, here] = part.transpose(0, 1)
        # Up to a multiple of 32 of its own length, a sequence has infinities; beyond, nothing is written.
        lse[place, :, : -(-len(hidden) // 32) * 32] = float("inf")
        lse[place, :, : len(hidden)] = part_lse
    none = torch.zeros((), dtype=torch.int64)
    return out, lse, none, none, max_q, max_k


def packed_efficient_backward(
    grad, q, k, v, bias, out, starts_q, starts_k, max_q, max_k, lse, dropout, seed, offset, mask_type, bias_needs_gradient,
    *, scale=None, num_splits_key=None, window_size=None, shared_storage_dqdkdv=False,
):  # fmt: skip
    assert (bias, dropout, bias_needs_gradient, num_splits_key, window_size) == (None, 0.0, False, None, None)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert lse.shape == (len(starts_q) - 1, q.shape[2], -(-max_q // 32) * 32)
    parts = [torch.full(x.shape, float("nan")) for x in (q, k, v)]
    for place, (here, there, hidden) in enumerate(_sequences(q, k, v, starts_q, starts_k, max_q, max_k, mask_type)):
        assert torch.all(lse[place, :, len(hidden) : -(-len(hidden) // 32) * 32] == float("inf"))
        given = (x[0, rows].transpose(0, 1) for x, rows in ((grad, here), (q, here), (k, there), (v, there), (out, here)))
        found = gradient_of_one(*given, lse[place, :, : len(hidden)], hidden, scale)
        for target, rows, part in zip(parts, (here, there, there), found, strict=True):
            target[0, rows] = part.transpose(0, 1)
    return *parts, torch.empty(0)


def _sequences(q, k, v, starts_q, starts_k, max_q, max_k, mask_type):
    """Yield the rows of each sequence with its mask, after the checks that the kernels make."""
    assert q.shape[0] == k.shape[0] == v.shape[0] == 1
    assert q.shape[2:] == k.shape[2:] == v.shape[2:]
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert (max_q, max_k) == tuple(int(starts.diff().max()) for starts in (starts_q, starts_k))
    assert (q.shape[1], k.shape[1]) == (starts_q[-1], starts_k[-1])
    for here, there in zip(*(zip(x.tolist(), x.tolist()[1:], strict=False) for x in (starts_q, starts_k)), strict=True):
        yield slice(*here), slice(*there), _hidden(here[1] - here[0], there[1] - there[0], bool(mask_type))


GPU_OPERATORS = {
    "_efficient_attention_forward": packed_efficient_forward,
    "_efficient_attention_backward": packed_efficient_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
}


def _accumulated_in_fp32(function):
    """Wrap an operator to take half precision as GPU kernels do: computed in fp32, rounded once, log-sum-exps in fp32."""

    def run(*args, **kwargs):
        dtype = next(arg.dtype for arg in args if torch.is_tensor(arg))
        if dtype == torch.float32:
            return function(*args, **kwargs)
        wide = (arg.float() if torch.is_tensor(arg) and arg.dtype == dtype else arg for arg in args)
        forward = "forward" in function.__name__
        outs = list(function(*wide, **kwargs))
        for at, out in enumerate(outs):
            if torch.is_tensor(out) and out.dtype == torch.float32 and not (forward and at == 1):
                outs[at] = out.to(dtype)
        return tuple(outs)

    return run


@contextmanager
def gpu_operators_on_a_cpu():
    """Give torch's GPU-only operators an implementation on CPUs in the body."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in GPU_OPERATORS.items():
            library.impl(name, _accumulated_in_fp32(function), "CPU")
        yield
