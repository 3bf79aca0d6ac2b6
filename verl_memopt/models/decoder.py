"""The decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3) over packed sequences, with every knob where it acts.

The modules take over the submodules of a Hugging Face model under their own names, so that checkpoints, adapters, export and
weight sync know the parameters as before. A model of another architecture keeps its own modules
(:mod:`verl_memopt.models.transformers_decoder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from verl_memopt.memory.activations.activation_checkpointing import checkpointed
from verl_memopt.memory.activations.prune_last_block import window_of
from verl_memopt.memory.activations.recompute_elementwise import KNOWN, recomputed_outputs
from verl_memopt.memory.activations.recomputed_mlp import recomputed_mlp
from verl_memopt.memory.activations.tiled_mlp import tiled_mlp
from verl_memopt.models.attention import Attend, Over
from verl_memopt.models.trees import Trees
from verl_memopt.ops.carried_prompt import CarriedPrompt, Recorder, Tables
from verl_memopt.ops.discarded_values import Gated, Normed, Rows, normed, product_tiles
from verl_memopt.ops.read_rows import read_rows
from verl_memopt.ops.rotation import Rotary

PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")
"""The submodules of a decoder of the family, in the order of its parameters."""


@dataclass(frozen=True)
class BlockOptions:
    """What one block does to hold less memory. Without any it keeps for backward what plain autograd keeps."""

    recompute: bool = False
    """Norms, rotations and activations are computed again in backward (``recompute_elementwise``)."""

    mlp_tiles: int | None = None
    """The MLP keeps its input alone and runs over at least so many tiles of tokens (``tiled_mlp``); None keeps gate and up."""

    prune: bool = False
    """The block computes queries, attention and MLP of the tokens alone that something is predicted from."""

    checkpoint: Literal["full", "selective"] | None = None
    """What activation checkpointing keeps: the block's input, or also the outputs of products and attention."""


class Attention(nn.Module):
    """Queries, keys and values of a normed input, rotary positions, attention over packed sequences, output projection."""

    def __init__(self, source: Any, options: BlockOptions) -> None:
        super().__init__()
        self.source_class, self.options = type(source).__name__, options
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = source.q_proj, source.k_proj, source.v_proj, source.o_proj
        self.q_norm, self.k_norm = getattr(source, "q_norm", None), getattr(source, "k_norm", None)
        self.head_dim, self.scale, self.window = source.head_dim, source.scaling, window_of(source)
        self.layer = source.layer_idx

    def forward(
        self, x: Tensor, norm: nn.Module, tables: Tables, trees: Trees, attend: Attend, prefix_kv: CarriedPrompt | Recorder | None
    ) -> Tensor:
        """Return attention's output [Q, h], for the Q queries of the packed sequences.

        Args:
            x: [T, h], before ``norm``.
            norm: of the block's input.
            tables: cos and sin of the T positions, [1, T, D] each.
            trees: which of the T tokens see which.
            attend: the kernel.
            prefix_kv: keys and values of a prefix computed elsewhere, or what records those of this one.
        """
        rows = query_rows(trees, prefix_kv)
        if not self.options.recompute and rows is None:
            assert prefix_kv is None, "prefix KV needs recomputed norms and rotations"
            return self._plain(norm(x), tables, trees, attend)
        # Queries and keys stay as their products give them: attention norms and rotates them itself, and again in backward.
        query, key, value = self._query_key_value(x, norm, trees, rows)
        if prefix_kv is not None:
            key, value, tables = prefix_kv.extend(self.layer, key, value, tables)
        query, key, value = (self._heads(states) for states in (query, key, value))
        return self._attended(query, key, value, trees, attend, self._rotary(tables))

    def _query_key_value(self, x: Tensor, norm: Any, trees: Trees, rows: Tensor | None) -> Sequence[Tensor]:
        """Return queries [Q, H x D], and keys and values [T, K x D]."""
        layers = (self.q_proj, self.k_proj, self.v_proj)
        if self.options.recompute:
            at_rows = None if rows is None else Rows(rows, trees.read_places)
            rms_norm = Normed(norm.variance_epsilon)
            return recomputed_outputs(rms_norm, (x,), (norm.weight,), layers, at_rows, row_layers=(self.q_proj,))
        normal = norm(x)
        return self.q_proj(normal[rows]), self.k_proj(normal), self.v_proj(normal)

    def _plain(self, normal: Tensor, tables: Tables, trees: Trees, attend: Attend) -> Tensor:
        query = _maybe(self.q_norm, self._heads(self.q_proj(normal)))
        key = _maybe(self.k_norm, self._heads(self.k_proj(normal)))
        value = self._heads(self.v_proj(normal))
        query, key = apply_rotary(query, tables), apply_rotary(key, tables)
        return self._attended(query, key, value, trees, attend, None)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, trees: Trees, attend: Attend, rotary: Rotary | None) -> Tensor:
        q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))  # [1, heads, T, D]
        out = attend(q, k, v, Over(trees, self.scale, self.window, rotary))
        return self.o_proj(out.reshape(query.shape[0], -1))

    def _heads(self, states: Tensor) -> Tensor:
        return states.view(states.shape[0], -1, self.head_dim)

    def _rotary(self, tables: Tables) -> Rotary:
        cos, sin = (table[0] for table in tables)
        if self.q_norm is None or self.k_norm is None:
            return Rotary(cos, sin, (None, None), 0.0)
        return Rotary(cos, sin, (self.q_norm.weight, self.k_norm.weight), self.q_norm.variance_epsilon)


