"""Recomputed norms, rotations and activations: a block keeps their inputs, and backward computes their outputs again.

Bytes saved: let A be the bytes that a block of Qwen3 keeps without the knob, and A' those that it keeps with it. A' is less
than half of A in bfloat16. Without activation checkpointing the peak falls by (L - 1) x (A - A'). The last block sets the peak.
Its backward walks over tiles of tokens, so it holds less too, with checkpointing as well. ``knobs/shapes.py`` has A, A' and
what the last block holds at each moment. On a GPU where functions are not compiled, elementwise tiles add 112 MiB; elsewhere
1.5 MiB.

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
from torch.nn.functional import linear

from verl_memopt.memory.parameters.lora import LoraLinear
from verl_memopt.ops.recomputation import Recomputable, Rows, recomputed_products

KEY = "actor_rollout_ref.model.recompute_elementwise"

FAMILY = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Models that our own decoder computes, as transformers begins the names of their classes."""

KNOWN = tuple(f"{name}DecoderLayer" for name in FAMILY)
"""Blocks of two RMS norms, rotary attention with or without norms of queries and keys, and down(silu(gate(x)) * up(x))."""

logger = logging.getLogger(__name__)


def can_recompute(blocks: Iterable[nn.Module], trained: bool, key: str = KEY) -> bool:
    """Return whether all blocks of a Hugging Face model can recompute their cheap values; warn where one cannot.

    Args:
        blocks: The blocks, as transformers made them.
        trained: false for a model that only ever runs without gradients; its layers may then be of any kind (quantised).
        key: The setting to name in the warning.
    """
    unknown = next((reason for block in blocks if (reason := _unlike(block, trained))), None)
    if unknown is not None:
        logger.warning("%s=true: %s; the blocks of this model keep these values", key, unknown)
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
        recomputable: Computes the value [T, n] from the sources [T, n] and the parameters [n].
        sources: What is kept in place of the value.
        parameters: Parameters of the recomputable.
        layers: The linear layers, with adapters or without. Without gradients they may be of any kind.
        rows: The rows of ``row_layers``, which then return [R, m]; None for all.
        row_layers: Some of the layers.
    """
    of_rows = [any(layer is one for one in row_layers) for layer in layers]
    if not torch.is_grad_enabled():
        # Without gradients nothing reads the sources again, so the value may be written over the first of them.
        value = recomputable.compute(sources, parameters, sources[0] if recomputable.overwrites else None)
        part = value if rows is None else value[rows.index]
        return [layer(part if on_rows else value) for layer, on_rows in zip(layers, of_rows, strict=True)]
    adapted = [layer for layer in layers if isinstance(layer, LoraLinear) and layer.active]
    weights = [layer.weight for layer in layers] + [layer.lora_A for layer in adapted]
    marked = of_rows + [any(layer is one for one in row_layers) for layer in adapted]
    outs = list(recomputed_products(recomputable, sources, parameters, weights, rows, marked))
    thin = dict(zip(map(id, adapted), outs[len(layers) :], strict=True))
    return [_finished(layer, out, thin.get(id(layer))) for layer, out in zip(layers, outs, strict=False)]


def _finished(layer: Any, out: Tensor, thin: Tensor | None) -> Tensor:
    out = out if layer.bias is None else out + layer.bias
    return out if thin is None else out + layer.scale * linear(thin, layer.lora_B)
