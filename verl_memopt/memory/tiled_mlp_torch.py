"""Tiled MLP: each MLP runs over tiles of tokens, and again in backward, so wide tensors exist for one tile at a time.

Bytes saved: let T count the tokens, I be the width of the MLP, h the hidden size, b the bytes per element, and n
``tiled_mlp.num_shards``. In the MLP's backward six tensors of T x I x b bytes (gate, activation, up, their product and two
gradients) shrink to one tile each. Sums of the gradients of the three weights and of the input are added. The peak can then move
to the backward of attention. Passes without gradients save 3 x T x I x b x (1 - 1 / n) bytes, less T x h x b.
``plan/formulas.py`` has the whole formula.

Outputs and gradients of inputs are exactly those of the whole MLP. Gradients of weights differ in the order of one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from verl_memopt.errors import ConfigError
from verl_memopt.memory.activation_checkpointing_torch import Forward
from verl_memopt.memory.fused import JOINS, joined, runs_compiled
from verl_memopt.memory.lora_torch import LoraLinear
from verl_memopt.memory.quantized_frozen_torch import Packing, stored_weight, whole_weight
from verl_memopt.memory.recompute_elementwise_torch import (
    RMSNorm,
    SwiGLU,
    WeightSum,
    is_silu,
    keep,
    kept,
    product_tiles,
    sum_of,
    zeros_to_sum,
)
from verl_memopt.model.families import own_classes

KEY = "actor_rollout_ref.model.tiled_mlp"

MIXTURE_OF_GPT_OSS = "GptOssMLP"
"""The one mixture of experts whose class is named as an MLP."""

LAYERS = ("gate_proj", "up_proj", "down_proj")


def check_mlps(blocks: Iterable[nn.Module], trained: bool, key: str = KEY) -> None:
    """Refuse transformers blocks whose MLP, or a layer in it, is of a class that this file does not know.

    A model that is not ``trained`` only runs without gradients, so its layers may be of any kind (such as quantised).
    """
    # MLPs that compute down(act(gate(x)) * up(x)), and mixtures, which run over tiles of experts (model/experts.py).
    known = [name for name in own_classes("MLP") if name != MIXTURE_OF_GPT_OSS]
    mixtures = (*own_classes("SparseMoeBlock"), *own_classes("MoE"), MIXTURE_OF_GPT_OSS)
    for block in blocks:
        mlp: Any = getattr(block, "mlp", None)
        layers = {name: type(getattr(mlp, name)) for name in LAYERS} if trained and type(mlp).__name__ in known else {}
        unlike = next((name for name, kind in layers.items() if kind not in (nn.Linear, LoraLinear)), None)
        if type(mlp).__name__ in mixtures and is_silu(block):
            continue
        if type(mlp).__name__ not in known:
            actual = "has no mlp" if mlp is None else f"computes {type(mlp).__name__}"
            problem = f"{type(block).__name__} {actual}; tiles are known for {', '.join(known)}"
        elif unlike is not None:
            kind = layers[unlike].__name__
            problem = f"{unlike} of {type(mlp).__name__} is {kind}, whose gradient cannot be summed over tiles"
        else:
            continue
        raise ConfigError(f"{key}.enabled=true: {problem}. Set {key}.enabled=false.")


def tiled_mlp(mlp: Any, x: Tensor, num_shards: int) -> Tensor:
    """Compute ``mlp.gated(x)`` [T, h] for a normed input x [T, h] over ``num_shards`` tiles. Only x is kept for backward."""
    if torch.is_grad_enabled():
        names, parameters = zip(*mlp.named_parameters(), strict=True)
        # Adapters may rest in a wider dtype and are cast. Quantised bytes are not.
        weights = [weight.to(x.dtype) if weight.is_floating_point() else weight for weight in parameters]
        # In a checkpointed block no tensor is saved after these, so the block's second forward stops here.
        return _Tiles.apply(mlp, num_shards, keep(x, *weights), names, x, *weights)
    out = torch.empty_like(x)
    for rows in _tiles(x.shape[0], num_shards):
        out[rows] = mlp.gated(x[rows])
    return out


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mlp: nn.Module, num_shards: int, node: Any, names: tuple[str, ...], x: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.mlp, ctx.num_shards, ctx.kept, ctx.names = mlp, num_shards, node, names
        held, out = dict(zip(names, weights, strict=True)), torch.empty_like(x)
        for rows in _tiles(x.shape[0], num_shards):
            out[rows] = _mlp(mlp, x[rows], held, {})
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = kept(ctx)
        # Detached, because the backward of each tile adds to the sums itself. Autograd would make a new gradient for each tile.
        held = {name: weight.detach() for name, weight in zip(ctx.names, weights, strict=True)}
        needed = dict(zip(ctx.names, ctx.needs_input_grad[5:], strict=True))
        # One sum per weight over all tiles.
        sums = {name: torch.zeros_like(weight) for name, weight in held.items() if needed[name]}
        x = x.detach()
        grad_x = torch.empty_like(x)
        for rows in _tiles(x.shape[0], ctx.num_shards):
            with torch.enable_grad():
                tile = x[rows].requires_grad_()
                out = _mlp(ctx.mlp, tile, held, sums)
            # Autograd returns only the gradient of the input. The gradients of weights are already in the sums.
            (grad_x[rows],) = torch.autograd.grad(out, tile, grad[rows])
        return None, None, None, None, grad_x, *(sums.get(name) for name in ctx.names)


def _tiles(tokens: int, num_shards: int) -> list[slice]:
    size = max(-(-tokens // num_shards), 1)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _mlp(mlp: Any, x: Tensor, held: dict[str, Tensor], sums: dict[str, Tensor]) -> Tensor:
    def project(name: str, x: Tensor) -> Tensor:
        layer = getattr(mlp, name)
        packing = stored_weight(layer)[1]
        out = _linear(x, f"{name}.{'weight' if packing is None else 'qweight'}", f"{name}.bias", held, sums, packing)
        if not isinstance(layer, LoraLinear) or not layer.active:
            return out
        thin = _linear(x, f"{name}.lora_A", "", held, sums)
        return out + layer.scale * _linear(thin, f"{name}.lora_B", "", held, sums)

    return project("down_proj", mlp.act_fn(project("gate_proj", x)) * project("up_proj", x))


def _linear(
    x: Tensor, weight: str, bias: str, held: dict[str, Tensor], sums: dict[str, Tensor], packing: Packing | None = None
) -> Tensor:
    return _SummingLinear.apply(x, held[weight], held.get(bias), sums.get(weight), sums.get(bias), packing)


class _SummingLinear(torch.autograd.Function):
    """A linear layer whose backward adds the gradient of its weight to a tensor in place, without a temporary tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_sum: Tensor | None,
        bias_sum: Tensor | None,
        packing: Packing | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums, ctx.packing = (weight_sum, bias_sum), packing
        weight = whole_weight(weight, packing, x.dtype)
        # Written into ``out``, because selective checkpointing would keep the output of a plain product.
        out = x.new_empty(x.shape[0], weight.shape[0])
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight_sum, bias_sum = ctx.sums
        if weight_sum is not None:
            # In place, in a form that torch's FLOP counter counts.
            torch.addmm(weight_sum, grad.t(), x, out=weight_sum)
        if bias_sum is not None:
            bias_sum.add_(grad.sum(0))
        return grad @ whole_weight(weight, ctx.packing, grad.dtype), None, None, None, None, None


