"""The layers of Qwen3.5 that carry a state (Gated DeltaNet, arXiv 2412.06464), and the gate of its attention, over packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from verl_memopt.memory.fused import over_rows, runs_compiled
from verl_memopt.memory.recompute_elementwise_torch import Tensors, norm_and_weight, normalized, recomputed_outputs, sum_rows
from verl_memopt.model.delta_rule import DeltaShape, gated_delta_rule
from verl_memopt.model.prefix_kv import Prefix
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.state_chunks import TAIL, state_chunks


class GatedDeltaNet(nn.Module):
    def __init__(self, source: Any, recompute: bool) -> None:
        super().__init__()
        self.source_class, self.recompute = type(source).__name__, recompute
        # In the order of transformers, because optimizer states have the order of the parameters.
        self.conv1d, self.dt_bias, self.A_log = source.conv1d, source.dt_bias, source.A_log
        self.norm, self.out_proj = source.norm, source.out_proj
        self.in_proj_qkv, self.in_proj_z = source.in_proj_qkv, source.in_proj_z
        self.in_proj_b, self.in_proj_a = source.in_proj_b, source.in_proj_a
        self.shape = DeltaShape(source.num_k_heads, source.num_v_heads, source.head_k_dim, source.head_v_dim)
        self.layer = source.layer_idx

    def forward(self, x: Tensor, norm: nn.Module, layout: PrefixLayout, prefix_kv: Prefix | None) -> tuple[Tensor, Tensor]:
        """Return the layer's output [T, h] for the T tokens of the pack, and ``x``, as ``Attention`` in ``decoder.py`` does.

        ``x`` [T, h] is the input of ``norm``.
        """
        qkv, z, b, a, x = self._projected(x, norm)
        chunks = state_chunks(layout, None if prefix_kv is None else prefix_kv.given)
        given = None
        if prefix_kv is not None:
            wide = torch.promote_types(qkv.dtype, torch.float32)
            empty = qkv.new_zeros(0, TAIL, qkv.shape[1]), qkv.new_zeros(0, *self.shape.state, dtype=wide)
            given = prefix_kv.states(self.layer, *empty)
        weights = self.conv1d.weight, self.A_log, self.dt_bias
        out, tails, states = gated_delta_rule(qkv, b, a, weights, chunks, self.shape, given)
        if prefix_kv is not None:
            prefix_kv.record(self.layer, tails, states)
        if self.recompute:
            norm_of_heads = GatedNorm(self.norm.variance_epsilon)
            return recomputed_outputs(norm_of_heads, (out, z), (self.norm.weight,), (self.out_proj,))[0], x
        heads = self.norm(*(values.reshape(-1, self.shape.value_dim) for values in (out, z)))
        return self.out_proj(heads.view(out.shape)), x

    def _projected(self, x: Tensor, norm: nn.Module) -> Sequence[Tensor]:
        layers = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        if self.recompute:
            own, weight = norm_and_weight(norm)
            return recomputed_outputs(own, (x,), (weight,), layers, passed=True)
        normal = norm(x)
        return *(layer(normal) for layer in layers), x


@dataclass(frozen=True)
class GatedNorm:
    """The RMS norm of each head of x [T, heads x D] with a weight [D], times silu(z). See :class:`RMSNorm` for the methods."""

    eps: float
    sources: int = 2
    overwrites: bool = False

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
    active = gate.sigmoid()
    torch.mul(grad, active, out=into_x)
    torch.mul(grad * x, active * (1 - active), out=into_gate)


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
