"""Tiled blocks: a decoder block runs over tiles of tokens. Only its input, output, keys and values exist for all tokens.

Forward first computes the keys and values of all tokens. For each tile of tokens it then computes queries, attention over all
visible keys, output projection, residual sums and MLP. It keeps only the block's input. Backward computes keys and values again.
From the last tile to the first it then computes the tile again, and its gradients. Only this and later tokens see the keys of a
tile. So when backward reaches a tile, the gradients of its keys and values are complete, and one pass over the tiles is enough.

Bytes: during its backward a block holds its input, the gradient of its output (which the gradient of its input overwrites), keys
and values, and their gradients in fp32. All other tensors have the size of a tile. ``plan/formulas.py`` has the formula.

The result is exact: attention over parts of the keys is merged by log-sum-exps, as in :mod:`verl_memopt.model.attention_fused`
(arXiv 2310.01889), and gradients of weights are summed over tiles in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_memopt.distributed.device import is_gpu, supports_flash
from verl_memopt.memory.recompute_elementwise_torch import RMSNorm, SwiGLU, keep, kept, zeros_to_sum
from verl_memopt.memory.recompute_gates import SigmoidGate
from verl_memopt.memory.tiled_mlp_torch import TiledLinear, TiledMlp, Traits, tensors_and_traits, tiled_linears
from verl_memopt.model.attention_fused import CPU_FLASH, EFFICIENT, FLASH, Kernel, key_heads, merge, merge_sinks, sink_gradient
from verl_memopt.model.experts import Mixture, TiledExperts
from verl_memopt.model.prefix_layout import PrefixLayout, PrefixSpan
from verl_memopt.model.rotary import apply_rotary, rotary_backward

SIGMOID_GATE = SigmoidGate()

Kinds = tuple[Sequence[Traits], Mixture | None]
"""Traits of the linear layers, and the mixture without its tensors if experts are in place of the MLP."""


@dataclass(frozen=True)
class TileCall:
    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True)
class QueryTile:
    """Some queries of a pack, and their attention calls. Each query is in one causal call. Causal calls come first."""

    queries: slice
    calls: tuple[TileCall, ...]


def tiles(layout: PrefixLayout, size: int) -> list[QueryTile]:
    """Cut the queries of a layout into tiles of ``size``. The last tile may be shorter. No call has more than ``size`` keys."""
    end = len(layout.query_places)
    (segments, spans), cut = _segments_and_spans(layout), []
    for start in range(0, end, size):
        stop = min(start + size, end)
        # Drop what ends before this tile.
        while segments[0].query + segments[0].count <= start:
            segments.pop(0)
        spans = [span for span in spans if span.queries.places.stop > start]
        own, earlier, shared = [], [], list[TileCall]()
        for segment in segments:
            if segment.query >= stop:
                break
            low, high = max(start - segment.query, 0), min(stop - segment.query, segment.count)
            queries, key = slice(segment.query + low - start, segment.query + high - start), segment.key + low
            own.append(TileCall(queries, slice(key, segment.key + high), causal=True))
            # Earlier keys of the segment are all visible, so they need no mask.
            earlier += [TileCall(queries, keys, causal=False) for keys in _parts(segment.first_key, key, size)]
        for span in spans:
            queries = slice(max(span.queries.start - start, 0), min(span.queries.places.stop, stop) - start)
            if queries.start < queries.stop:
                keys = span.keys.places
                shared += [TileCall(queries, part, causal=False) for part in _parts(keys.start, keys.stop, size)]
        cut.append(QueryTile(slice(start, stop), (*own, *earlier, *shared)))
    return cut


def _parts(start: int, stop: int, size: int) -> list[slice]:
    return [slice(place, min(place + size, stop)) for place in range(start, stop, size)]


@dataclass(frozen=True)
class _Segment:
    """Neighbouring queries that attend causally to each other, and to the keys from ``first_key`` up to their own."""

    query: int
    count: int
    key: int
    first_key: int


def _segments_and_spans(layout: PrefixLayout) -> tuple[list[_Segment], list[PrefixSpan]]:
    spans = {(span.queries.start, span.queries.length, span.keys.places.stop): span for span in layout.spans}
    segments, query = [], 0
    for count in layout.segments:
        key = int(layout.query_places[query])
        # A span that ends where the keys of a segment begin, and has the queries of the segment, gives the segment more keys.
        before = spans.pop((query, count, key), None)
        segments.append(_Segment(query, count, key, key if before is None else before.keys.start))
        query += count
    return segments, list(spans.values())


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    if not is_gpu(device):
        return CPU_FLASH
    return FLASH if supports_flash(device, dtype) else EFFICIENT


@dataclass(frozen=True)
class BlockShape:
    """Sizes and norms of a block.

    Attributes:
        tile_tokens: Number of tokens in a tile.
        mlp_tiles: Least number of parts into which the MLP cuts all tokens.
        head_dim: Size of a head.
        scale: Factor of the products of queries and keys.
        norms: The norm before attention and the norm before the MLP.
        rotary_eps: Epsilon of the norms of queries and keys, if there are any.
        gated: Of each head the first projection has the queries, then a gate of the head's output.
        gate: How the MLP computes its gate.
    """

    tile_tokens: int
    mlp_tiles: int
    head_dim: int
    scale: float
    norms: tuple[RMSNorm, RMSNorm]
    rotary_eps: float
    gated: bool
    gate: SwiGLU


def tiled_block(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: PrefixLayout,
    shape: BlockShape,
    vectors: Sequence[Tensor | None],
    layers: Sequence[Any],
    mixture: Mixture | None = None,
) -> Tensor:
    """Compute a block's output [1, Q, h] for the Q queries of a layout. It keeps ``x`` and the parameters for backward.

    Backward overwrites the gradient of the output, so nothing else may use it.

    Args:
        x: [T, h], the block's input.
        cos: [T, R], cosines of the T positions, with R <= D as in :class:`Rotary`.
        sin: [T, R], sines of the T positions.
        layout: Which tokens share a prefix, and which are queries.
        shape: Sizes and norms.
        vectors: Weights of the norms of the block's input, the MLP's input, queries and keys, and the sinks. None = there are
            none.
        layers: Projections of queries, keys, values and output, then gate, up and down, with or without adapters. In a pass
            without gradients they may be layers of any kind.
        mixture: Experts, which take the place of gate, up and down. None = there are none.
    """
    if mixture is not None and mixture.routed is not None:
        mixture = mixture._replace(routed=mixture.routed.at(layout.query_index))
    if not torch.is_grad_enabled():
        experts = None if mixture is None else TiledExperts(mixture)
        return _Block(shape, layout, (x, cos, sin, *vectors), layers, experts).forward()
    tensors, traits = tensors_and_traits(layers)
    tensors += () if mixture is None else mixture.tensors
    node = keep(x, cos, sin, *vectors, *tensors)
    kinds = traits, None if mixture is None else mixture._replace(tensors=())
    return _TiledBlock.apply(shape, layout, kinds, node, x, cos, sin, *vectors, *tensors)


class _TiledBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: BlockShape, layout: PrefixLayout, kinds: Kinds, node: Any, *tensors: Any) -> Tensor:
        ctx.shape, ctx.layout, ctx.kinds, ctx.kept = shape, layout, kinds, node
        traits, mixture = kinds
        layers = tiled_linears(tensors[8 : 8 + 4 * len(traits)], traits)
        experts = None if mixture is None else TiledExperts(mixture._replace(tensors=tensors[24:]))
        return _Block(shape, layout, tensors[:8], [layer.output for layer in layers], experts).forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = kept(ctx), ctx.needs_input_grad[4:]
        traits, mixture = ctx.kinds
        layers = tiled_linears(tensors[8:24], traits[:4], needed[8:24])  # four tensors each
        mlp: TiledMlp | TiledExperts = (
            TiledMlp(tensors[24:], traits[4:], needed[24:], ctx.shape.gate)
            if mixture is None
            else TiledExperts(mixture._replace(tensors=tuple(tensors[24:])), needed=needed[24:])
        )
        weights = tensors[3:8]
        sums = [zeros_to_sum(weight) if wanted else None for weight, wanted in zip(weights, needed[3:8], strict=True)]
        block = _Block(ctx.shape, ctx.layout, tensors[:8], [layer.output for layer in layers])
        grad_x = _Backward(block, layers, mlp, sums).input_gradient(grad[0].contiguous())
        vector_grads = (None if total is None else total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True))
        layer_grads = (grad for layer in layers for grad in layer.gradients())
        return *(None,) * 4, grad_x, None, None, *vector_grads, *layer_grads, *mlp.gradients()


class _Block:
    def __init__(
        self,
        shape: BlockShape,
        layout: PrefixLayout,
        tensors: Sequence[Any],
        layers: Sequence[Callable[[Tensor], Tensor]],
        experts: TiledExperts | None = None,
    ) -> None:
        """``tensors`` are x, cos and sin, the weights of the four norms, and the sinks."""
        self.experts = experts
        self.x, self.cos, self.sin, self.attention_norm, self.mlp_norm, self.query_norm, self.key_norm, self.sinks = tensors
        self.shape, self.layers, self.kernel = shape, layers, kernel_for(self.x.device, self.x.dtype)
        self.index, self.tiles = layout.query_index, tiles(layout, shape.tile_tokens)
        self.num_queries = self.tiles[-1].queries.stop if self.tiles else 0

    def forward(self) -> Tensor:
        # The output has three dimensions, so that the block does not return a view to FSDP2.
        whole = self.x.new_empty(1, self.num_queries, self.x.shape[1])
        out = whole[0]
        keys, values = self.keys_and_values()
        for tile in self.tiles:
            query, gate = self.query_and_gate(self.project(0, self.normal(tile.queries)))
            query = self.rotated_query(query, tile.queries)
            hidden = self.after_attention(tile.queries, self.gated(self.attend(query, keys, values, tile.calls)[0], gate))
            del query, gate
            for rows in self.mlp_rows(tile.queries):
                tile_hidden = hidden[rows.start - tile.queries.start : rows.stop - tile.queries.start]
                normal = self.shape.norms[1].compute((tile_hidden,), (self.mlp_norm,))
                if self.experts is not None:
                    self.experts.add_output(normal, out[rows].copy_(tile_hidden), part=rows)
                    continue
                sources = self.project(4, normal), self.project(5, normal)
                value = self.shape.gate.compute(sources, (), sources[0])
                torch.add(tile_hidden, self.project(6, value), out=out[rows])
                del normal, sources, value
        return whole

    def project(self, place: int, x: Tensor) -> Tensor:
        return self.layers[place](x)

    def heads(self, states: Tensor) -> Tensor:
        return states.view(states.shape[0], -1, self.shape.head_dim)

    def at(self, tensor: Tensor, queries: slice) -> Tensor:
        return tensor[queries] if self.index is None else tensor[self.index[queries]]

    def all_rows(self) -> list[slice]:
        return _parts(0, len(self.x), self.shape.tile_tokens)

    def mlp_rows(self, queries: slice) -> list[slice]:
        size = max(min(-(-self.num_queries // self.shape.mlp_tiles), self.shape.tile_tokens), 1)
        return _parts(queries.start, queries.stop, size)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        # Returns normed and rotated keys, and values, of all tokens: [T, kv heads, D] each.
        keys = values = self.x.new_empty(0)
        for rows in self.all_rows():
            normal = self.shape.norms[0].compute((self.x[rows],), (self.attention_norm,))
            key, value = self.heads(self.project(1, normal)), self.heads(self.project(2, normal))
            if not keys.numel():
                keys, values = (self.x.new_empty(len(self.x), *states.shape[1:]) for states in (key, value))
            keys[rows] = apply_rotary(key, self.key_norm, self.shape.rotary_eps, self.cos[rows], self.sin[rows])
            values[rows] = value
        return keys, values

    def normal(self, queries: slice) -> Tensor:
        return self.shape.norms[0].compute((self.at(self.x, queries),), (self.attention_norm,))

    def rotated_query(self, query: Tensor, queries: slice) -> Tensor:
        tables = self.at(self.cos, queries), self.at(self.sin, queries)
        return apply_rotary(self.heads(query), self.query_norm, self.shape.rotary_eps, *tables)

    def query_and_gate(self, projected: Tensor) -> tuple[Tensor, Tensor | None]:
        # Returns the queries [t, heads x D], and the gates of the same shape, if there are any.
        if not self.shape.gated:
            return projected, None
        query, gate = projected.view(projected.shape[0], -1, 2, self.shape.head_dim).unbind(2)
        return query.flatten(1), gate.flatten(1)

    def gated(self, attended: Tensor, gate: Tensor | None) -> Tensor:
        # Returns the input of the output projection, [t, heads x D].
        return attended.flatten(1) if gate is None else SIGMOID_GATE.compute((attended.flatten(1), gate), ())

    def after_attention(self, queries: slice, value: Tensor) -> Tensor:
        # Returns the state [t, h] between attention and MLP.
        return self.project(3, value).add_(self.at(self.x, queries))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, calls: Sequence[TileCall]) -> tuple[Tensor, Tensor]:
        """Return attention [t, heads, D] for the queries of a tile, and the log-sum-exps of the scores, fp32 [t, heads]."""
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
        for query_heads, own_heads in key_heads(query, keys):
            q = self._working(query[:, query_heads])
            whole = _sum_like(out[:, query_heads], calls)
            for call in calls:
                k, v = (self._repeated(states[call.keys, own_heads], q) for states in (keys, values))
                part, part_lse = self.kernel.forward(_view(q[call.queries]), k, v, call.causal, self.shape.scale)
                into, into_lse = _view(whole[call.queries]), _view(lse[call.queries, query_heads])
                # Causal calls come first and write every row. Later calls are merged into these rows.
                if not call.causal:
                    part, part_lse = merge(into, into_lse, part, part_lse)
                into.copy_(part)
                into_lse.copy_(part_lse)
            if self.sinks is not None:
                whole, own_lse = merge_sinks(whole, lse[:, query_heads], self.sinks[query_heads], whole.dtype)
                out[:, query_heads], lse[:, query_heads] = whole, own_lse
            elif whole.dtype != out.dtype:
                out[:, query_heads].copy_(whole)
        return out, lse

    def attend_backward(
        self,
        grad: Tensor,
        attended: tuple[Tensor, ...],
        keys: Tensor,
        values: Tensor,
        sums: Sequence[Tensor],
        calls: Sequence[TileCall],
    ) -> Tensor:
        """Return the gradient of a tile's queries [t, heads, D], and add the gradients of keys and values to ``sums``.

        ``attended`` are the queries, their attention output and its log-sum-exps.
        """
        query, out, lse = attended
        into = torch.empty_like(query)
        for query_heads, own_heads in key_heads(query, keys):
            above, q, o = (self._working(states[:, query_heads]) for states in (grad, query, out))
            query_sum = _sum_like(into[:, query_heads], calls)
            for call in calls:
                k, v = (self._repeated(states[call.keys, own_heads], q) for states in (keys, values))
                rows = call.queries
                views = (_view(above[rows]), _view(q[rows]), k, v, _view(o[rows]), _view(lse[rows, query_heads]))
                query_grad, *key_value_grads = self.kernel.backward(*views, call.causal, self.shape.scale)
                target = _view(query_sum[rows])
                if call.causal:
                    target.copy_(query_grad)
                else:
                    target.add_(query_grad)
                for total, part in zip(sums, key_value_grads, strict=True):
                    total[call.keys, own_heads] += part.sum(1, dtype=total.dtype)[0][:, None]
                del query_grad, key_value_grads, views, k, v
            if query_sum.dtype != into.dtype:
                into[:, query_heads].copy_(query_sum)
        return into

    def _working(self, tensor: Tensor) -> Tensor:
        # A CPU is not faster in half precision, so merge parts in fp32 and round once.
        return tensor.float() if self.kernel.float_parts else tensor

    def _repeated(self, tensor: Tensor, query: Tensor) -> Tensor:
        return _view(self._working(tensor)).expand(-1, query.shape[1], -1, -1)


def _sum_like(target: Tensor, calls: Sequence[TileCall]) -> Tensor:
    # A tensor for merging the parts of several calls in fp32. It is `target` itself if there is nothing to merge.
    apart = target.dtype == torch.float32 or all(call.causal for call in calls)
    return target if apart else torch.empty_like(target, dtype=torch.float32)


def _view(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)[None]


class _Backward:
    def __init__(
        self, block: _Block, layers: Sequence[TiledLinear], mlp: TiledMlp | TiledExperts, sums: Sequence[Tensor | None]
    ) -> None:
        self.block, self.layers, self.mlp, self.sums = block, layers, mlp, sums
        self.keys, self.values = block.keys_and_values()
        # In fp32, because several tiles add to them.
        self.key_sums = [zeros_to_sum(states) for states in (self.keys, self.values)]
        self.alone = len(block.tiles) == 1
        # With only one tile the gradients of weights need no fp32 sums.
        self.mlp_alone = self.alone and len(block.mlp_rows(block.tiles[0].queries)) == 1

    def input_gradient(self, grad: Tensor) -> Tensor:
        """Compute the gradient of the block's input [T, h] from that of its output [Q, h], which is overwritten."""
        block = self.block
        if block.index is None:
            for tile in reversed(block.tiles):
                self._add_tile(tile, grad[tile.queries], with_keys=True)
            return grad
        # Only some tokens are queries, so tiles of queries and tiles of keys have different tokens.
        grad_x = torch.zeros_like(block.x)
        for tile in reversed(block.tiles):
            self._add_tile(tile, grad[tile.queries], with_keys=False)
            grad_x.index_add_(0, block.index[tile.queries], grad[tile.queries])
        rows = block.all_rows()
        for tokens in rows:
            x = block.x[tokens]
            normal = block.shape.norms[0].compute((x,), (block.attention_norm,))
            above = self._keys_to_normal(tokens, normal, alone=len(rows) == 1)
            self._add_norm(0, self._through((1, 2), above, normal), x, block.attention_norm, grad_x[tokens])
        return grad_x

    def _add_tile(self, tile: QueryTile, grad: Tensor, with_keys: bool) -> None:
        # Compute the gradient of a tile's input from that of its output, ``grad`` [t, h], in place.
        block, queries = self.block, tile.queries
        normal = block.normal(queries)
        projected, gate = block.query_and_gate(block.project(0, normal))
        # Recompute everything in the tile from the block's input.
        query = block.rotated_query(projected, queries)
        attended = query, *block.attend(query, self.keys, self.values, tile.calls)
        value = block.gated(attended[1], gate)
        self._add_mlp(queries, block.after_attention(queries, value), grad)
        # The MLP's backward has turned ``grad`` into the gradient of the state after attention.
        self.layers[3].add(grad, value, self.alone)
        grad_attended = torch.empty_like(query)
        grad_value = grad_attended.flatten(1)
        self.layers[3].through(grad, grad_value, add=False)
        if gate is not None:
            # The gradient of the gates overwrites them.
            SIGMOID_GATE.differentiate(grad_value, (attended[1].flatten(1), gate), (), (grad_value, gate), ())
        if self.sums[4] is not None:
            self.sums[4].add_(sink_gradient(grad_attended, *attended[1:], block.sinks))
        grad_query = block.attend_backward(grad_attended, attended, self.keys, self.values, self.key_sums, tile.calls)
        del attended, query, grad_attended, value, grad_value
        tables = block.at(block.cos, queries), block.at(block.sin, queries)
        rest = (block.query_norm, block.shape.rotary_eps, *tables)
        # The gradient of the projected queries overwrites them.
        heads = block.heads(projected)
        rotary_backward(grad_query, heads, *rest, heads, self.sums[2])
        if gate is not None:
            projected = torch.stack((heads, block.heads(gate)), 2).flatten(1)
        del grad_query
        self.layers[0].add(projected, normal, self.alone)
        # The projections of queries, keys and values have the same normed input, so its gradient is a sum.
        above = [projected]
        if with_keys:
            above += self._keys_to_normal(queries, normal, self.alone)
        self._add_norm(0, self._through(range(len(above)), above, normal), block.at(block.x, queries), block.attention_norm, grad)

    def _keys_to_normal(self, tokens: slice, normal: Tensor, alone: bool) -> list[Tensor]:
        # Returns the gradients of projected keys and values, [t, kv heads x D], and adds to the gradients of their layers.
        block = self.block
        projected = block.project(1, normal)
        heads = block.heads(projected)
        grad_key, grad_value = (total[tokens].to(normal.dtype) for total in self.key_sums)
        tables = block.cos[tokens], block.sin[tokens]
        rotary_backward(grad_key, heads, block.key_norm, block.shape.rotary_eps, *tables, heads, self.sums[3])
        above = [projected, grad_value.flatten(1)]
        for layer, grad in zip(self.layers[1:3], above, strict=True):
            layer.add(grad, normal, alone)
        return above

    def _add_mlp(self, queries: slice, hidden: Tensor, grad: Tensor) -> None:
        # Compute the gradient of the state between attention and MLP from that of the tile's output, ``grad`` [t, h], in place.
        block = self.block
        for rows in block.mlp_rows(queries):
            tile_rows = slice(rows.start - queries.start, rows.stop - queries.start)
            normal = block.shape.norms[1].compute((hidden[tile_rows],), (block.mlp_norm,))
            if isinstance(self.mlp, TiledExperts):
                self.mlp.backward(grad[tile_rows], normal, self.mlp_alone, part=rows)
            else:
                self.mlp.backward(grad[tile_rows], normal, self.mlp_alone)
            self._add_norm(1, normal, hidden[tile_rows], block.mlp_norm, grad[tile_rows])
            del normal

    def _through(self, places: Sequence[int], grads: Sequence[Tensor], out: Tensor) -> Tensor:
        # Write the gradient of the common input of some layers into `out`. `grads` are the gradients of their outputs.
        for place, grad in zip(places, grads, strict=True):
            self.layers[place].through(grad, out, add=place != places[0])
        return out

    def _add_norm(self, which: int, grad: Tensor, x: Tensor, weight: Tensor, into: Tensor) -> None:
        # Add the gradient of a norm's input to `into`. `grad` is the gradient of the norm's output, and is overwritten.
        self.block.shape.norms[which].differentiate(grad, (x,), (weight,), (grad,), (self.sums[which],))
        # ``into`` already has the gradient of the residual connection.
        into.add_(grad)
