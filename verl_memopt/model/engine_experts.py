"""Experts of a model that transformers computes, with our products: for bytes, and for adapters, which transformers has not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_memopt.memory.expert_lora_torch import factors_and_scales
from verl_memopt.memory.recompute_elementwise_torch import wide_dtype
from verl_memopt.model.experts import Experts, Mixture, TiledExperts, stored_experts
from verl_memopt.model.experts_beside import ExpertsBeside


def compute_as_ours(block: Any) -> None:
    """Let the experts of a block of transformers, if it has any, compute as ours do. Their router stays that of transformers."""
    mixture = _mixture_of(block)
    if mixture is None:
        return

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        TiledExperts(mixture()).add_output(hidden, out, (chosen, weights.to(wide_dtype(weights.dtype))))
        return out

    (block.experts if hasattr(block, "experts") else block.mlp.experts).forward = forward


def _mixture_of(block: Any) -> Any:
    # Returns a function that reads the tensors of the experts, without those of a shared expert.
    if hasattr(block, "experts"):
        kind = ExpertsBeside.kind_of(block.router)

        def beside() -> Mixture:
            (weights, stored), (factors, scales) = stored_experts(block.experts, kind), factors_and_scales(block.experts)
            return Mixture(stored, (block.router.proj.weight, *weights, *factors), scales=scales)

        return beside
    if not hasattr(block.mlp, "experts"):
        return None
    own = Experts(block.mlp, None)

    def alone() -> Mixture:
        whole = own.mixture
        return Mixture(whole.kind, whole.tensors[: whole.num_routed], scales=whole.scales)

    return alone
