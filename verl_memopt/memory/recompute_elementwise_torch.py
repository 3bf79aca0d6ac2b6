"""Recomputed norms, rotations and activations: a block keeps their inputs, and backward computes their outputs again.

Bytes saved: let A be the bytes that a block of Qwen3 keeps without the knob, and A' those that it keeps with it. A' is less
than half of A in bfloat16. Without activation checkpointing the peak falls by (L - 1) x (A - A'). The last block sets the peak.
Its backward walks over tiles of tokens, so it holds less too, with checkpointing as well. ``memory/formulas.py`` has A, A' and
what the last block holds at each moment. On a GPU where functions are not compiled, elementwise tiles add up to 128 MiB; on a
CPU 1.5 MiB, and compiled nothing.

Exact, except for the order of sums. A norm's gradient is computed in fp32 throughout. Rotations round once. A weight's gradient
is summed over tiles of 2,048 tokens (8,192 on a GPU) in fp32, which in half precision rounds it once more. Source: arXiv
2205.05198.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from verl_memopt.memory.lora_torch import LoraLinear
from verl_memopt.memory.recomputation import (
    Recomputable,
    RMSNorm,
    Rows,
    Tensors,
    WeightSum,
    keep,
    kept,
    product_tiles,
    zeros_to_sum,
)
from verl_memopt.model.families import OWN_BLOCKS

KEY = "actor_rollout_ref.model.recompute_elementwise"

logger = logging.getLogger(__name__)


def can_recompute(blocks: Iterable[nn.Module], trained: bool, key: str = KEY) -> bool:
    """Return whether all blocks of a Hugging Face model can recompute their cheap values; warn where one cannot.

    Args:
        blocks: The blocks, as transformers made them.
        trained: false for a model that only ever runs without gradients; its layers may then be of any kind (quantised).
        key: The setting to name in the warning.
    """
    unknown = why_kept(blocks, trained)
    if unknown is not None:
        logger.warning("%s=true: %s; the blocks of this model keep these values", key, unknown)
    return unknown is None


def why_kept(blocks: Iterable[nn.Module], trained: bool) -> str | None:
    """Return why the cheap values of some blocks cannot be computed again; None if they can. As :func:`can_recompute`."""
    return next((reason for block in blocks if (reason := _unlike(block, trained))), None)


def _unlike(block: Any, trained: bool) -> str | None:
    name = type(block).__name__
    if name not in OWN_BLOCKS:
        return f"{name} is not one of {', '.join(OWN_BLOCKS)}"
    if block.self_attn.config.hidden_act not in ("silu", "swish"):
        return f"{name} has the activation {block.self_attn.config.hidden_act}, not silu"
    layers = [module for module in block.modules() if hasattr(module, "in_features")]
    other = next((layer for layer in layers if trained and type(layer) not in (nn.Linear, LoraLinear)), None)
    return None if other is None else f"{name} has a layer of class {type(other).__name__}"


def recomputed_outputs(
    recomputable: Recomputable,
    sources: tuple[Tensor, ...],
    parameters: tuple[Tensor, ...],
    layers: Sequence[Any],
    rows: Rows | None = None,
    row_layers: Sequence[Any] = (),
) -> list[Tensor]:
    """Return the output [T, m] of each linear layer over one value [T, n], which backward computes again.

    The value is computed from sources [T, n], which are kept in its place, and parameters [n]. Layers may have adapters; without
    gradients they may be of any kind. Those among ``row_layers`` return [R, m], of the ``rows`` alone; None for all.
    """

    def on_rows(some: Sequence[Any]) -> list[bool]:
        return [any(layer is one for one in row_layers) for layer in some]

    if not torch.is_grad_enabled():
        # Without gradients nothing reads the sources again, so the value may be written over the first of them.
        value = recomputable.compute(sources, parameters, sources[0] if recomputable.overwrites else None)
        part = value if rows is None else value[rows.index]
        return [layer(part if marked else value) for layer, marked in zip(layers, on_rows(layers), strict=True)]
    adapted = [layer for layer in layers if isinstance(layer, LoraLinear) and layer.active]
    factors = {id(layer): layer.factors for layer in adapted}
    weights = [layer.weight for layer in layers] + [down for down, _ in factors.values()]
    outs = list(recomputed_products(recomputable, sources, parameters, weights, rows, on_rows([*layers, *adapted])))
    thin = dict(zip(map(id, adapted), outs[len(layers) :], strict=True))
    for place, layer in enumerate(layers):
        if layer.bias is not None:
            outs[place] = outs[place] + layer.bias
        if id(layer) in thin:
            outs[place] = outs[place] + layer.scale * linear(thin[id(layer)], factors[id(layer)][1])
    return outs[: len(layers)]


# Recomputation of cheap values: products keep what a value is computed from, and compute it again in backward.
#
# The output of a norm and a gated activation are as wide as their inputs and cost no product. Autograd would keep them, and what
# lies between, until backward. Here the product that reads such a value keeps the inputs instead. Megatron-Core calls this
# output-discarding recomputation (``recompute_modules=[layernorm, mlp_act]``; selective recomputation is arXiv 2205.05198).


def recomputed_products(
    recomputable: Recomputable,
    sources: Tensors,
    parameters: Tensors,
    weights: Sequence[Tensor],
    rows: Rows | None = None,
    of_rows: Sequence[bool] = (),
) -> Tensors:
    """Return the products of a value with some weights; backward computes the value again.

    Keeps sources [T, n], parameters [n] and weights [m, n] for backward, and not the value [T, n]. Nothing else may use sources
    that the recomputable overwrites. The gradient of a weight is summed over tiles of rows, in fp32 where its dtype is narrower.

    Returns:
        One product for each weight: [T, m], or [R, m] for a weight marked in ``of_rows``, which is multiplied with the ``rows``
        of the value only. At least one weight is not marked.
    """
    tensors, marked = (*sources, *parameters, *weights), tuple(of_rows) if rows is not None else (False,) * len(weights)
    assert len(marked) == len(weights), (marked, len(weights))
    assert not all(marked)
    return _RecomputedProducts.apply(recomputable, len(parameters), rows, marked, keep(*tensors), *tensors)


class _RecomputedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, recomputable: Recomputable, parameters: int, rows: Rows | None, marked: Sequence[bool], node: Any, *tensors: Any
    ) -> Tensors:
        ctx.recomputable, ctx.parameters, ctx.rows, ctx.marked, ctx.kept = recomputable, parameters, rows, marked, node
        first, second = recomputable.sources, recomputable.sources + parameters
        value = recomputable.compute(tensors[:first], tensors[first:second])
        part = value if rows is None else value[rows.index]
        weights = zip(tensors[second:], marked, strict=True)
        return tuple(torch.mm(part if of_rows else value, weight.t()) for weight, of_rows in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        recomputable, tensors, needed = ctx.recomputable, kept(ctx), ctx.needs_input_grad[5:]
        first, second = recomputable.sources, recomputable.sources + ctx.parameters
        sources, parameters, weights = tensors[:first], tensors[first:second], tensors[second:]
        further = any(needed[:second])
        into = sources if recomputable.overwrites else tuple(torch.empty_like(source) for source in sources if further)
        sums = [zeros_to_sum(one) if wanted else None for one, wanted in zip(parameters, needed[first:second], strict=True)]
        weight_grads = [WeightSum(weight) if wanted else None for weight, wanted in zip(weights, needed[second:], strict=True)]
        cuts = product_tiles(sources[0])
        for rows in cuts:
            cut = tuple(source[rows] for source in sources)
            value = recomputable.compute(cut, parameters)
            here, places = (rows, None) if ctx.rows is None else ctx.rows.within(rows)
            above = [grad[here if of_rows else rows] for grad, of_rows in zip(grads, ctx.marked, strict=True)]
            for grad, total, of_rows in zip(above, weight_grads, ctx.marked, strict=True):
                if total is not None:
                    total.add(grad, value[places] if of_rows else value, alone=len(cuts) == 1)
            if further:
                # The value is not read any more, so its memory takes its own gradient from here on.
                _through(above, weights, ctx.marked, places, value)
                recomputable.differentiate(value, cut, parameters, tuple(one[rows] for one in into), sums)
            del value, above  # freed before those of the next tile are allocated
        source_grads = into if further else (None,) * first
        parameter_grads = (None if one is None else one.to(like.dtype) for one, like in zip(sums, parameters, strict=True))
        return *(None,) * 5, *source_grads, *parameter_grads, *(None if one is None else one.gradient() for one in weight_grads)


def _through(
    grads: Sequence[Tensor], weights: Sequence[Tensor], marked: Sequence[bool], places: Tensor | None, out: Tensor
) -> None:
    """Write the sum of the products of gradients and weights into ``out``; marked ones are of the rows at ``places``."""
    triples = list(zip(grads, weights, marked, strict=True))
    whole, part = ([(grad, weight) for grad, weight, of_rows in triples if of_rows is wanted] for wanted in (False, True))
    torch.mm(*whole[0], out=out)
    for grad, weight in whole[1:]:
        torch.addmm(out, grad, weight, out=out)
    if part:
        added = out[places]
        for grad, weight in part:
            torch.addmm(added, grad, weight, out=added)
        out[places] = added


def recomputed_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm [T, n] of x [T, n]; it keeps x and the weight only, and backward computes the norm again."""
    return _RecomputedNorm.apply(x, weight, eps)


class _RecomputedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        return RMSNorm(eps).compute((x,), (weight,))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        into, sums = torch.empty_like(x), zeros_to_sum(weight) if ctx.needs_input_grad[1] else None
        RMSNorm(ctx.eps).differentiate(grad, (x,), (weight,), (into,), (sums,))
        return into, None if sums is None else sums.to(weight.dtype), None
