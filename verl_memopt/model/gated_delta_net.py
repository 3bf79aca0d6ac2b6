"""The layers of Qwen3.5 that carry a state from token to token (Gated DeltaNet, arXiv 2412.06464), over packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from verl_memopt.memory.recompute_elementwise_torch import norm_and_weight, recomputed_outputs
from verl_memopt.memory.recompute_gates import GatedNorm
from verl_memopt.model.delta_rule import DeltaShape, gated_delta_rule
from verl_memopt.model.experts import Mixture
from verl_memopt.model.prefix_kv import Prefix
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.state_chunks import TAIL, state_chunks, state_tiles
from verl_memopt.model.tiled_linear_block import LinearBlockShape, tiled_linear_block


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
        chunks = state_chunks(layout, None if prefix_kv is None else prefix_kv.given, self.shape.sizes(x.device))
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
            # One product may have computed both. Then z is a part of the tensor that the rule's backward reads.
            apart = z.untyped_storage()._cdata != qkv.untyped_storage()._cdata
            norm_of_heads = GatedNorm(self.norm.variance_epsilon, overwrites=apart)
            return recomputed_outputs(norm_of_heads, (out, z), (self.norm.weight,), (self.out_proj,))[0], x
        heads = self.norm(*(values.reshape(-1, self.shape.value_dim) for values in (out, z)))
        return self.out_proj(heads.view(out.shape)), x

    def tiled(
        self,
        x: Tensor,
        layout: PrefixLayout,
        tile_tokens: int,
        mlp_tiles: int,
        norms: Sequence[nn.Module],
        mlp: Sequence[Any] | Mixture,
    ) -> Tensor:
        """Return the output [1, T, h] of a whole block, over tiles of ``tile_tokens`` tokens.

        ``x`` [T, h] is the input of the block, ``norms`` are those of this layer and of the MLP, ``mlp`` are gate, up and down,
        or experts.
        """
        found = [norm_and_weight(norm) for norm in norms]
        shape = LinearBlockShape(
            self.shape,
            mlp_tiles,
            (found[0][0], found[1][0], GatedNorm(self.norm.variance_epsilon)),
            state_tiles(layout, tile_tokens, self.shape.sizes(x.device)),
        )
        weights = (found[0][1], found[1][1], self.norm.weight), (self.conv1d.weight, self.A_log, self.dt_bias)
        own = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a, self.out_proj
        if isinstance(mlp, Mixture):
            return tiled_linear_block(x, shape, *weights, own, mlp)
        return tiled_linear_block(x, shape, *weights, (*own, *mlp))

    def _projected(self, x: Tensor, norm: nn.Module) -> Sequence[Tensor]:
        layers = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        if self.recompute:
            own, weight = norm_and_weight(norm)
            return recomputed_outputs(own, (x,), (weight,), layers, passed=True)
        normal = norm(x)
        return *(layer(normal) for layer in layers), x
