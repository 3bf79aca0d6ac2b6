"""What recomputed values are compared with: statements of transformers in plain autograd, in float64 where that is asked for."""

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

EPS = 1e-6
DOUBLE = torch.float64
ROUNDING = 1e-13
"""Relative to a gradient's norm, in float64: sums of thousands of terms in another order."""


def drawn(*shape, seed=0, dtype=DOUBLE, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).mul_(scale).to(dtype).requires_grad_()


def plain_norm(x, weight):
    norm = Qwen3RMSNorm(x.shape[-1], EPS)
    norm.weight = nn.Parameter(weight.detach())
    # Its own statements, except that what it computes in fp32 is float64 where the input is.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def gradients(outs, tensors):
    above = [torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=DOUBLE).to(out.dtype) for out in outs]
    return torch.autograd.grad(outs, tensors, above, allow_unused=True)


def relative(found, expected):
    return float((found - expected).detach().norm() / max(float(expected.detach().norm()), 1e-300))


def saved_by(compute):
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: found.append(tensor) or tensor, lambda tensor: tensor):
        outs = compute()
    return found, outs
