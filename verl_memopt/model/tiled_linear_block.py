"""Blocks with a Gated DeltaNet over tiles of tokens: of a long row only the block's input and output exist for all tokens.

Forward computes one tile after another, and hands on the state and the last inputs of the convolution. It keeps the block's
input, and for each tile the states and inputs that later tiles begin with. Backward computes a tile again, from the last tile to
the first. So the gradients of what a tile hands on are complete when it is reached. Bytes: ``plan/formulas.py``.

Gradients of weights are summed over tiles in fp32, as in :mod:`verl_memopt.model.tiled_block`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_memopt.memory.recompute_elementwise_torch import RMSNorm, SwiGLU, wide_dtype, zeros_to_sum
from verl_memopt.memory.recompute_gates import GatedNorm
from verl_memopt.memory.tiled_mlp_torch import TiledLinear, TiledMlp, Traits, tensors_and_traits, tiled_linears
from verl_memopt.model.delta_rule import DeltaShape, StateRule
from verl_memopt.model.experts import Mixture, TiledExperts
from verl_memopt.model.state_chunks import TAIL, StateTile

SWIGLU = SwiGLU()


@dataclass(frozen=True, eq=False)
class LinearBlockShape:
    """Sizes and norms of a block.

    Attributes:
        rule: The heads.
        mlp_tiles: Least number of parts into which the MLP cuts all tokens.
        norms: The norm of the block's input, the norm before the MLP, and the norm of the heads' outputs.
        tiles: The tiles.
    """

    rule: DeltaShape
    mlp_tiles: int
    norms: tuple[RMSNorm, RMSNorm, GatedNorm]
    tiles: tuple[StateTile, ...]


def tiled_linear_block(
    x: Tensor,
    shape: LinearBlockShape,
    norm_weights: tuple[Tensor, Tensor, Tensor],
    rule_weights: tuple[Tensor, Tensor, Tensor],
    layers: Sequence[Any],
    mixture: Mixture | None = None,
) -> Tensor:
    """Compute a block's output [1, T, h]. It keeps ``x``, the parameters, and what goes from tile to tile.

    Backward overwrites the gradient of the output, so nothing else may use it.

    Args:
        x: [T, h], the block's input.
        shape: Sizes, norms and tiles.
        norm_weights: Weights of the three norms.
        rule_weights: As in :func:`verl_memopt.model.delta_rule.gated_delta_rule`.
        layers: The projections to qkv, z, b and a, the one from the heads, then gate, up and down, with or without adapters. In a
            pass without gradients they may be layers of any kind.
        mixture: Experts, which take the place of gate, up and down. None = there are none.
    """
    if not torch.is_grad_enabled():
        experts = None if mixture is None else TiledExperts(mixture)
        return _Block(shape, x, norm_weights, rule_weights, layers, experts=experts).forward()
    tensors, traits = tensors_and_traits(layers)
    tensors += () if mixture is None else mixture.tensors
    kinds = traits, None if mixture is None else mixture._replace(tensors=())
    return _TiledLinearBlock.apply(shape, kinds, x, *norm_weights, *rule_weights, *tensors)


Kinds = tuple[Sequence[Traits], Mixture | None]
"""Traits of the linear layers, and the mixture without its tensors if experts are in place of the MLP."""


class _TiledLinearBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: LinearBlockShape, kinds: Kinds, *tensors: Any) -> Tensor:
        traits, mixture = kinds
        layers = [layer.output for layer in tiled_linears(tensors[7 : 7 + 4 * len(traits)], traits)]
        experts = None if mixture is None else TiledExperts(mixture._replace(tensors=tensors[27:]))
        block = _Block(shape, tensors[0], tensors[1:4], tensors[4:7], layers, experts=experts)
        out = block.forward()
        ctx.shape, ctx.kinds = shape, kinds
        ctx.save_for_backward(*tensors, block.tails, block.states)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, tails, states = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        traits, mixture = ctx.kinds
        layers = tiled_linears(tensors[7:27], traits[:5], needed[7:27])  # four tensors each
        mlp: TiledMlp | TiledExperts = (
            TiledMlp(tensors[27:], traits[5:], needed[27:])
            if mixture is None
            else TiledExperts(mixture._replace(tensors=tuple(tensors[27:])), needed=needed[27:])
        )
        block = _Block(ctx.shape, tensors[0], tensors[1:4], tensors[4:7], [layer.output for layer in layers], (tails, states))
        # In fp32, because several tiles add to them.
        sums = [zeros_to_sum(weight) for weight in tensors[1:7]]
        grad_x = _Backward(block, layers, mlp, sums).input_gradient(grad[0].contiguous())
        own = (
            total.to(weight.dtype) if wanted else None
            for total, weight, wanted in zip(sums, tensors[1:7], needed[1:7], strict=True)
        )
        return None, None, grad_x, *own, *(grad for layer in layers for grad in layer.gradients()), *mlp.gradients()


class _Block:
    def __init__(
        self,
        shape: LinearBlockShape,
        x: Tensor,
        norm_weights: Sequence[Tensor],
        rule_weights: Sequence[Tensor],
        layers: Sequence[Callable[[Tensor], Tensor]],
        handed: tuple[Tensor, Tensor] | None = None,
        experts: TiledExperts | None = None,
    ) -> None:
        """``handed`` are the last inputs and the states that go from tile to tile. None = :meth:`forward` computes them."""
        self.experts = experts
        self.shape, self.x, self.norm_weights, self.rule_weights, self.layers = shape, x, norm_weights, rule_weights, layers
        if handed is None:
            count, channels = shape.tiles[-1].results.stop, 2 * shape.rule.keys + shape.rule.values
            handed = x.new_empty(count, TAIL, channels), x.new_empty(count, *shape.rule.state, dtype=wide_dtype(x.dtype))
        self.tails, self.states = handed

    def forward(self) -> Tensor:
        # The output has three dimensions, so that the block does not return a view to FSDP2.
        whole = torch.empty_like(self.x[None])
        for tile in self.shape.tiles:
            value = self.gated(self.start(tile))
            hidden = self.layers[4](value).add_(self.x[tile.rows])
            del value
            for rows in self.mlp_rows(tile):
                part = hidden[rows.start - tile.rows.start : rows.stop - tile.rows.start]
                normal = self.shape.norms[1].compute((part,), (self.norm_weights[1],))
                if self.experts is not None:
                    self.experts.add_output(normal, whole[0, rows].copy_(part), part=rows)
                    continue
                sources = self.layers[5](normal), self.layers[6](normal)
                product = SWIGLU.compute(sources, (), sources[0])
                torch.add(part, self.layers[7](product), out=whole[0, rows])
                del normal, sources, product
        return whole

    def mlp_rows(self, tile: StateTile) -> list[slice]:
        size = max(min(-(-len(self.x) // self.shape.mlp_tiles), tile.rows.stop - tile.rows.start), 1)
        return [slice(place, min(place + size, tile.rows.stop)) for place in range(tile.rows.start, tile.rows.stop, size)]

    def start(self, tile: StateTile, again: bool = False) -> _Tile:
        """Compute a tile up to the outputs of the rule. The first time it hands its results on."""
        normal = self.shape.norms[0].compute((self.x[tile.rows],), (self.norm_weights[0],))
        qkv, z, b, a = (layer(normal) for layer in self.layers[:4])
        given = self.tails.index_select(0, tile.given), self.states.index_select(0, tile.given)
        rule = self.shape.rule.rule(tile.chunks, (qkv, b, a, *self.rule_weights, *given))
        out, tails, states, borders = rule.forward(again)
        if not again:
            self.tails[tile.results], self.states[tile.results] = tails, states
        return _Tile(normal, z, rule, out, borders)

    def gated(self, tile: _Tile) -> Tensor:
        return self.shape.norms[2].compute((tile.out, tile.z), (self.norm_weights[2],))


@dataclass
class _Tile:
    """Its normed input [t, h], z and the rule's outputs [t, Hv x Dv], and the states that the rule's backward needs."""

    normal: Tensor
    z: Tensor
    rule: StateRule
    out: Tensor
    borders: list[Tensor]


class _Backward:
    def __init__(
        self, block: _Block, layers: Sequence[TiledLinear], mlp: TiledMlp | TiledExperts, sums: Sequence[Tensor]
    ) -> None:
        self.block, self.layers, self.mlp, self.sums = block, layers, mlp, sums
        self.tails = torch.zeros_like(block.tails, dtype=block.states.dtype)
        self.states = torch.zeros_like(block.states)
        self.alone = len(block.shape.tiles) == 1
        self.mlp_alone = self.alone and len(block.mlp_rows(block.shape.tiles[0])) == 1

    def input_gradient(self, grad: Tensor) -> Tensor:
        """Turn the gradient of the block's output [T, h] into that of its input, in place."""
        for tile in reversed(self.block.shape.tiles):
            self._add_tile(tile, grad[tile.rows])
        return grad

    def _add_tile(self, tile: StateTile, grad: Tensor) -> None:
        block, x = self.block, self.block.x[tile.rows]
        some = block.start(tile, again=True)
        value = block.gated(some)
        hidden = block.layers[4](value).add_(x)
        for rows in block.mlp_rows(tile):
            part = slice(rows.start - tile.rows.start, rows.stop - tile.rows.start)
            normal = block.shape.norms[1].compute((hidden[part],), (block.norm_weights[1],))
            if isinstance(self.mlp, TiledExperts):
                self.mlp.backward(grad[part], normal, self.mlp_alone, part=rows)
            else:
                self.mlp.backward(grad[part], normal, self.mlp_alone)
            self._add_norm(1, normal, hidden[part], grad[part])
            del normal
        del hidden
        self.layers[4].add(grad, value, self.alone)
        # The gradients of the gated value, of the rule's outputs and of z overwrite them.
        self.layers[4].through(grad, value, add=False)
        sources = some.out, some.z
        block.shape.norms[2].differentiate(value, sources, (block.norm_weights[2],), sources, (self.sums[2],))
        del value, sources
        qkv, b, a, *weights, tails, states = some.rule.backward(
            some.borders, some.out, self.tails[tile.results], self.states[tile.results]
        )
        for total, own in zip(self.sums[3:], weights, strict=True):
            total.add_(own.to(total.dtype))
        self.tails.index_add_(0, tile.given, tails.to(self.tails.dtype))
        self.states.index_add_(0, tile.given, states)
        above = qkv, some.z, b, a
        for layer, part_grad in zip(self.layers, above, strict=False):
            layer.add(part_grad, some.normal, self.alone)
        # The normed input is not read any more, so its gradient overwrites it.
        for layer, part_grad in zip(self.layers, above, strict=False):
            layer.through(part_grad, some.normal, add=layer is not self.layers[0])
        self._add_norm(0, some.normal, x, grad)

    def _add_norm(self, which: int, grad: Tensor, x: Tensor, into: Tensor) -> None:
        # Add the gradient of a norm's input to ``into``. ``grad`` is the gradient of its output, and is overwritten.
        block = self.block
        block.shape.norms[which].differentiate(grad, (x,), (block.norm_weights[which],), (grad,), (self.sums[which],))
        into.add_(grad)