# A norm and an MLP that keep only their inputs, and are recomputed in backward over tiles of rows.
#
# In a checkpointed block this costs no extra matrix product: the second forward stops before the MLP, which is then recomputed
# tile by tile. So gate and up of all rows never exist at once. Source of the tiles: arXiv 2506.13996.

SWIGLU = SwiGLU()


@dataclass(frozen=True)
class MlpSteps:
    norm: RMSNorm
    gate: SwiGLU
    post: RMSNorm | None
    """The norm of the MLP's output. None = there is none."""

    def add_normed(self, product: Tensor, weight: Tensor | None, out: Tensor) -> None:
        # Add the output of an MLP to `out`. It is overwritten.
        if self.post is not None and weight is not None:
            self.post.compute((product,), (weight,), product)
        out.add_(product)


def recomputed_mlp(
    residual: Tensor,
    x: Tensor,
    norm: RMSNorm,
    weight: Tensor,
    layers: Sequence[Any],
    tiles: int = 1,
    checkpoint: Forward | None = None,
    gate: SwiGLU = SWIGLU,
    post: tuple[RMSNorm, Tensor] | None = None,
) -> Tensor:
    """Compute z + down(act(gate(y)) * up(y)) [1, T, h], where z = residual + x [T, h], and y is its norm with a weight [h].

    ``gate`` says what ``act`` is. ``post`` is a norm of the output of ``down``, and its weight [h]. None = there is none.

    If anything needs a gradient, residual, x and the parameters are kept for backward. Backward overwrites x, so nothing else may
    use it. ``layers`` are gate, up and down, with or without adapters. There are at least ``tiles`` tiles, and more if a tile
    would have more rows than fast products need. The result has three dimensions, so that FSDP2 does not get a view.

    ``checkpoint``: which forward of a checkpointed block this is. ``first`` builds no graph, but gives the values of a forward
    that does. ``again`` builds a graph to run backward through; its result has no values and takes no memory.
    """
    post_norm, post_weight = (None, None) if post is None else post
    steps = MlpSteps(norm, gate, post_norm)
    if not torch.is_grad_enabled() and checkpoint is None:
        return _whole(residual, x, steps, weight, post_weight, layers, tiles)
    tensors, traits = tensors_and_traits(layers)
    if checkpoint == "first":
        return _over_tiles(steps, tiles, traits, residual, x, weight, post_weight, tensors)
    node, has_values = keep(residual, x, weight, post_weight, *tensors), checkpoint is None
    return _RecomputedMlp.apply(steps, tiles, traits, node, has_values, residual, x, weight, post_weight, *tensors)


