"""Recomputed norms, rotary embeddings and activations: a block keeps their inputs, and backward computes them again.

Bytes saved: let A be the bytes that a block of Qwen3 keeps without the knob, A' the bytes that it keeps with the knob (less than
half in bfloat16), and L the number of blocks. Without activation checkpointing the peak falls by (L - 1) x (A - A'). The backward
of the last block runs over tiles of tokens, so it holds less too. ``plan/formulas.py`` has A, A' and what the last block holds at
each moment.

Results are exact, except for the order of sums. The gradient of a norm is computed in fp32 throughout. Rotary embeddings round
once. The gradient of a weight is summed over tiles of at most 2,048 tokens (8,192 on a GPU) in fp32. In half precision this
rounds it once more. Source: arXiv 2205.05198.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu, linear, silu

from verl_memopt.memory import kernels
from verl_memopt.memory.fused import JOINS, joined, launched, over_rows, runs_compiled
from verl_memopt.memory.kernels import has_kernel
from verl_memopt.memory.lora_torch import LoraLinear
from verl_memopt.memory.quantized_frozen_torch import Packing, stored_weight, whole_weight
from verl_memopt.memory.recompute_elementwise import PRODUCT_ROWS, SUM_ELEMENTS
from verl_memopt.model.families import own_blocks

KEY = "actor_rollout_ref.model.recompute_elementwise"

logger = logging.getLogger(__name__)


def can_recompute(blocks: Iterable[nn.Module], trained: bool, key: str = KEY) -> bool:
    """Return whether all blocks (transformers modules) can recompute their cheap values. If not, warn and name ``key``.

    A model that is not ``trained`` only runs without gradients, so its layers may be of any kind (such as quantised).
    """
    unknown = why_kept(blocks, trained)
    if unknown is not None:
        logger.warning("%s=true: %s; the blocks of this model keep these values", key, unknown)
    return unknown is None


def why_kept(blocks: Iterable[nn.Module], trained: bool) -> str | None:
    return next((reason for block in blocks if (reason := _unlike(block, trained))), None)


def _unlike(block: Any, trained: bool) -> str | None:
    name = type(block).__name__
    if name not in own_blocks():
        return f"{name} is not one of {', '.join(own_blocks())}"
    config = _config(block)
    if gate_of(config) is None:
        return f"{name} has the activation {_activation(config)}, not {', '.join(GATES)}"
    layers = [module for module in block.modules() if hasattr(module, "in_features")]
    other = next((layer for layer in layers if trained and type(layer) not in (nn.Linear, LoraLinear)), None)
    return None if other is None else f"{name} has a layer of class {type(other).__name__}"


def is_silu(block: Any) -> bool:
    return _activation(_config(block)) in ("silu", "swish")


def _config(block: Any) -> Any:
    # Every block has a module that knows the config, but not the same one in all families.
    return next(module.config for module in block.modules() if hasattr(module, "config"))


def recomputed_outputs(
    recomputable: Recomputable,
    sources: tuple[Tensor, ...],
    parameters: tuple[Tensor, ...],
    layers: Sequence[Any],
    rows: Rows | None = None,
    row_layers: Sequence[Any] = (),
    passed: bool = False,
) -> list[Tensor]:
    """Apply linear layers to one value [T, n] that backward computes again, and return their outputs [T, m].

    Args:
        recomputable: How the value is computed from its sources.
        sources: Tensors [T, n] from which the value is computed. They are kept instead of the value.
        parameters: Tensors [n], such as a norm's weight.
        layers: Linear layers, with or without adapters. Without gradients they may be of any kind.
        rows: Rows for ``row_layers``; None = all.
        row_layers: Those of ``layers`` that compute only ``rows``, with outputs [R, m].
        passed: Also return the first source, as the last output. The gradient of this output is added while the source's gradient
            is computed, so that autograd needs no separate sum.
    """

    def on_rows(some: Sequence[Any]) -> list[bool]:
        return [any(layer is row_layer for row_layer in row_layers) for layer in some]

    if not torch.is_grad_enabled():
        # Without gradients nothing reads the sources again, so the value may overwrite the first source.
        value = recomputable.compute(sources, parameters, sources[0] if recomputable.overwrites else None)
        part = value if rows is None else value[rows.index]
        are_plain = rows is None and all(type(layer) is nn.Linear for layer in layers)
        runs = in_runs([layer.weight for layer in layers], [layer.bias for layer in layers]) if are_plain else []
        if len(runs) == 1:
            outs = list(products_of(value, [layer.weight for layer in layers], [layer.bias for layer in layers]))
        else:
            outs = [layer(part if marked else value) for layer, marked in zip(layers, on_rows(layers), strict=True)]
        return [*outs, sources[0]] if passed else outs
    # A of an adapter is one more matrix product with the value. B is applied to its thin output below.
    adapted = [layer for layer in layers if isinstance(layer, LoraLinear) and layer.active]
    factors = {id(layer): layer.factors for layer in adapted}
    stored = [*map(stored_weight, layers), *((down, None) for down, _ in factors.values())]
    weights, packings = zip(*stored, strict=True)
    biases = [layer.bias for layer in layers] + [None] * len(factors)
    marked = on_rows([*layers, *adapted])
    outs = list(recomputed_products(recomputable, sources, parameters, weights, rows, marked, packings, biases, passed))
    # Outputs of A, which were computed together with the layers from the recomputed value.
    thin = dict(zip(map(id, adapted), outs[len(layers) :], strict=False))
    for place, layer in enumerate(layers):
        if id(layer) in thin:
            outs[place] = outs[place] + layer.scale * linear(thin[id(layer)], factors[id(layer)][1])
    return [*outs[: len(layers)], *outs[len(weights) :]]


# Recomputation of cheap values: a matrix product keeps the tensors from which its input is computed, not the input.
#
# Outputs of norms and gated activations are as wide as their inputs, and computing them takes no matrix product. Autograd would
# keep them and all intermediate tensors until backward. Here the product that reads such a value keeps the value's inputs
# instead. Megatron-Core calls this output-discarding recomputation (``recompute_modules=[layernorm, mlp_act]``; selective
# recomputation is arXiv 2205.05198).


def recomputed_products(
    recomputable: Recomputable,
    sources: Tensors,
    parameters: Tensors,
    weights: Sequence[Tensor],
    rows: Rows | None = None,
    only_rows: Sequence[bool] = (),
    packings: Sequence[Packing | None] | None = None,
    biases: Sequence[Tensor | None] = (),
    passed: bool = False,
) -> Tensors:
    """Multiply a value by some weights. Backward computes the value again.

    Sources [T, n], parameters [n] and weights [m, n] are kept for backward, but not the value [T, n]. Nothing else may use
    sources that the recomputable overwrites. The gradient of a weight is summed over tiles of rows, in fp32 or wider. Weights
    that are neighbours in memory are multiplied in one product.

    Returns:
        One product per weight: [T, m], or [R, m] if the weight is marked in ``only_rows``, because it is multiplied only with the
        ``rows`` of the value. At least one weight must not be marked. A weight with a packing is decoded for each product. If
        ``passed``, the last output is the first source.
    """
    packings = (None,) * len(weights) if packings is None else packings
    tensors, marked = (*sources, *parameters, *weights), tuple(only_rows) if rows is not None else (False,) * len(weights)
    assert len(marked) == len(weights), (marked, len(weights))
    assert not all(marked)
    biases = tuple(biases) or (None,) * len(weights)
    return _RecomputedProducts.apply(
        recomputable, len(parameters), rows, marked, packings, passed, keep(*tensors), *tensors, *biases
    )


class _RecomputedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recomputable: Recomputable,
        parameters: int,
        rows: Rows | None,
        marked: Sequence[bool],
        packings: Sequence[Packing | None],
        passed: bool,
        node: Any,
        *tensors: Any,
    ) -> Tensors:
        # Nothing is saved here: `node` saved the tensors before the products were computed.
        ctx.kept = node
        first, second, third = (recomputable.sources, recomputable.sources + parameters, len(tensors) - len(marked))
        value = recomputable.compute(tensors[:first], tensors[first:second])
        part = value if rows is None else value[rows.index]
        weights, biases = tensors[second:third], tensors[third:]
        # A packed weight is never joined with others.
        kinds = [
            (is_marked, None if packing is None else at)
            for at, (is_marked, packing) in enumerate(zip(marked, packings, strict=True))
        ]
        runs = in_runs(weights, biases, kinds)
        ctx.products = Products(recomputable, parameters, rows, marked, packings, runs)
        outs = (products_of(part if marked[run.start] else value, weights[run], biases[run], packings[run.start]) for run in runs)
        return *(out for run in outs for out in run), *(source.view_as(source) for source in tensors[:passed])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(None,) * 7, *ctx.products.gradients(kept(ctx), grads, ctx.needs_input_grad[7:])


@dataclass(frozen=True)
class Products:
    """Products of one value with some weights, as in :func:`recomputed_products`. ``runs`` are the products that are joined."""

    recomputable: Recomputable
    parameters: int
    rows: Rows | None
    marked: Sequence[bool]
    packings: Sequence[Packing | None]
    runs: Sequence[slice]

    def gradients(self, tensors: Tensors, grads: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Return the gradients of sources, parameters, weights and biases. None = it is not needed.

        Args:
            tensors: Sources, parameters and weights.
            grads: The gradients of the products; then that of the passed source, if it was passed.
            needed: Whether each of sources, parameters, weights and biases needs a gradient.
        """
        recomputable = self.recomputable
        first, second = recomputable.sources, recomputable.sources + self.parameters
        sources, parameters, weights = tensors[:first], tensors[first:second], tensors[second:]
        passed_grad = grads[len(weights)] if len(grads) > len(weights) else None
        further = any(needed[:second])
        # The sources of a gate are not read again, so their gradients overwrite them.
        into = sources if recomputable.overwrites else tuple(torch.empty_like(source) for source in sources if further)
        needs_weight, needs_bias = needed[second : second + len(weights)], needed[second + len(weights) :]
        products = [
            _Product(
                run,
                grad,
                (weight, self.packings[run.start]),
                self.marked[run.start],
                any(needs_weight[run]),
                any(needs_bias[run]),
            )
            for run, grad, weight in _joined_runs(self.runs, grads, weights)
        ]
        cuts, norms = product_tiles(sources[0]), zip(parameters, needed[first:second], strict=True)
        sums = [sum_of(weight, cuts, sources[0]) if wanted else None for weight, wanted in norms]
        for rows in cuts:
            cut = tuple(source[rows] for source in sources)
            # This is the recomputation. A tile of the value exists only until its gradients are added.
            value = recomputable.compute(cut, parameters)
            marked_rows, places = (rows, None) if self.rows is None else self.rows.within(rows)
            above = [product.grad[marked_rows if product.marked else rows] for product in products]
            for product, grad in zip(products, above, strict=True):
                if product.total is not None:
                    product.total.add(grad, value[places] if product.marked else value, alone=len(cuts) == 1)
            if further:
                # The value is not read any more, so its gradient overwrites it.
                _through(above, products, places, value)
                plus = None if passed_grad is None else passed_grad[rows]
                recomputable.differentiate(value, cut, parameters, tuple(source[rows] for source in into), sums, plus)
            del value, above  # freed before the tensors of the next tile are allocated
        source_grads = into if further else (None,) * first
        parameter_grads = (None if total is None else total.to(like.dtype) for total, like in zip(sums, parameters, strict=True))
        totals = [(product.run, None if product.total is None else product.total.gradient()) for product in products]
        weight_grads = (part for run, total in totals for part in _parted(total, weights[run]))
        bias_grads = (part for product in products for part in _parted(product.bias, weights[product.run]))
        return *source_grads, *parameter_grads, *weight_grads, *bias_grads


