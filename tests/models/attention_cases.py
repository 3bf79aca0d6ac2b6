"""Trees and tensors on which kernels of attention are compared."""

import torch
from hypothesis import strategies as st

BRANCHES = st.one_of(st.lists(st.integers(1, 6), max_size=5), st.integers(2, 6).map(lambda count: [4] * count))
SIZES = st.lists(st.tuples(st.integers(1, 9), BRANCHES.map(tuple)), min_size=1, max_size=4).map(tuple)
"""Sizes of trees: trunks alone, and trunks with branches of different and of equal lengths."""
HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)])
"""Query heads and key heads."""


def random_inputs(trees, heads, kv_heads, size=8, dtype=torch.float32, seed=0):
    """Gives query [1, heads, T, size], key and value [1, kv heads, T, size], tokens lying apart as models have them."""
    generator, tokens = torch.Generator().manual_seed(seed), sum(trees.segments)
    shapes = [(1, tokens, count, size) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]


def with_gradients(attend, inputs):
    """Gives the output [T, heads, D] of attention over tokens and the gradients of its three inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = attend(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def norm_error(found, expected):
    """Gives the norm of the difference, as a share of the norm of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