def _over_tiles(
    steps: MlpSteps,
    tiles: int,
    traits: Sequence[Traits],
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    post_weight: Tensor | None,
    tensors: Sequence[Tensor | None],
) -> Tensor:
    mlp, whole = TiledMlp(tensors, traits, gate=steps.gate), torch.empty_like(x[None])
    for rows in product_tiles(x, tiles):
        out = whole[0, rows]
        normal = steps.norm.compute_sum(residual[rows], x[rows], out, weight)
        if steps.post is None:
            mlp.add_output(normal, out)
        else:
            steps.add_normed(mlp.output(normal), post_weight, out)
    return whole


class Traits(NamedTuple):
    scale: float  # of the adapter; 0 without one
    packing: Packing | None


def tensors_and_traits(layers: Sequence[Any]) -> tuple[list[Tensor | None], list[Traits]]:
    """Return four tensors per layer (stored weight, bias, A and B of the adapter; None = there is none), and its traits."""
    tensors, traits = list[Tensor | None](), list[Traits]()
    for layer in layers:
        adapted = isinstance(layer, LoraLinear)
        weight, packing = stored_weight(layer)
        tensors += (weight, layer.bias, *(layer.factors if adapted and layer.active else (None, None)))
        traits.append(Traits(layer.scale if adapted else 0.0, packing))
    return tensors, traits


def _whole(
    residual: Tensor,
    x: Tensor,
    steps: MlpSteps,
    weight: Tensor,
    post_weight: Tensor | None,
    layers: Sequence[Callable[[Tensor], Tensor]],
    tiles: int,
) -> Tensor:
    # Like :func:`recomputed_mlp`, but without gradients. Layers may be of any kind.
    gate, up, down = layers
    whole = torch.empty_like(x[None])
    for rows in product_tiles(x, tiles):
        out = whole[0, rows]
        normal = steps.norm.compute_sum(residual[rows], x[rows], out, weight)
        value = gate(normal)
        steps.add_normed(down(steps.gate.compute((value, up(normal)), (), value)), post_weight, out)
        del normal, value  # freed before the tensors of the next tile are allocated
    return whole