class _Product:
    """A product in backward: its gradient [T, m], and its weight [m, n], which may be several weights joined."""

    def __init__(
        self, run: slice, grad: Tensor, stored: tuple[Tensor, Packing | None], marked: bool, needs_weight: bool, needs_bias: bool
    ) -> None:
        self.run, self.grad, self.stored, self.marked = run, grad, stored, marked
        self.total = WeightSum(stored[0]) if needs_weight else None
        self.bias = grad.sum(0) if needs_bias else None


def _parted(whole: Tensor | None, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
    return (None,) * len(weights) if whole is None else whole.split([len(weight) for weight in weights])


def _joined_runs(
    runs: Sequence[slice], grads: Sequence[Tensor], weights: Sequence[Tensor]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    # Yield each run with its gradients and weights joined, or its members one by one if they cannot be joined.
    for run in runs:
        grad, weight = joined(grads[run], 1), joined(weights[run], 0)
        if grad is not None and weight is not None:
            yield run, grad, weight
        else:
            yield from ((slice(at, at + 1), grads[at], weights[at]) for at in range(run.start, run.stop))


def in_runs(weights: Sequence[Tensor], biases: Sequence[Tensor | None], marked: Sequence[Any] = ()) -> list[slice]:
    # Return the ranges of weights that can be one product: the weights are neighbours in memory, and so are their biases.
    marked, runs, start = marked or (False,) * len(weights), [], 0
    apart = not JOINS.get(weights[0].device.type, True)
    for stop in range(1, len(weights) + 1):
        more = slice(start, stop + 1)
        if (
            apart
            or stop == len(weights)
            or len(set(marked[more])) > 1
            or joined(weights[more], 0) is None
            or _bias(biases[more]) is None
        ):
            runs.append(slice(start, stop))
            start = stop
    return runs


def _bias(biases: Sequence[Tensor | None]) -> tuple[Tensor, ...] | None:
    # Return the biases of a run joined: () if there are none, None if they cannot be joined.
    given = [bias for bias in biases if bias is not None]
    whole = joined(given, 0) if given and len(given) == len(biases) else None
    return () if not given else None if whole is None else (whole,)


def products_of(
    value: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], packing: Packing | None = None
) -> Sequence[Tensor]:
    # Multiply a value [T, n] by a run of weights and add their biases. The outputs are columns of one tensor.
    weight, bias = joined(weights, 0), _bias(biases)
    assert weight is not None
    weight = whole_weight(weight, packing, value.dtype)
    out = torch.addmm(bias[0], value, weight.t()) if bias else torch.mm(value, weight.t())
    return out.split([len(layer_weight) for layer_weight in weights], 1) if len(weights) > 1 else (out,)


def _through(grads: Sequence[Tensor], products: Sequence[_Product], places: Tensor | None, out: Tensor) -> None:
    # Write the sum of gradient @ weight over all products into `out`. Marked products only add to the rows at `places`.
    pairs = list(zip(grads, products, strict=True))
    whole, part = ([(grad, product.stored) for grad, product in pairs if product.marked is wanted] for wanted in (False, True))
    first, weight = whole[0]
    # Unmarked products come first, so that the first of them fills ``out``, which then needs no zeros.
    torch.mm(first, whole_weight(*weight, out.dtype), out=out)
    for grad, weight in whole[1:]:
        torch.addmm(out, grad, whole_weight(*weight, out.dtype), out=out)
    if part:
        added = out[places]
        for grad, weight in part:
            torch.addmm(added, grad, whole_weight(*weight, out.dtype), out=added)
        out[places] = added


def recomputed_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
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


# Shared by all functions whose backward computes cheap values again: norms, gates, tiles of products, and sums. The tiled MLP and
# the attention that rotates queries and keys use it too.

Tensors: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class RMSNorm:
    """RMS norm of x with a weight, computed in the same steps as in transformers. Source: arXiv 1910.07467.

    A weight in the dtype of x multiplies the rounded norm, as in Llama. An fp32 weight beside rows in half precision multiplies
    the norm in fp32, and the product is rounded once, as in Gemma (:func:`norm_and_weight`).

    Like :class:`SwiGLU`, it computes a value [T, n] from ``sources`` many tensors [T, n] and from parameters [n], and it turns
    the value's gradient into theirs. ``overwrites``: the gradients of the sources overwrite the sources.
    """

    eps: float
    sources: int = 1
    overwrites: bool = False

    def compute(self, sources: Tensors, parameters: Tensors, out: Tensor | None = None) -> Tensor:
        (x,), (weight,) = sources, parameters
        # `out` may be a source.
        out = torch.empty_like(x) if out is None else out
        over_rows(_norm, (x, out), weight, self.eps)
        return out

    def compute_sum(self, residual: Tensor, x: Tensor, total: Tensor, weight: Tensor) -> Tensor:
        """Return the norm of residual + x. The sum is written into ``total``, which may be ``x``."""
        over_rows(_norm_of_sum, (residual, x, total, out := torch.empty_like(x)), weight, self.eps)
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
        """Write the gradients of the sources into ``into``, and add those of the parameters to ``sums`` (None = not needed).

        ``sums`` are in fp32 or wider, or come from :func:`sum_of`. ``plus`` is added to the gradient of the source.
        """
        (x,), (weight,) = sources, parameters
        total = sums[0]
        statement, tensors = (
            (norm_gradient, (grad, x, into[0])) if plus is None else (_norm_gradient_plus, (grad, x, into[0], plus))
        )
        if total is not None and runs_compiled(grad):
            if launched(statement, tensors, weight, self.eps, total):
                return
            # When compiled, the sum over rows must be a separate statement. Otherwise it could run after `grad` was overwritten.
            self._sum_weight(grad, x, total)
            total = None
        over_rows(statement, tensors, weight, self.eps, total)

    def _sum_weight(self, grad: Tensor, x: Tensor, total: Tensor) -> None:
        def in_tiles() -> None:
            over_rows(norm_weight_gradient, (grad, x), self.eps, wide := zeros_to_sum(total))
            total.copy_(wide)

        is_wide = total.dtype == wide_dtype(total.dtype)
        over_rows(norm_weight_gradient, (grad, x), self.eps, total, otherwise=None if is_wide else in_tiles)


@dataclass(frozen=True)
class SwiGLU:
    """silu(gate) * up, or with ``gelu`` gelu(gate) * up, where gelu is approximated by tanh. Source: arXiv 2002.05202."""

    gelu: bool = False
    sources: int = 2
    overwrites: bool = True

    def compute(self, sources: Tensors, parameters: Tensors, out: Tensor | None = None) -> Tensor:
        gate, up = sources
        out = torch.empty_like(gate) if out is None else out
        over_rows(_gelu_gate if self.gelu else _gate, (gate, up, out), narrow=True)
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
        over_rows(_gelu_gate_gradient if self.gelu else _gate_gradient, (grad, *sources, *into), narrow=True)

    def differentiate_to_value(self, grad: Tensor, sources: Tensors) -> None:
        """Overwrite the sources with their gradients, and ``grad``, the gradient of the value, with the value."""
        statement = _gelu_gate_gradient_and_value if self.gelu else _gate_gradient_and_value
        over_rows(statement, (grad, *sources), narrow=True)


class Recomputable(Protocol):
    """How a value [T, n] is computed from its sources, and their gradients from its own. See :class:`RMSNorm`."""

    @property
    def sources(self) -> int: ...

    @property
    def overwrites(self) -> bool: ...

    def compute(self, sources: Tensors, parameters: Tensors, out: Tensor | None = None) -> Tensor: ...

    def differentiate(
        self,
        grad: Tensor,
        sources: Tensors,
        parameters: Tensors,
        into: Tensors,
        sums: Sequence[Tensor | None],
        plus: Tensor | None = None,
    ) -> None: ...


GATES = {"silu": SwiGLU(), "swish": SwiGLU(), "gelu_pytorch_tanh": SwiGLU(gelu=True)}
"""Name of an activation in a model's config -> how the gate of its MLPs is computed."""


def gate_of(config: Any) -> SwiGLU | None:
    """Return how the gate of a model's MLPs is computed. None = its activation is not known."""
    return GATES.get(_activation(config))


def _activation(config: Any) -> str:
    # Configs of Gemma have another name for it.
    return config.hidden_activation if hasattr(config, "hidden_activation") else config.hidden_act


UNIT_OFFSET = ("Gemma3RMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
"""Classes of RMS norms that multiply by 1 + w in fp32. Other classes multiply by w."""

IN_FP32 = ("Gemma4RMSNorm", "Gemma4UnifiedRMSNorm", "GptOssRMSNorm")
"""Classes of RMS norms that multiply by w in fp32, and round once."""


def norm_and_weight(norm: Any) -> tuple[RMSNorm, Tensor]:
    """Return how an RMS norm of transformers is computed, and by which weight [n] it multiplies.

    The weight is the parameter w, or w or 1 + w in fp32 or wider, whose gradient autograd passes on to w.
    """
    # Llama's class calls its epsilon variance_epsilon, Gemma's class eps.
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    weight, name = norm.weight, type(norm).__name__
    if name in (*UNIT_OFFSET, *IN_FP32):
        weight = weight.to(wide_dtype(weight.dtype))
    return RMSNorm(eps), weight + 1 if name in UNIT_OFFSET else weight


def product_tiles(tensor: Tensor, least: int = 1) -> list[slice]:
    # The tiles are nearly equal, so that the last one is not a small product.
    rows = tensor.shape[0]
    count = max(-(-rows // PRODUCT_ROWS.get(tensor.device.type, 8192)), least)
    size = max(-(-rows // count), 1)
    return [slice(start, start + size) for start in range(0, max(rows, 1), size)]


def normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x [..., n] divided by its root mean square, in fp32 or wider, and the inverse of that root [..., 1]."""
    wide = x.to(wide_dtype(x.dtype))
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    # If x is fp32 already, `wide` is x itself, which belongs to the caller and must not change.
    return (wide * inverse if wide is x else wide.mul_(inverse)), inverse


def rounded_for(weight: Tensor, normal: Tensor, dtype: torch.dtype) -> Tensor:
    # A norm in fp32 or wider, rounded to the dtype of its rows before it is multiplied by the weight, as in transformers. The
    # other order would give other last bits. A wide weight multiplies the norm as it is.
    return normal if weight.dtype == normal.dtype else normal.to(dtype)


@has_kernel(kernels.norm_gradient, "rrw", sums=(2,))
def norm_gradient(grad: Tensor, x: Tensor, into: Tensor, weight: Tensor, eps: float, sums: Tensor | None) -> None:
    """Write the gradient of the norm's input x [..., n] into ``into``, and add the gradient of its weight [n] to ``sums``.

    ``grad`` [..., n] is the gradient of the norm's output; ``into`` may be the same tensor. ``sums`` is [n] in fp32 or wider; a
    shorter dtype gets the whole sum, which is not added. None = the weight's gradient is not needed.
    """
    normal, inverse = normalized(x, eps)
    above = grad.to(normal.dtype)
    product = above * normal
    if sums is not None:
        sum_rows(product, sums)
    shared = product.mul_(weight).mean(-1, keepdim=True).neg_()
    del product  # freed before the next tensor of its size is allocated
    # Without a cast `above` is the caller's tensor, which must not be overwritten.
    weighted = above * weight if above is grad else above.mul_(weight)
    into.copy_(weighted.addcmul_(normal, shared).mul_(inverse))


def norm_weight_gradient(grad: Tensor, x: Tensor, eps: float, sums: Tensor) -> None:
    normal, _ = normalized(x, eps)
    sum_rows(grad.to(normal.dtype) * normal, sums)


def sum_rows(values: Tensor, sums: Tensor) -> None:
    """Add the sums of values [..., n] over all other dimensions to ``sums`` [n]. A shorter dtype gets the whole sums."""
    total = values.flatten(0, -2).sum(0)
    if sums.dtype == wide_dtype(sums.dtype):
        sums.add_(total)
    else:
        sums.copy_(total)


@has_kernel(kernels.norm_gradient_plus, "rrwr", sums=(2,))
def _norm_gradient_plus(
    grad: Tensor, x: Tensor, into: Tensor, plus: Tensor, weight: Tensor, eps: float, sums: Tensor | None
) -> None:
    norm_gradient(grad, x, into, weight, eps, sums)
    into.add_(plus)


@has_kernel(kernels.norm_of_sum, "rrww")
def _norm_of_sum(residual: Tensor, x: Tensor, total: Tensor, out: Tensor, weight: Tensor, eps: float) -> None:
    torch.add(residual, x, out=total)
    _norm(total, out, weight, eps)


@has_kernel(kernels.norm, "rw")
def _norm(x: Tensor, out: Tensor, weight: Tensor, eps: float) -> None:
    torch.mul(rounded_for(weight, normalized(x, eps)[0], x.dtype), weight, out=out)


@has_kernel(kernels.gate, "rrw")
def _gate(gate: Tensor, up: Tensor, out: Tensor) -> None:
    torch.mul(silu(gate), up, out=out)


@has_kernel(kernels.gate_gradient, "rrrww")
def _gate_gradient(grad: Tensor, gate: Tensor, up: Tensor, into_gate: Tensor, into_up: Tensor) -> None:
    # Both are computed before anything is written, because `into_gate` and `into_up` may be `gate` and `up`.
    active, above = silu(gate), grad * up
    torch.mul(grad, active, out=into_up)
    torch.ops.aten.silu_backward.grad_input(above, gate, grad_input=active)
    into_gate.copy_(active)


@has_kernel(kernels.gate_gradient_and_value, "bbb")
def _gate_gradient_and_value(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    active, above = silu(gate), grad * up
    value = active * up
    torch.mul(grad, active, out=up)
    grad.copy_(value)
    torch.ops.aten.silu_backward.grad_input(above, gate, grad_input=active)
    gate.copy_(active)


def _gelu_gate(gate: Tensor, up: Tensor, out: Tensor) -> None:
    torch.mul(gelu(gate, approximate="tanh"), up, out=out)


def _gelu_gate_gradient(grad: Tensor, gate: Tensor, up: Tensor, into_gate: Tensor, into_up: Tensor) -> None:
    active, above = gelu(gate, approximate="tanh"), grad * up
    torch.mul(grad, active, out=into_up)
    torch.ops.aten.gelu_backward.grad_input(above, gate, approximate="tanh", grad_input=active)
    into_gate.copy_(active)


def _gelu_gate_gradient_and_value(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    active, above = gelu(gate, approximate="tanh"), grad * up
    value = active * up
    torch.mul(grad, active, out=up)
    grad.copy_(value)
    torch.ops.aten.gelu_backward.grad_input(above, gate, approximate="tanh", grad_input=active)
    gate.copy_(active)


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor, in order: int64 [R], on the tensor's device (``index``) and on the host (``places``)."""

    index: Tensor
    places: np.ndarray

    def within(self, tile: slice) -> tuple[slice, Tensor]:
        first, end = np.searchsorted(self.places, (tile.start, tile.stop)).tolist()
        return slice(first, end), self.index[first:end] - tile.start  # int64


def keep(first: Tensor, *others: Tensor | None) -> tuple[Tensor] | None:
    """Save tensors in the graph for the backward of another autograd node, which reads them with :func:`kept`.

    An autograd function saves its tensors only after its forward. A separate node saves them before anything is computed from
    them. So the second forward of a checkpointed block, which stops once all tensors are saved, can stop before the product.

    Returns:
        An empty output of the new node. It must be kept, because before torch 2.13 a node drops its tensors when no tensor refers
        to it. It is in a tuple, so that autograd does not treat it as an input of the other node. None = no tensor needs a
        gradient.
    """
    output = _Keep.apply(first, *others)
    return None if output.grad_fn is None else (output,)


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor | None) -> Tensor:
        ctx.save_for_backward(first, *others)
        return first.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing is computed from this node's output")


def kept(ctx: Any) -> tuple[Tensor, ...]:
    assert ctx.kept is not None, "this graph runs backward once"
    (output,), ctx.kept = ctx.kept, None
    return output.grad_fn.saved_tensors


class WeightSum:
    """The gradient of a weight [m, n], summed over tiles of rows. The first tile allocates the sum."""

    def __init__(self, weight: Tensor) -> None:
        self.dtype = weight.dtype
        self.total: Tensor | None = None

    def add(self, grad: Tensor, value: Tensor, alone: bool) -> None:
        # grad [t, m], value [t, n]
        if self.total is None:
            product = torch.mm(grad.t(), value)
            # A single tile needs no sum, so it stays in the dtype of the product and is rounded once.
            self.total = product if alone else product.to(wide_dtype(self.dtype))
        else:
            add_product(self.total, grad, value)

    def gradient(self) -> Tensor:
        """Return the gradient in the weight's dtype. The sum is freed."""
        assert self.total is not None, "no tile was added"
        total, self.total = self.total, None
        return total.to(self.dtype)


def add_product(total: Tensor, grad: Tensor, value: Tensor) -> None:
    """Add the transpose of ``grad`` [t, m] times ``value`` [t, n] to ``total`` [m, n], which may be wider than both."""
    if total.dtype == grad.dtype:
        torch.addmm(total, grad.t(), value, out=total)  # counted by torch's FLOP counter
        return
    # addmm cannot add a product in half precision to an fp32 sum. A product of some rows at a time is small.
    step = max(SUM_ELEMENTS // total.shape[1], 1)
    for first in range(0, total.shape[0], step):
        rows = slice(first, first + step)
        total[rows].add_(torch.mm(grad[:, rows].t(), value))


def sum_of(parameter: Tensor, cuts: Sequence[slice], source: Tensor) -> Tensor:
    """Return the tensor in which :meth:`RMSNorm.differentiate` sums the gradient of a norm's weight over tiles of rows.

    It is zeros in fp32 or wider. If one compiled call computes and rounds the whole sum, it is uninitialised and in the
    parameter's dtype.
    """
    in_one = parameter.dtype != wide_dtype(parameter.dtype) and len(cuts) == 1 and runs_compiled(source)
    return torch.empty_like(parameter) if in_one else zeros_to_sum(parameter)


def zeros_to_sum(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=wide_dtype(parameter.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    # Not torch.promote_types(), which is an operation of its own for torch's dispatcher.
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
