"""The decoder of Llama, Mistral, Qwen, Gemma 3 and 4, GLM-4.5 and gpt-oss over packed sequences.

The memory knobs inside a block act here. The modules take over the submodules of a Hugging Face model and keep their names, so
that checkpoints, adapters, export and weight sync find the same parameters. Models of other architectures keep the modules of
transformers (:mod:`verl_memopt.model.packed_model`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from verl_memopt.memory.activation_checkpointing_torch import Forward, checkpointed, checkpointed_block
from verl_memopt.memory.recompute_elementwise_torch import (
    Rows,
    SwiGLU,
    gate_of,
    norm_and_weight,
    product_tiles,
    recomputed_norm,
    recomputed_outputs,
)
from verl_memopt.memory.recompute_gates import SigmoidGate
from verl_memopt.memory.tiled_mlp_torch import recomputed_mlp, tiled_mlp
from verl_memopt.model.attention import Attend, AttentionArgs
from verl_memopt.model.block_options import LAYER_INPUTS, BlockOptions, window_of
from verl_memopt.model.captured_block import CapturedBlocks
from verl_memopt.model.experts import Experts
from verl_memopt.model.experts_beside import ExpertsBeside
from verl_memopt.model.gated_delta_net import GatedDeltaNet
from verl_memopt.model.prefix_kv import Prefix, Tables
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.rotary import Rotary
from verl_memopt.model.router_replay import LayerRoutes, Routes
from verl_memopt.model.tiled_block import BlockShape, tiled_block

logger = logging.getLogger(__name__)

BESIDE = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
"""Norms of a block with experts beside its MLP: of the outputs of MLP and experts, and of the experts' input."""

Handed = tuple[Tensor, Tensor, Tensor, Tensor]
"""What later layers of the same type read of a layer: rotated keys and normed values [K, kv heads, D], and the tables [1, K, R]
of cosines and sines for these K tokens."""


