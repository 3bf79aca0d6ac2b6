"""Experts beside the MLP of a block, as in Gemma 4 26B: both read the sum after attention, each through a norm of its own.

The router reads the same sum z through an RMS norm whose weight is a scale [h] over the square root of h. Of the experts' inputs
only z is kept for backward, which other parts of the block keep too, and which experts each token went to. With ``tiled_mlp`` off
the outputs of gate and up are kept too. Backward computes both norms, the router and the experts' values again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from verl_memopt.memory.expert_lora_torch import factors_and_scales
from verl_memopt.memory.recompute_elementwise_torch import RMSNorm, gate_of, keep, kept, norm_and_weight, sum_of, wide_dtype
from verl_memopt.model.experts import Mixture, TiledExperts, stored_experts
from verl_memopt.model.mixture_kind import MixtureKind, Router, SiluGate
from verl_memopt.model.router_replay import LayerRoutes


class ExpertsBeside(nn.Module):
    """The experts of a block that has an MLP too. Their router is a module of the block.

    Its parameters are ``gate_up_proj`` [E, 2 x I, h] and ``down_proj`` [E, h, I].
    """

    def __init__(self, source: Any, router: Any, options: Any) -> None:
        """``source`` and ``router`` are the modules of transformers, and ``options`` are the block's ``BlockOptions``."""
        super().__init__()
        self.source_class, self.options = type(source).__name__, options
        self.gate_up_proj, self.down_proj = source.gate_up_proj, source.down_proj
        self.kind = self.kind_of(router)
        self.place = 0
        """The number of its block, set by the decoder."""

    @staticmethod
    def kind_of(router: Any) -> MixtureKind:
        gate = gate_of(router.config)
        assert gate is not None, "its activation is known"
        return MixtureKind(Router(router.config.top_k_experts, True), SiluGate(gate))

    def forward(self, z: Tensor, norm: Any, router: Any, routed: LayerRoutes | None = None) -> Tensor:
        """Return the experts' output [T, h] for z [T, h], the input of ``norm`` and of the router."""
        rms_norm, weight = norm_and_weight(norm)
        shape = _Shape(self.kind, self.options.mlp_tiles or 1, self.options.mlp_tiles is None, rms_norm, RMSNorm(router.eps))
        # In fp32 or wider, which the norm of the router's input multiplies before it rounds.
        scale = router.scale.to(wide_dtype(z.dtype)) * router.scalar_root_size
        (weights, kind), (factors, scales) = stored_experts(self, self.kind), factors_and_scales(self)
        shape = shape._replace(kind=kind, scales=scales)
        tensors = weight, scale, router.proj.weight, router.per_expert_scale, *weights, *factors
        with torch.no_grad():
            scores = shape.router.scores(_normed(z, scale, shape.of_router), tensors[2])
            chosen = self.kind.router.choose(scores) if routed is None else routed.choose(self.kind.router, scores)
        # Before the products, so that the second forward of a checkpointed block stops here if gate and up are not kept.
        node = keep(z, *tensors, chosen)
        return _ExpertsBeside.apply(shape, node, [scores, chosen], z, *tensors)


class _Shape(NamedTuple):
    kind: MixtureKind
    tiles: int
    keeps: bool
    """Whether the outputs of gate and up are kept."""
    norm: RMSNorm
    of_router: RMSNorm
    scales: tuple[float, ...] = ()
    """Those of adapters, as in :class:`Mixture`."""

    @property
    def router(self) -> Any:
        return self.kind.router


def _normed(z: Tensor, weight: Tensor, norm: RMSNorm) -> Tensor:
    return norm.compute((z,), (weight,))


class _ExpertsBeside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        shape: _Shape,
        node: Any,
        routes: list[Tensor],
        z: Tensor,
        weight: Tensor,
        scale: Tensor,
        projection: Tensor,
        by_expert: Tensor,
        *experts: Tensor,
    ) -> Tensor:
        ctx.shape, ctx.kept, ctx.gates = shape, node, None
        # Popped, so that the caller's list does not keep the scores.
        chosen, scores = routes.pop(), routes.pop()
        weights = shape.router.weights(scores, chosen) * by_expert[chosen.long()].to(scores.dtype)
        del scores
        gates = None
        if shape.keeps and node is not None:
            gates = z.new_empty(chosen.numel(), experts[0].shape[1])
            ctx.save_for_backward(gates)
        out = torch.zeros_like(z)
        mixture = Mixture(shape.kind, (projection, *experts), scales=shape.scales)
        TiledExperts(mixture, shape.tiles).add_output(_normed(z, weight, shape.norm), out, (chosen, weights), gates)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, scale, projection, by_expert, *own, chosen = kept(ctx)
        shape, needed, index = ctx.shape, ctx.needs_input_grad[3:], chosen.long()
        gates = ctx.saved_tensors[0] if shape.keeps else None
        scores = shape.router.scores(_normed(z, scale, shape.of_router), projection)
        shares, of_chosen = shape.router.weights(scores, chosen), by_expert[index].to(scores.dtype)
        mixture = Mixture(shape.kind, (projection, *own), scales=shape.scales)
        experts = TiledExperts(mixture, shape.tiles, (False, *needed[5:]))
        normal = _normed(z, weight, shape.norm)
        grad_weights = experts.backward(grad.contiguous(), normal, True, True, chosen, gates, shares * of_chosen)
        by_expert_grad = torch.zeros_like(by_expert, dtype=scores.dtype)
        by_expert_grad.index_add_(0, index.flatten(), (grad_weights * shares).flatten())
        grad_logits = shape.router.differentiate(grad_weights * of_chosen, scores, chosen).to(z.dtype)
        projection_grad = grad_logits.t() @ _normed(z, scale, shape.of_router) if needed[3] else None
        through, cuts = grad_logits @ projection, [slice(0, len(z))]
        pairs = (weight, needed[1]), (scale, needed[2])
        sums = [sum_of(of, cuts, z) if wanted else None for of, wanted in pairs]
        shape.of_router.differentiate(through, (z,), (scale,), (through,), (sums[1],))
        # ``normal`` is the gradient of the norm, and becomes that of z.
        shape.norm.differentiate(normal, (z,), (weight,), (normal,), (sums[0],), through)
        weight_grad, scale_grad = (
            None if total is None else total.to(of.dtype) for total, of in zip(sums, (weight, scale), strict=True)
        )
        of_router = projection_grad, by_expert_grad.to(by_expert.dtype) if needed[4] else None
        return None, None, None, normal, weight_grad, scale_grad, *of_router, *experts.gradients()[1:]