class MLP(nn.Module):
    """down(act(gate(y)) * up(y)) of a normed input y."""

    def __init__(self, source: Any, options: BlockOptions) -> None:
        super().__init__()
        self.source_class, self.options = type(source).__name__, options
        self.gate_proj, self.up_proj, self.down_proj = source.gate_proj, source.up_proj, source.down_proj
        self.act_fn = source.act_fn

    def forward(self, x: Tensor, norm: Any, least_tiles: int = 1) -> Tensor:
        """Return the MLP's output [T, h].

        Args:
            x: [T, h], before ``norm``.
            norm: of the MLP's input.
            least_tiles: a recomputed MLP that runs over tiles has at least so many.
        """
        tiles = self.options.mlp_tiles
        if not self.options.recompute:
            return self.gated(norm(x)) if tiles is None else tiled_mlp(self, norm(x), tiles)
        rms_norm = Normed(norm.variance_epsilon)
        if tiles is not None or not torch.is_grad_enabled():
            layers = (self.gate_proj, self.up_proj, self.down_proj)
            return recomputed_mlp(x, rms_norm, norm.weight, layers, 1 if tiles is None else max(tiles, least_tiles))
        gate, up = recomputed_outputs(rms_norm, (x,), (norm.weight,), (self.gate_proj, self.up_proj))
        (down,) = recomputed_outputs(Gated(), (gate, up), (), (self.down_proj,))
        return down

    def gated(self, normal: Tensor) -> Tensor:
        """Return the output [T, h] of a normed input [T, h] in plain autograd."""
        return self.down_proj(self.act_fn(self.gate_proj(normal)) * self.up_proj(normal))