class Attention(nn.Module):
    q_proj: Any
    o_proj: Any

    def __init__(self, source: Any, options: BlockOptions) -> None:
        super().__init__()
        self.source_class, self.options = type(source).__name__, options
        self.q_norm: Any = None
        self.k_norm: Any = None
        self.v_norm: Any = None  # has no weight (Gemma 4)
        self.v_proj: Any = None  # None = values are keys (Gemma 4)
        self.k_proj: Any = None  # None = keys and values are those of an earlier layer (Gemma 4)
        self.stores = bool(getattr(source, "store_full_length_kv", False)) and source.config.num_kv_shared_layers > 0
        # In the order of the source, so that parameters keep their order.
        for name, part in source.named_children():
            setattr(self, name, part)
        # Of each head q_proj has the queries, then a gate of the head's output.
        self.gated = self.q_proj.out_features == 2 * self.o_proj.in_features
        self.sinks = getattr(source, "sinks", None)  # [heads], the score of one more key of each head, whose value is zero
        self.head_dim, self.scale, self.window = source.head_dim, source.scaling, window_of(source)
        self.layer = source.layer_idx
        self.columns = slice(None)  # of the rotary tables, if layers of several types have tables of their own

    def forward(
        self, x: Tensor, norm: nn.Module, tables: Tables, layout: PrefixLayout, attend: Attend, prefix_kv: Prefix | None
    ) -> tuple[Tensor, Tensor, Handed | None]:
        """Return attention's output [Q, h] for the Q queries of the packed sequences, ``x``, and what later layers read.

        ``x`` [T, h] is the input of ``norm``. With sequence parallelism ``x`` and the result have only this rank's tokens. The
        other arguments are as in :meth:`DecoderBlock.forward`. The returned ``x`` accumulates its gradient in the norm's
        backward.
        """
        rows = query_rows(layout, prefix_kv)
        if self.stores:
            query, key, value, x = self._query_key_value(x, norm, rows)
            if prefix_kv is not None:
                key, value, tables = prefix_kv.extend(self.layer, key, value, tables)
            # Keys are rotated here once, and no kernel overwrites them, because other layers read them too.
            handed = self._rotary(tables).key(self._heads(key)), self._heads(value), *tables
            return self._projected(self._with_handed(query, handed, layout, attend), None), x, handed
        if not self.options.recompute and rows is None:
            assert prefix_kv is None, "prefix KV needs recomputed norms and rotations"
            return self._plain(norm(x), tables, layout, attend), x, None
        # Attention applies the norms and the rotation of queries and keys itself, and again in backward. So they are kept as the
        # projections return them.
        query, key, value, x = self._query_key_value(x, norm, rows)
        query, gate = self._gate(query)
        if prefix_kv is not None:
            key, value, tables = prefix_kv.extend(self.layer, key, value, tables)
        return self._projected(self.attention(query, key, value, tables, layout, attend), gate), x, None

    def reading(self, x: Tensor, norm: Any, layout: PrefixLayout, attend: Attend, handed: Handed) -> tuple[Tensor, Tensor]:
        """Do as :meth:`forward` in a layer that reads the keys and values of an earlier one. ``x`` [Q, h] has the queries."""
        if self.options.recompute:
            rms_norm, weight = norm_and_weight(norm)
            query, x = recomputed_outputs(rms_norm, (x,), (weight,), (self.q_proj,), passed=True)
        else:
            query = self.q_proj(norm(x))
        return self._projected(self._with_handed(query, handed, layout, attend), None), x

    def _with_handed(self, query: Tensor, handed: Handed, layout: PrefixLayout, attend: Attend) -> Tensor:
        key, value, *tables = handed
        rotary = self._rotary((tables[0], tables[1]))
        cos, sin = layout.at_queries(rotary.cos, rotary.sin)
        turned = replace(rotary, cos=cos, sin=sin).query(self._heads(query))
        return self._attended(turned, key, value, layout, attend, None)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, tables: Tables, layout: PrefixLayout, attend: Attend
    ) -> Tensor:
        """Return attention [Q, heads x D] over the outputs of the projections: [Q, heads x D], and [T, kv heads x D] twice."""
        query, key, value = (self._heads(states) for states in (query, key, value))
        return self._attended(query, key, value, layout, attend, self._rotary(tables))

    def _query_key_value(self, x: Tensor, norm: Any, rows: Rows | None) -> Sequence[Tensor]:
        # Returns queries [Q, heads x D], keys and values [T, kv heads x D], and x.
        layers = [layer for layer in (self.q_proj, self.k_proj, self.v_proj) if layer is not None]
        if self.options.recompute:
            rms_norm, weight = norm_and_weight(norm)
            # A pruned block needs queries of some rows, but keys and values of all rows.
            row_layers, passed = (self.q_proj,), rows is None
            outs = recomputed_outputs(rms_norm, (x,), (weight,), layers, rows, row_layers, passed)
            query, key, *values, x = outs if passed else [*outs, x]
            return query, key, self._values(key, *values), x
        normal = norm(x)
        at_rows = normal if rows is None else normal[rows.index]
        # The norm is computed for all tokens, because keys and values need all of them.
        query, key, *values = (layer(at_rows if layer is self.q_proj else normal) for layer in layers)
        return query, key, self._values(key, *values), x

    def _values(self, key: Tensor, value: Tensor | None = None) -> Tensor:
        # Values [T, kv heads x D], normed if the model norms them. None = they are the keys.
        if self.v_norm is None:
            assert value is not None
            return value
        if value is None:
            # A copy, because attention overwrites the keys with their gradient before the norm of values reads them again.
            value = key.clone() if torch.is_grad_enabled() else key
        heads = value.reshape(-1, self.head_dim)
        if not self.options.recompute:
            return self.v_norm(heads).view(value.shape)
        return recomputed_norm(heads, heads.new_ones(self.head_dim), self.v_norm.eps).view(value.shape)

    def _gate(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        # From the output of q_proj the queries [Q, heads x D] and the gates of the same shape, if there are any.
        if not self.gated:
            return query, None
        query, gate = query.view(query.shape[0], -1, 2, self.head_dim).unbind(2)
        return query.flatten(1), gate.flatten(1)

    def _projected(self, attended: Tensor, gate: Tensor | None) -> Tensor:
        if gate is None:
            return self.o_proj(attended)
        if self.options.recompute:
            return recomputed_outputs(SigmoidGate(), (attended, gate), (), (self.o_proj,))[0]
        return self.o_proj(attended * gate.sigmoid())

    def _plain(self, normal: Tensor, tables: Tables, layout: PrefixLayout, attend: Attend) -> Tensor:
        query, gate = self._gate(self.q_proj(normal))
        query = _maybe(self.q_norm, self._heads(query))
        key = self._heads(self.k_proj(normal))
        value = _maybe(self.v_norm, key if self.v_proj is None else self._heads(self.v_proj(normal)))
        key = _maybe(self.k_norm, key)
        tables = self._own_tables(tables)
        if layout.split is not None:
            # The tables have the tokens of all ranks, but queries and keys have only this rank's tokens.
            cos, sin = (table[:, layout.split.own] for table in tables)
            tables = cos, sin
        query, key = apply_rotary(query, tables), apply_rotary(key, tables)
        return self._projected(self._attended(query, key, value, layout, attend, None), gate)

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, layout: PrefixLayout, attend: Attend, rotary: Rotary | None
    ) -> Tensor:
        out = attend(query, key, value, AttentionArgs(layout, self.scale, self.window, rotary, sinks=self.sinks))
        return out.flatten(1)

    def _heads(self, states: Tensor) -> Tensor:
        return states.view(states.shape[0], states.shape[1] // self.head_dim, self.head_dim)

    def _own_tables(self, tables: Tables) -> Tables:
        cos, sin = (table[..., self.columns] for table in tables)
        return cos, sin

    def _rotary(self, tables: Tables) -> Rotary:
        cos, sin = (table[0] for table in self._own_tables(tables))
        # Families without norms of queries and keys have no epsilon, so the 0 is never read.
        if self.q_norm is None:
            return Rotary(cos, sin, (None, None), 0.0)
        norm, query_weight = norm_and_weight(self.q_norm)
        # A layer that reads the keys of an earlier one does not rotate keys.
        key_weight = None if self.k_norm is None else norm_and_weight(self.k_norm)[1]
        return Rotary(cos, sin, (query_weight, key_weight), norm.eps)


class MLP(nn.Module):
    """The MLP of a block: ``down(act(gate(y)) * up(y))``, for a normed input ``y``.

    In the methods, ``post`` is a norm of this output before it is added to the residual. None = there is none.
    """

    def __init__(self, source: Any, options: BlockOptions) -> None:
        super().__init__()
        self.source_class, self.options = type(source).__name__, options
        self.gate_proj, self.up_proj, self.down_proj = source.gate_proj, source.up_proj, source.down_proj
        self.act_fn, self.gate = source.act_fn, gate_of(source.config)

    @property
    def sums(self) -> bool:
        # Whether to call forward_sum(), which also adds attention's output to the residual.
        return self.options.recompute and (self.options.mlp_tiles is not None or not torch.is_grad_enabled())

    def forward_sum(
        self,
        residual: Tensor,
        attended: Tensor,
        norm: Any,
        least_tiles: int,
        checkpoint: Forward | None = None,
        post: Any = None,
    ) -> Tensor:
        """Do as :meth:`forward` for the input ``residual + attended``, [T, h] each, over at least ``least_tiles`` tiles.

        ``checkpoint``: as in :func:`recomputed_mlp`.
        """
        layers, tiles = (self.gate_proj, self.up_proj, self.down_proj), self.options.mlp_tiles
        tiles = 1 if tiles is None else max(tiles, least_tiles)
        assert self.gate is not None, "recomputed"
        after = None if post is None else norm_and_weight(post)
        return recomputed_mlp(residual, attended, *norm_and_weight(norm), layers, tiles, checkpoint, self.gate, after)

    def forward(self, hidden: Tensor, norm: Any, post: Any = None) -> Tensor:
        """Return ``hidden`` plus the MLP's output for it. ``hidden`` [1, T, h] is the input of ``norm``."""
        x, out = self.parts(hidden.squeeze(0), norm)
        if not self.options.recompute:
            return hidden + _maybe(post, out)[None]
        return x[None] + (out if post is None else _recomputed(post, out))[None]

    def parts(self, x: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """Return x [T, h], the input of ``norm``, and the MLP's output for it [T, h].

        The returned x accumulates its gradient in the norm's backward, if the norm is recomputed.
        """
        tiles = self.options.mlp_tiles
        if not self.options.recompute:
            return x, self.gated(norm(x)) if tiles is None else tiled_mlp(self, norm(x), tiles)
        if tiles is not None:
            return x, tiled_mlp(self, _recomputed(norm, x), tiles)
        rms_norm, weight = norm_and_weight(norm)
        gate, up, x = recomputed_outputs(rms_norm, (x,), (weight,), (self.gate_proj, self.up_proj), passed=True)
        assert self.gate is not None, "recomputed"
        (down,) = recomputed_outputs(self.gate, (gate, up), (), (self.down_proj,))
        return x, down

    def gated(self, normal: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(normal)) * self.up_proj(normal))


class DecoderBlock(nn.Module):
    captured: CapturedBlocks | None = None
    """Runs the block as CUDA graphs. None = it is not captured."""

    def __init__(self, source: Any, options: BlockOptions) -> None:
        super().__init__()
        self.source_class, self.options = type(source).__name__, options
        if hasattr(source, "linear_attn"):
            self.linear_attn = GatedDeltaNet(source.linear_attn, options.recompute)
        else:
            self.self_attn = Attention(source.self_attn, options)
        self.mlp = Experts(source.mlp, options) if hasattr(source.mlp, "experts") else MLP(source.mlp, options)
        # Keep the names of transformers, because checkpoints have these names.
        self.input_layernorm = source.input_layernorm
        self.post_attention_layernorm = source.post_attention_layernorm
        if hasattr(source, "post_feedforward_layernorm"):
            self.pre_feedforward_layernorm = source.pre_feedforward_layernorm
            self.post_feedforward_layernorm = source.post_feedforward_layernorm
        self.kind = getattr(source.self_attn, "layer_type", None) if hasattr(source, "self_attn") else None
        if getattr(source, "hidden_size_per_layer_input", 0):
            self.act_fn = source.act_fn
            self.per_layer_input_gate, self.per_layer_projection = source.per_layer_input_gate, source.per_layer_projection
            self.post_per_layer_input_norm = source.post_per_layer_input_norm
        # Experts beside the MLP (Gemma 4). None = the block has none, or `mlp` are its experts.
        self.experts: ExpertsBeside | None = None
        if hasattr(source, "experts"):
            self.router, self.experts = source.router, ExpertsBeside(source.experts, source.router, options)
            for name in BESIDE:
                setattr(self, name, getattr(source, name))
        # A factor [1] of the block's output, which is not trained. None = there is none.
        self.layer_scalar: nn.Parameter | None = getattr(source, "layer_scalar", None)

    @property
    def norms_outputs(self) -> bool:
        """Whether the outputs of attention and MLP have norms, as in Gemma 3 and 4."""
        return hasattr(self, "post_feedforward_layernorm")

    @property
    def mlp_norms(self) -> tuple[Any, Any]:
        # The norm of the MLP's input, and that of its output or None.
        if self.norms_outputs:
            return self.pre_feedforward_layernorm, self.post_feedforward_layernorm
        return self.post_attention_layernorm, None

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: PrefixLayout,
        attend: Attend | None,
        prefix_kv: Prefix | None = None,
        routed: LayerRoutes | None = None,
        inputs: Tensor | None = None,
        handed: Handed | None = None,
    ) -> Any:
        """Return the block's output [1, Q, h] for the Q queries. These are all T tokens, unless the block is pruned.

        If later layers read its keys and values, return (output, what they read).

        Args:
            hidden: [1, T, h]. With sequence parallelism it has only this rank's tokens.
            cos: [1, T, D], cosines of the positions of all tokens.
            sin: [1, T, D], sines of the positions of all tokens.
            layout: Which of the T tokens share a prefix.
            attend: The attention kernel. None = run the block over tiles, which has its own kernel.
            prefix_kv: The prefix KV of these answers, or a recorder if this is the forward of the prompt.
            routed: The experts of the T tokens, if a block with experts replays or records them.
            inputs: [1, T, n], the tokens' own inputs of this layer. None = they have none.
            handed: What an earlier layer handed on. None = the block has keys and values of its own.
        """
        found = self._output(hidden, cos, sin, layout, attend, prefix_kv, routed, inputs, handed)
        out, *more = found if isinstance(found, tuple) else (found,)
        # In place, outside of the checkpointed part, which would hold a gradient before and after the factor.
        out = out if self.layer_scalar is None else _Scaled.apply(out, self.layer_scalar)
        return (out, *more) if more else out

    def _output(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: PrefixLayout,
        attend: Attend | None,
        prefix_kv: Prefix | None,
        routed: LayerRoutes | None,
        inputs: Tensor | None,
        handed: Handed | None,
    ) -> Any:
        if attend is None:
            assert prefix_kv is None, "a tiled block cannot use prefix KV"
            assert layout.split is None, "a tiled block needs the keys of all tokens on this rank"
            return self._tiled(hidden, cos, sin, layout, routed)
        if self.captured is not None and self._can_replay(hidden, layout, prefix_kv):
            return self.captured.compute(self, hidden, (cos, sin), layout, attend)
        # FSDP2's hooks are outside of this call, so a block is gathered only once for its second forward and its backward.
        if self.options.checkpoint == "full" and self._is_one_output(hidden, prefix_kv):
            return checkpointed_block(self.compute, hidden, cos, sin, layout, attend, None, routed)
        if self.options.checkpoint is not None:
            given = hidden, cos, sin, layout, attend, prefix_kv, routed, None, inputs, *(handed or ())
            return checkpointed(self.compute, *given, mode=self.options.checkpoint)
        return self.compute(hidden, cos, sin, layout, attend, prefix_kv, routed, None, inputs, *(handed or ()))

    def _is_one_output(self, hidden: Tensor, prefix_kv: Prefix | None) -> bool:
        # A prefix KV has gradients of its own. A first block whose input needs no gradient has nothing to start a backward from.
        one = not self.has_inputs and not (self.reads or self.stores)
        return one and prefix_kv is None and hidden.requires_grad and torch.is_grad_enabled() and self.sums

    @property
    def sums(self) -> bool:
        # Whether the MLP adds attention's output to the residual.
        return self.mlp.sums and self.experts is None

    @property
    def mixture(self) -> Experts | ExpertsBeside | None:
        """Its experts. None = it has none."""
        return self.mlp if isinstance(self.mlp, Experts) else self.experts

    @property
    def has_inputs(self) -> bool:
        """Whether each token has an input of its own for this layer."""
        return hasattr(self, "per_layer_input_gate")

    @property
    def reads(self) -> bool:
        """Whether it reads the keys and values of an earlier block."""
        return not self.is_linear and self.self_attn.k_proj is None

    @property
    def stores(self) -> bool:
        """Whether later blocks read its keys and values."""
        return not self.is_linear and self.self_attn.stores

    def _can_replay(self, hidden: Tensor, layout: PrefixLayout, prefix_kv: Prefix | None) -> bool:
        # Not a pruned block, whose rows differ from one micro-batch to the next.
        learns = hidden.requires_grad or not torch.is_grad_enabled()
        return learns and prefix_kv is None and layout.query_index is None

    @property
    def tile_tokens(self) -> int | None:
        if self.is_linear:
            return self.options.tile_tokens
        return None if self.self_attn.window is not None or self.norms_outputs else self.options.tile_tokens

    @property
    def is_linear(self) -> bool:
        return hasattr(self, "linear_attn")

    def _tiled(self, hidden: Tensor, cos: Tensor, sin: Tensor, layout: PrefixLayout, routed: LayerRoutes | None) -> Tensor:
        mlp = self.mlp
        mixture = mlp.mixture._replace(routed=routed) if isinstance(mlp, Experts) else None
        assert self.tile_tokens is not None
        if self.is_linear:
            return self.linear_attn.tiled(
                hidden.squeeze(0), layout, self.tile_tokens, self.options.mlp_tiles or 1,
                (self.input_layernorm, self.post_attention_layernorm),
                mixture or (mlp.gate_proj, mlp.up_proj, mlp.down_proj),
            )  # fmt: skip
        attention = self.self_attn
        norms = (self.input_layernorm, self.post_attention_layernorm, attention.q_norm, attention.k_norm)
        found: Any = [(None, None) if norm is None else norm_and_weight(norm) for norm in norms]
        own_norms, weights = zip(*found, strict=True)
        vectors = *weights, attention.sinks
        shape = BlockShape(
            self.tile_tokens,
            self.options.mlp_tiles or 1,
            attention.head_dim,
            attention.scale,
            own_norms[:2],
            0.0 if own_norms[2] is None else own_norms[2].eps,
            attention.gated,
            SwiGLU() if isinstance(mlp, Experts) or mlp.gate is None else mlp.gate,
        )
        layers = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        if isinstance(mlp, Experts):
            return tiled_block(hidden.squeeze(0), cos[0], sin[0], layout, shape, vectors, layers, mixture)
        of_mlp = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        return tiled_block(hidden.squeeze(0), cos[0], sin[0], layout, shape, vectors, (*layers, *of_mlp))

    def compute(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: PrefixLayout,
        attend: Attend,
        prefix_kv: Prefix | None,
        routed: LayerRoutes | None = None,
        checkpoint: Forward | None = None,
        inputs: Tensor | None = None,
        *handed: Tensor,
    ) -> Any:
        # squeeze, not [0]: the backward of an index allocates zeros and copies the gradient into them.
        rows, stored = query_rows(layout, prefix_kv), None
        if inputs is not None:
            inputs = inputs.squeeze(0) if rows is None else inputs.squeeze(0).index_select(0, rows.index)
        x = hidden.squeeze(0)
        if self.reads and rows is not None:
            x, rows = x.index_select(0, rows.index), None
        x, residual = self._residual(x, rows)
        if self.is_linear:
            attended, passed = self.linear_attn(x, self.input_layernorm, layout, prefix_kv)
        elif self.reads:
            key, value, *tables = handed
            own = key, value, tables[0], tables[1]
            attended, passed = self.self_attn.reading(x, self.input_layernorm, layout, attend, own)
        else:
            attended, passed, stored = self.self_attn(x, self.input_layernorm, (cos, sin), layout, attend, prefix_kv)
        # The sum must read ``passed`` and not ``x``, because the norm's backward accumulates the gradient of ``passed``.
        residual = passed if rows is None else residual
        if self.norms_outputs:
            after: Any = self.post_attention_layernorm
            attended = _recomputed(after, attended) if self.options.recompute else after(attended)
        norm, post = self.mlp_norms
        routes = {} if routed is None else {"routed": routed.at(None if rows is None else rows.index)}
        if self.sums:
            # As many tiles as for all tokens, so that the tiles of a pruned block are not larger.
            tiles = len(product_tiles(x))
            out = self.mlp.forward_sum(residual, attended, norm, tiles, checkpoint, post, **routes)
        else:
            # The sum has three dimensions, so that the block does not return a view to FSDP2.
            hidden = residual[None] + attended[None]
            del attended  # freed before the MLP allocates
            if self.experts is not None:
                out = self._beside(hidden.squeeze(0), self.experts, **routes)
            else:
                out = self.mlp(hidden, norm, post, **routes)
        out = out if inputs is None else self._with_inputs(out, inputs)
        return out if stored is None else (out, *stored)

    def _beside(self, z: Tensor, experts: ExpertsBeside, routed: LayerRoutes | None = None) -> Tensor:
        # Adds the output of MLP, experts and norms to z [T, h]. The sum has three dimensions, so that it is no view.
        assert isinstance(self.mlp, MLP)
        of_mlp, of_experts, before = (getattr(self, name) for name in BESIDE)
        norm, post = self.mlp_norms

        def normed(after: Any, x: Tensor) -> Tensor:
            return _recomputed(after, x) if self.options.recompute else after(x)

        z, down = self.mlp.parts(z, norm)
        both = normed(of_mlp, down) + normed(of_experts, experts(z, before, self.router, routed))
        return z[None] + normed(post, both)[None]

    def _with_inputs(self, out: Tensor, inputs: Tensor) -> Tensor:
        # Adds what the tokens' own inputs [Q, n] say, gated by the state [1, Q, h].
        more = self.per_layer_projection(self.act_fn(self.per_layer_input_gate(out.squeeze(0))) * inputs)
        norm: Any = self.post_per_layer_input_norm
        return out + (_recomputed(norm, more) if self.options.recompute else norm(more))[None]

    def _residual(self, x: Tensor, rows: Rows | None) -> tuple[Tensor, Tensor]:
        # Returns x [T, h], and the rows of the queries [Q, h] for the residual sum.
        index = None if rows is None else rows.index
        if self.options.recompute:
            return select_rows(x, index)
        return (x, x) if index is None else (x, x[index])


