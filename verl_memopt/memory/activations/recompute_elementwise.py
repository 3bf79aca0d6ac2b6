"""Recomputed norms, rotations and activations: a block keeps what they read, and not what they give.

Bytes saved: with T tokens computed in the largest micro-batch, L blocks of width h, H heads and K key heads of size D, MLP width
I, b bytes of the compute dtype and X = T x h x b, a block of Qwen3 keeps A' = T x b x (2 x h + 2 x H x D + 2 x K x D + 2 x I) in
place of A = T x ((4 + 2 x b) x (2 x h + H x D + K x D) + b x (H x D + K x D + 4 x I)), less than half of it in bfloat16: (L - 1)
x (A - A') without activation checkpointing. In the last block, whose backward sets the peak, A + 2 x T x I x b + 2 x X falls to
the largest of four: A' + 3 x R x h x b at the final norm's, which is of the R positions that predict; at the MLP's, over n tiles
of t <= 2,048 tokens (8,192 on a GPU), A' + X + (t + h) x I x b where gradients take the place of gate and up, and A' + 2 x X + (t
+ 2 x I) x h x b at its norm; at attention's, key head by key head, with G = H / K, T x b x (2 x h + 3 x H x D + 2 x K x D + (2 x
G + 5) x D) and (3 x G + 1) x D x b for each token of the larger part of prompts and answers. A block that activation
checkpointing computes again keeps none of its gate and up: at the MLP's it holds A' - 2 x T x I x b + 2 x X + (t x (h + 3 x I) +
3 x h x I) x b. Elementwise tiles add 1.5 MiB (112 on a GPU where they are not compiled).

Exact but for the order of sums: a norm's gradient is computed in fp32 throughout, rotations round once, and a weight's gradient
    is summed over tiles of 2,048 tokens (8,192 on a GPU) in fp32, which in half precision rounds it once more. Source: arXiv
    2205.05198.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from verl_memopt.memory.parameters.lora import LoraLinear
from verl_memopt.ops.recomputation import Recomputable, Rows, recomputed_products

KEY = "actor_rollout_ref.model.recompute_elementwise"

KNOWN = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Blocks of two RMS norms, rotary attention with or without norms of queries and keys, and down(silu(gate(x)) * up(x))."""

logger = logging.getLogger(__name__)


def can_recompute(blocks: Iterable[nn.Module], trained: bool) -> bool:
    """Return whether all blocks of a Hugging Face model can recompute their cheap values; warn where one cannot.

    Args:
        blocks: as transformers made them.
        trained: false for a model that only ever runs without gradients; its layers may then be of any kind (quantised).
    """
    unknown = next((reason for block in blocks if (reason := _unlike(block, trained))), None)
    if unknown is not None:
        logger.warning("%s=true: %s; the blocks of this model keep these values", KEY, unknown)
    return unknown is None


def _unlike(block: Any, trained: bool) -> str | None:
    """Return what keeps a block from being recomputed, if anything."""
    name = type(block).__name__
    if name not in KNOWN:
        return f"{name} is not one of {', '.join(KNOWN)}"
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
    """Return the output [T, m] of each linear layer over one value, which backward computes again.

    Args:
        recomputable: computes the value [T, n] from the sources [T, n] and the parameters [n].
        sources: kept in place of the value.
        parameters: of the recomputable.
        layers: linear, with adapters or without; of any kind where no gradients are computed.
        rows: the rows of ``row_layers``, which then return [R, m]; None for all.
        row_layers: some of the layers.
    """
    of_rows = [any(layer is one for one in row_layers) for layer in layers]
    if not torch.is_grad_enabled():
        value = recomputable.compute(sources, parameters, sources[0] if recomputable.overwrites else None)
        part = value if rows is None else value[rows.index]
        return [layer(part if some else value) for layer, some in zip(layers, of_rows, strict=True)]
    adapted = [layer for layer in layers if isinstance(layer, LoraLinear) and layer.active]
    weights = [layer.weight for layer in layers] + [layer.lora_A for layer in adapted]
    marked = of_rows + [any(layer is one for one in row_layers) for layer in adapted]
    outs = list(recomputed_products(recomputable, sources, parameters, weights, rows, marked))
    thin = dict(zip(map(id, adapted), outs[len(layers) :], strict=True))
    return [_finished(layer, out, thin.get(id(layer))) for layer, out in zip(layers, outs, strict=False)]


def _finished(layer: Any, out: Tensor, thin: Tensor | None) -> Tensor:
    out = out if layer.bias is None else out + layer.bias
    return out if thin is None else out + layer.scale * linear(thin, layer.lora_B)
