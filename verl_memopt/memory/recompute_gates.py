"""The gates of Qwen3.5, computed again in backward as in :mod:`verl_memopt.memory.recompute_elementwise_torch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from verl_memopt.memory.fused import over_rows, runs_compiled
from verl_memopt.memory.recompute_elementwise_torch import Tensors, normalized, sum_rows


@dataclass(frozen=True)
class GatedNorm:
    """The RMS norm of each head of x [T, heads x D] with a weight [D], times silu(z). See :class:`RMSNorm` for the methods.

    Set ``overwrites=False`` if z shares its memory with a tensor that another backward reads.
    """

    eps: float
    overwrites: bool = True
    sources: int = 2

    def compute(self, sources: Tensors, parameters: Tensors, out: Tensor | None = None) -> Tensor:
        (x, z), (weight,) = sources, parameters
        out = torch.empty_like(x) if out is None else out
        over_rows(_gated_norm, (x, z, out), weight, self.eps)
        return out

    def differentiate(
        self,
        grad: Tensor,
        sources: Tensors,
        parameters: Tensors,
        into: Tensors,
        sums: Sequence[Tensor | None],
        plus: Tensor | None = None,
    ) -> None:
        assert plus is None, "only a norm adds another gradient to its own"
        (weight,), total = parameters, sums[0]
        if total is not None and runs_compiled(grad):
            # A separate statement, because compiled code could sum after `grad` is overwritten.
            over_rows(_gated_norm_weight_gradient, (grad, *sources), self.eps, total)
            total = None
        over_rows(_gated_norm_gradient, (grad, *sources, *into), weight, self.eps, total)


@dataclass(frozen=True)
class SigmoidGate:
    """x * sigmoid(gate), both [T, n]. See :class:`RMSNorm` for the methods."""

    sources: int = 2
    overwrites: bool = False  # attention reads its output again in backward

    def compute(self, sources: Tensors, parameters: Tensors, out: Tensor | None = None) -> Tensor:
        x, gate = sources
        out = torch.empty_like(x) if out is None else out
        over_rows(_sigmoid_gate, (x, gate, out), narrow=True)
        return out

    def differentiate(
        self,
        grad: Tensor,
        sources: Tensors,
        parameters: Tensors,
        into: Tensors,
        sums: Sequence[Tensor | None],
        plus: Tensor | None = None,
    ) -> None:
        assert plus is None, "only a norm adds another gradient to its own"
        over_rows(_sigmoid_gate_gradient, (grad, *sources, *into), narrow=True)


def _sigmoid_gate(x: Tensor, gate: Tensor, out: Tensor) -> None:
    torch.mul(x, gate.sigmoid(), out=out)


def _sigmoid_gate_gradient(grad: Tensor, x: Tensor, gate: Tensor, into_x: Tensor, into_gate: Tensor) -> None:
    # The first result may overwrite ``grad`` and the second one ``gate``.
    active = gate.sigmoid()
    torch.mul(grad * x, active * (1 - active), out=into_gate)
    torch.mul(grad, active, out=into_x)


def _gated_norm(x: Tensor, z: Tensor, out: Tensor, weight: Tensor, eps: float) -> None:
    heads = x.unflatten(1, (-1, weight.shape[0]))
    normal, _ = normalized(heads, eps)
    # Rounded before it is multiplied by the weight, and again before the gate, as in transformers.
    value = (normal.to(x.dtype) * weight).flatten(1)
    out.copy_(value * silu(z.to(normal.dtype)))


def _gated_norm_gradient(
    grad: Tensor, x: Tensor, z: Tensor, into_x: Tensor, into_z: Tensor, weight: Tensor, eps: float, sums: Tensor | None
) -> None:
    heads = x.unflatten(1, (-1, weight.shape[0]))
    normal, inverse = normalized(heads, eps)
    above, gate = grad.to(normal.dtype), z.to(normal.dtype)
    share = gate.sigmoid()
    active = gate * share
    into_z.copy_(above * (normal * weight).flatten(1) * (share + active * (1 - share)))
    product = (above * active).view_as(heads)
    if sums is not None:
        sum_rows(product * normal, sums)
    product = product * weight
    into_x.copy_(((product - normal * (product * normal).mean(-1, keepdim=True)) * inverse).flatten(1))


def _gated_norm_weight_gradient(grad: Tensor, x: Tensor, z: Tensor, eps: float, sums: Tensor) -> None:
    heads = x.unflatten(1, (-1, sums.shape[0]))
    normal, _ = normalized(heads, eps)
    sum_rows((grad.to(normal.dtype) * silu(z.to(normal.dtype))).view_as(heads) * normal, sums)