class Decoder(nn.Module):
    def __init__(self, source: Any, blocks: Sequence[BlockOptions], attend: Attend) -> None:
        super().__init__()
        self.options = tuple(blocks)
        # A tiled block always recomputes its norms. The final norm is then recomputed too.
        self.recompute = all(block.recompute or block.tile_tokens is not None for block in blocks)
        self.prunes, self.attend = blocks[-1].prune, attend
        self.embed_tokens = source.embed_tokens
        self.layers = nn.ModuleList(DecoderBlock(block, own) for block, own in zip(source.layers, blocks, strict=True))
        self.norm, self.rotary_emb = source.norm, source.rotary_emb
        if hasattr(source, LAYER_INPUTS[0]):
            for name in LAYER_INPUTS:
                setattr(self, name, getattr(source, name))
        # The tables of all types of layers, such as local and global ones, are side by side in one.
        self.kinds: Sequence[str] = getattr(source.rotary_emb, "layer_types", ())
        widths = [2 * getattr(source.rotary_emb, f"{kind}_inv_freq").shape[0] for kind in self.kinds]
        for place, own in enumerate(self.layers):
            for mixture in mixtures([own]):
                mixture.place = place
        for block, own in zip(source.layers, self.layers, strict=True) if self.kinds else ():
            place, attention = self.kinds.index(block.self_attn.layer_type), cast(Attention, own.self_attn)
            attention.columns = slice(sum(widths[:place]), sum(widths[: place + 1]))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: PrefixLayout,
        needed: PrefixLayout | None = None,
        prefix_kv: Prefix | None = None,
        attend: Attend | None = None,
        routes: Routes | None = None,
    ) -> Tensor:
        """Return the states [Q, h] after the last block, before the final norm.

        Args:
            input_ids: int64 [1, T], packed sequences. With sequence parallelism they have only this rank's tokens.
            position_ids: int64 [1, T], of all tokens.
            layout: Which of the T tokens share a prefix.
            needed: The same layout with only Q tokens as queries, for a pruned last block. None = all tokens are queries.
            prefix_kv: As in :meth:`DecoderBlock.forward`.
            attend: A kernel that replaces the decoder's own, for comparisons.
            routes: The experts of the T tokens. None = the routers choose.
        """
        # All blocks use the same tables of cos and sin.
        hidden = self.embed_tokens(input_ids)
        cos, sin = self._tables(hidden, position_ids)
        kernel = self.attend if attend is None else attend
        inputs, stored = self._layer_inputs(input_ids, hidden), dict[Any, Handed]()
        for place, (block, options) in enumerate(zip(self.layers, self.options, strict=True)):
            # Only the last block can be pruned, because attention in the next block reads all tokens.
            pruned = options.prune and needed is not None
            over_tiles = attend is None and block.tile_tokens is not None
            mixture: Any = block.mixture
            routed = routes.of_layer(mixture.place) if routes is not None and mixture is not None else None
            more: dict[str, Any] = {} if inputs is None else {"inputs": inputs[place]}
            if block.reads:
                # A view for each block, so that its own part of the gradient says when its backward is over.
                more["handed"] = tuple(tensor.view_as(tensor) for tensor in stored[block.kind])
            own = needed if pruned else layout
            found = block(hidden, cos, sin, own, None if over_tiles else kernel, prefix_kv, routed, **more)
            hidden, *handed = found if block.stores else (found,)
            if handed:
                stored[block.kind] = (handed[0], handed[1], handed[2], handed[3])
        return hidden.squeeze(0)

    def _layer_inputs(self, input_ids: Tensor, hidden: Tensor) -> Sequence[Tensor] | None:
        # The tokens' own inputs of each layer, [1, T, n] each: a part from the token, and a part from its embedding.
        if not hasattr(self, LAYER_INPUTS[0]):
            return None
        shape = (*input_ids.shape, len(self.layers), -1)
        embed, project, norm = (getattr(self, name) for name in LAYER_INPUTS)
        of_state = norm((project(hidden) * hidden.shape[-1] ** -0.5).view(shape))
        return ((of_state + embed(input_ids).view(shape)) * 2.0**-0.5).unbind(2)

    def _tables(self, hidden: Tensor, position_ids: Tensor) -> Tables:
        if not self.kinds:
            cos, sin = self.rotary_emb(hidden, position_ids=position_ids)
            # In gpt-oss the tables have one half of a head, because the halves are equal.
            is_half = cos.shape[-1] == self.rotary_emb.inv_freq.shape[-1]
            return (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)) if is_half else (cos, sin)
        pairs = [self.rotary_emb(hidden, position_ids, kind) for kind in self.kinds]
        cos, sin = (torch.cat(tables, dim=-1) for tables in zip(*pairs, strict=True))
        return cos, sin

    def normed_rows(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Apply the final norm to the states [Q, h] at ``rows``, int64 [R], and return [R, h].

        If the norm is recomputed in backward, only these rows are normed.
        """
        if not self.recompute:
            return self.norm(hidden).index_select(0, rows)
        # Select the rows first, so that the norm keeps only these rows for backward.
        return _recomputed(self.norm, hidden.index_select(0, rows))

    def get_decoder(self) -> Decoder:
        return self


def mixtures(blocks: Iterable[nn.Module]) -> list[Experts | ExpertsBeside]:
    found = (block.mixture for block in blocks if isinstance(block, DecoderBlock))
    return [mixture for mixture in found if mixture is not None]


def query_rows(layout: PrefixLayout, prefix_kv: Prefix | None) -> Rows | None:
    # With a prefix KV, the skipped tokens of the layout are the prompt, which is not in the pack.
    return layout.own_queries if prefix_kv is None or not prefix_kv.extends else None


def apply_rotary(x: Tensor, tables: Tables) -> Tensor:
    """Rotate x [T, heads, D] by cos and sin [1, T, R], in plain autograd (arXiv 2104.09864). Entries behind the first R stay."""
    cos, sin = (table[0][:, None] for table in tables)
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    # An element is paired with the one half a head away, not with its neighbour, as in transformers' Llama.
    first, second = x.chunk(2, dim=-1)
    rotated = x * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def _recomputed(module: Any, x: Tensor) -> Tensor:
    norm, weight = norm_and_weight(module)
    return recomputed_norm(x, weight, norm.eps)


def _maybe(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        ctx.mark_dirty(x)
        return x.mul_(factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


# Select rows of a tensor that is also used whole. Backward then allocates one gradient of the whole tensor instead of two.


def select_rows(x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x [T, n] and its rows [R, n] at ``rows``, int64 [R] without repeats. ``rows=None`` returns x twice.

    Backward adds the gradient of the rows in place to the gradient of the first result. So only one function may use the first
    result, and the gradient that it returns must not be used elsewhere.
    """
    return (x, x) if rows is None else _SelectRows.apply(x, rows)


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        return x.view_as(x), x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_whole: Tensor, grad_rows: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        # In place, because a second gradient of the whole would be as large as the block's input.
        return grad_whole.index_add_(0, rows, grad_rows), None