class TiledLinear:
    """A linear layer [m, n] inside an autograd function. It computes outputs per tile, and sums gradients over tiles.

    ``tensors`` are weight, bias, and A and B of an adapter (None = there is none). Those that are ``needed`` get a gradient. A
    packed weight is decoded for each product.
    """

    def __init__(self, tensors: Sequence[Tensor | None], traits: Traits, needed: Sequence[bool]) -> None:
        stored, self.bias, self.down, self.up = tensors
        assert stored is not None
        self._stored, (self.scale, self._packing) = stored, traits
        # Only trained tensors have a sum.
        learning = [tensor if wanted else None for tensor, wanted in zip(tensors, needed, strict=True)]
        trained_weight, trained_bias, *trained_factors = learning
        self._bias_sum = None if trained_bias is None else zeros_to_sum(trained_bias)
        weights = (trained_weight, *trained_factors)
        self._weight_sum, self._down_sum, self._up_sum = (None if weight is None else WeightSum(weight) for weight in weights)

    def output(self, x: Tensor) -> Tensor:
        # Written into ``out``, because selective checkpointing would keep the output of a plain product.
        out = x.new_empty(x.shape[0], self._stored.shape[0])
        torch.mm(x, whole_weight(self._stored, self._packing, x.dtype).t(), out=out)
        return self._completed(x, out)

    def add_output(self, x: Tensor, out: Tensor) -> None:
        torch.addmm(out, x, whole_weight(self._stored, self._packing, x.dtype).t(), out=out)
        self._completed(x, out)

    def _completed(self, x: Tensor, out: Tensor) -> Tensor:
        if self.bias is not None:
            out.add_(self.bias)
        if self.down is not None and self.up is not None:
            torch.addmm(out, self._product(x, self.down.t()), self.up.t(), alpha=self.scale, out=out)
        return out

    def add(self, grad: Tensor, x: Tensor, alone: bool) -> None:
        # grad [t, m], x [t, n]
        if self._weight_sum is not None:
            self._weight_sum.add(grad, x, alone)
        if self._bias_sum is not None:
            self._bias_sum.add_(grad.sum(0, dtype=self._bias_sum.dtype))
        if self.up is not None and self._down_sum is not None:
            self._down_sum.add(self._product(grad, self.up).mul_(self.scale), x, alone)
        if self.down is not None and self._up_sum is not None:
            self._up_sum.add(grad, self._product(x, self.down.t()).mul_(self.scale), alone)

    def through(self, grad: Tensor, out: Tensor, add: bool) -> None:
        # out [t, n]
        weight = whole_weight(self._stored, self._packing, grad.dtype)
        if add:
            torch.addmm(out, grad, weight, out=out)
        else:
            torch.mm(grad, weight, out=out)
        del weight
        if self.down is not None and self.up is not None:
            torch.addmm(out, self._product(grad, self.up), self.down, alpha=self.scale, out=out)

    def gradients(self) -> tuple[Tensor | None, ...]:
        # Return the gradients of weight, bias, A and B in their dtypes. None = not needed.
        sums = (self._weight_sum, self._down_sum, self._up_sum)
        weight, *factors = (None if total is None else total.gradient() for total in sums)
        return weight, None if self._bias_sum is None else self._bias_sum.to(self._stored.dtype), *factors

    @staticmethod
    def _product(x: Tensor, y: Tensor) -> Tensor:
        return torch.mm(x, y, out=x.new_empty(x.shape[0], y.shape[1]))


def tiled_linears(
    tensors: Sequence[Tensor | None], traits: Sequence[Traits], needed: Sequence[bool] | None = None
) -> list[TiledLinear]:
    needed = (False,) * len(tensors) if needed is None else needed
    fours = [slice(4 * place, 4 * place + 4) for place in range(len(traits))]
    return [TiledLinear(tensors[four], trait, needed[four]) for four, trait in zip(fours, traits, strict=True)]