class DecoderBlock(nn.Module):
    """Norm, attention, norm, MLP, each pair added to what came in."""

    def __init__(self, source: Any, options: BlockOptions) -> None:
        super().__init__()
        self.source_class, self.options = type(source).__name__, options
        self.self_attn = Attention(source.self_attn, options)
        self.mlp = MLP(source.mlp, options)
        self.input_layernorm = source.input_layernorm
        self.post_attention_layernorm = source.post_attention_layernorm

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        trees: Trees,
        attend: Attend,
        prefix_kv: CarriedPrompt | Recorder | None = None,
    ) -> Tensor:
        """Return the block's output [1, Q, h], for the Q queries of the packed sequences: all T tokens, unless it is pruned.

        Args:
            hidden: [1, T, h].
            cos: [1, T, D], as ``sin``.
            sin: of the T positions.
            trees: which of the T tokens see which.
            attend: the attention kernel.
            prefix_kv: keys and values of a prefix computed elsewhere, or what records those of this one.
        """
        # FSDP's hooks lie outside of this call, so a block is gathered once for its second forward and its backward.
        if self.options.checkpoint is not None:
            return checkpointed(self.compute, hidden, cos, sin, trees, attend, prefix_kv, mode=self.options.checkpoint)
        return self.compute(hidden, cos, sin, trees, attend, prefix_kv)

    def compute(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        trees: Trees,
        attend: Attend,
        prefix_kv: CarriedPrompt | Recorder | None,
    ) -> Tensor:
        """Return what ``forward`` returns, keeping for backward what the options say."""
        x, residual = self._residual(hidden[0], query_rows(trees, prefix_kv))
        # Sums are of three dimensions, so that what FSDP2 gets is no view.
        hidden = residual[None] + self.self_attn(x, self.input_layernorm, (cos, sin), trees, attend, prefix_kv)[None]
        # A pruned block's MLP does not run over larger tiles than all tokens would have.
        return hidden + self.mlp(hidden[0], self.post_attention_layernorm, len(product_tiles(x)))[None]

    def _residual(self, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x [T, h] and, for the sum, its rows that are queries [Q, h]."""
        if self.options.recompute:
            return read_rows(x, rows)
        return (x, x) if rows is None else (x, x[rows])


class Decoder(nn.Module):
    """Embedding, rotary tables, blocks and the final norm, in place of a Hugging Face decoder of the family."""

    def __init__(self, source: Any, blocks: Sequence[BlockOptions], attend: Attend) -> None:
        """Take over the submodules of ``source``; ``blocks``: one for each block; ``attend``: the attention kernel."""
        super().__init__()
        self.options = tuple(blocks)
        self.recompute, self.prunes, self.attend = all(block.recompute for block in blocks), blocks[-1].prune, attend
        self.embed_tokens = source.embed_tokens
        self.layers = nn.ModuleList(DecoderBlock(block, own) for block, own in zip(source.layers, blocks, strict=True))
        self.norm, self.rotary_emb = source.norm, source.rotary_emb

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        trees: Trees,
        needed: Trees | None = None,
        prefix_kv: CarriedPrompt | Recorder | None = None,
        attend: Attend | None = None,
    ) -> Tensor:
        """Return the states [Q, h] after the last block, before the final norm.

        Args:
            input_ids: int64 [1, T], packed sequences.
            position_ids: int64 [1, T].
            trees: which of the T tokens see which.
            needed: the same with queries of the Q tokens alone whose last state is needed, for a pruned last block.
            prefix_kv: keys and values of a prefix computed elsewhere, or what records those of this one.
            attend: another kernel than the decoder's own, for comparisons.
        """
        hidden = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(hidden, position_ids=position_ids)
        kernel = self.attend if attend is None else attend
        for block, options in zip(self.layers, self.options, strict=True):
            pruned = options.prune and needed is not None
            hidden = block(hidden, cos, sin, needed if pruned else trees, kernel, prefix_kv)
        return hidden[0]

    def normed_rows(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the final norm [R, h] of states [Q, h] at ``rows``, int64 [R]; recomputed, it runs over these rows alone."""
        if not self.recompute:
            return self.norm(hidden).index_select(0, rows)
        return normed(hidden.index_select(0, rows), self.norm.weight, self.norm.variance_epsilon)

    def get_decoder(self) -> Decoder:
        """Return itself, as transformers' models ask of their parts."""
        return self


def query_rows(trees: Trees, prefix_kv: CarriedPrompt | Recorder | None) -> Tensor | None:
    """Return the places of the queries among a block's tokens, int64 [Q]; None where every token is one."""
    # What lies before the queries is not among the tokens where a prefix brings it.
    return None if isinstance(prefix_kv, CarriedPrompt) else trees.read


def apply_rotary(x: Tensor, tables: Tables) -> Tensor:
    """Return x [T, heads, D] rotated by cos and sin [1, T, D], in plain autograd. Source: arXiv 2104.09864."""
    cos, sin = (table[0][:, None] for table in tables)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _maybe(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def of_llama_family(lm: Any) -> bool:
    """Return whether :class:`Decoder` computes what a causal LM's own decoder does: one of transformers' own four classes."""
    decoder = lm.get_decoder()
    known = all(type(block).__name__ in KNOWN for block in decoder.layers)
    own_code = not type(lm).__module__.startswith("transformers.")
    return known and not own_code and {name for name, _ in decoder.named_children()} == set(PARTS)


def class_name(module: nn.Module) -> str:
    """Return the class that a Hugging Face model has for a module, also where one of this file took its place."""
    return getattr(module, "source_class", type(module).__name__)