class TiledMlp:
    """Computes down(act(gate(y)) * up(y)) inside an autograd function, for tiles of normed rows y [t, h].

    ``tensors`` are those of gate, up and down, from :func:`tensors_and_traits`. Gate and up are one product if their weights are
    neighbours in memory.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor | None],
        traits: Sequence[Traits],
        needed: Sequence[bool] | None = None,
        gate: SwiGLU = SWIGLU,
    ) -> None:
        self._gate, needed = gate, (False,) * 12 if needed is None else needed
        (self._down,) = tiled_linears(tensors[8:], traits[2:], needed[8:])
        gates, ups = tensors[:4], tensors[4:8]
        # Gate and up stay apart on a CPU, if they have adapters or packed weights, or if only one of them is trained.
        stay_apart = (
            not JOINS.get(next(tensor for tensor in tensors if tensor is not None).device.type, True)
            or any(trait.packing is not None for trait in traits[:2])
            or any(factor is not None for factor in (*gates[2:], *ups[2:]))
            or tuple(needed[:4]) != tuple(needed[4:8])
        )
        # None = they are no neighbours in memory, or there is no such tensor.
        wholes = [None if stay_apart or a is None or b is None else joined((a, b), 0) for a, b in zip(gates, ups, strict=True)]
        if any(whole is None and (a is not None or b is not None) for whole, a, b in zip(wholes, gates, ups, strict=True)):
            self._gate_and_up = tiled_linears(tensors[:8], traits[:2], needed[:8])
        else:
            self._gate_and_up = [TiledLinear(wholes, Traits(0.0, None), needed[:4])]

    def _products(self, normal: Tensor) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
        # Return the products, which backward overwrites with their gradients, and views of the outputs of gate and up in them.
        outs = [layer.output(normal) for layer in self._gate_and_up]
        gate, up = outs if len(outs) > 1 else outs[0].chunk(2, 1)
        return outs, (gate, up)

    def add_output(self, normal: Tensor, out: Tensor) -> None:
        _, sources = self._products(normal)
        # The value overwrites the output of gate, so that a tile holds two wide tensors and not three.
        self._down.add_output(self._gate.compute(sources, (), sources[0]), out)

    def output(self, normal: Tensor) -> Tensor:
        _, sources = self._products(normal)
        return self._down.output(self._gate.compute(sources, (), sources[0]))

    def backward(
        self,
        grad: Tensor,
        normal: Tensor,
        alone: bool,
        through: bool = True,
        post: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        """Add the gradients of the parameters, given the gradient of a tile's output. Overwrite ``normal`` with its gradient.

        Args:
            grad: [t, h], the gradient of the output, or of what ``post`` makes of it.
            normal: [t, h], the normed input.
            alone: This is the only tile.
            through: False = the input needs no gradient.
            post: Returns the gradient of the output from ``grad`` and the output itself, which it may overwrite.
        """
        outs, sources = self._products(normal)
        if post is None and runs_compiled(sources[0]):
            # The gradient of the value is computed first. One call then overwrites it with the value, and gate and up with their
            # gradients.
            value = torch.empty(sources[0].shape, dtype=grad.dtype, device=grad.device)
            self._down.through(grad, value, add=False)
            self._gate.differentiate_to_value(value, sources)
            self._down.add(grad, value, alone)
        else:
            value = self._gate.compute(sources, ())
            grad = grad if post is None else post(grad, self._down.output(value))
            self._down.add(grad, value, alone)
            # The value is not read any more, so its gradient overwrites it. The next line overwrites gate and up with their
            # gradients.
            self._down.through(grad, value, add=False)
            self._gate.differentiate(value, sources, (), sources, ())
        del value
        for layer, above in zip(self._gate_and_up, outs, strict=True):
            layer.add(above, normal, alone)
        for layer, above in zip(self._gate_and_up, outs, strict=True) if through else ():
            # A separate loop, because it overwrites `normal`, which the loop above still reads.
            layer.through(above, normal, add=layer is not self._gate_and_up[0])

    def gradients(self) -> list[Tensor | None]:
        # Return the gradients of all tensors, in their order.
        found = [layer.gradients() for layer in self._gate_and_up]
        if len(found) == 1:
            halves = [(None, None) if gradient is None else gradient.chunk(2) for gradient in found[0]]
            found = [tuple(first for first, _ in halves), tuple(second for _, second in halves)]
        return [gradient for layer in (*found, self._down.gradients()) for gradient in layer]


class _RecomputedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        steps: MlpSteps,
        tiles: int,
        traits: Sequence[Traits],
        node: Any,
        has_values: bool,
        residual: Tensor,
        x: Tensor,
        weight: Tensor,
        post_weight: Tensor | None,
        *tensors: Any,
    ) -> Tensor:
        ctx.steps, ctx.tiles, ctx.traits, ctx.kept = steps, tiles, traits, node
        if not has_values:
            return x.new_empty(1).expand(x[None].shape)
        return _over_tiles(steps, tiles, traits, residual, x, weight, post_weight, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        residual, x, weight, post_weight, *tensors = kept(ctx)
        grad, needed, steps = grad[0], ctx.needs_input_grad[5:], ctx.steps
        mlp, cuts = TiledMlp(tensors, ctx.traits, needed[4:], steps.gate), product_tiles(x, ctx.tiles)
        grad_x = torch.empty_like(x) if any(needed[:3]) else None
        norm_sum, post_sum = (
            sum_of(of, cuts, x) if wanted else None for of, wanted in ((weight, needed[2]), (post_weight, needed[3]))
        )

        def through_post(above: Tensor, product: Tensor) -> Tensor:
            steps.post.differentiate(above, (product,), (post_weight,), (product,), (post_sum,))
            return product

        for rows in cuts:
            normal = steps.norm.compute_sum(residual[rows], x[rows], x[rows], weight)
            post = None if steps.post is None else through_post
            mlp.backward(grad[rows], normal, len(cuts) == 1, grad_x is not None, post)
            if grad_x is not None:
                steps.norm.differentiate(normal, (x[rows],), (weight,), (grad_x[rows],), (norm_sum,), grad[rows])
            del normal  # freed before the tensor of the next tile is allocated
        pairs = (norm_sum, weight), (post_sum, post_weight)
        norm_grads = (None if total is None else total.to(of.dtype) for total, of in pairs)
        return *(None,) * 5, grad_x, grad_x, *norm_grads, *mlp.gradients()
