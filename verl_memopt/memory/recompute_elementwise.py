"""Recomputed norms, rotations and activations: a block keeps what they read, and not what they give.

Saves: with T tokens computed in the largest micro-batch, L blocks of width h, H heads and K key heads of size D, MLP width I, b
    bytes of the compute dtype and X = T x h x b, a block of Qwen3 keeps A' = T x b x (2 x h + 2 x H x D + 2 x K x D + 2 x I) in
    place of A = T x ((4 + 2 x b) x (2 x h + H x D + K x D) + b x (H x D + K x D + 4 x I)), less than half of it in bfloat16:
    (L - 1) x (A - A') without activation checkpointing. In the last block, whose backward sets the peak, A + 2 x T x I x b + 2 x
    X falls to the largest of four: A' + 3 x R x h x b at the final norm's, which is of the R positions that predict; at the
    MLP's, over n tiles of t <= 2,048 tokens (8,192 on a GPU), A' + X + (t + h) x I x b where gradients take the place of gate and
    up, and A' + 2 x X + (t + 2 x I) x h x b at its norm; at attention's, key head by key head, with G = H / K,
    T x b x (2 x h + 3 x H x D + 2 x K x D + (2 x G + 5) x D) and (3 x G + 1) x D x b for each token of the larger part of prompts
    and answers. A block that activation checkpointing computes again keeps none of its gate and up: at the MLP's it holds
    A' - 2 x T x I x b + 2 x X + (t x (h + 3 x I) + 3 x h x I) x b. Elementwise tiles add 1.5 MiB (112 on
    a GPU where they are not compiled).
Costs: norms, rotations and the MLP's activation once more in backward: elementwise statements, and no product. On a GPU
    ``actor.use_torch_compile`` makes each chain of them one to three kernels.
Pairs with: every knob. Activation checkpointing computes the MLP again over tiles, at no product more; a tiled MLP makes these
    tiles smaller, and keeps its input alone without checkpointing as well. LoRA's products with A read the same recomputed value
    as the layer's own.
Exact but for the order of sums: a norm's gradient is computed in fp32 throughout, rotations round once, and a weight's gradient
    is summed over tiles of 2,048 tokens (8,192 on a GPU) in fp32, which in half precision rounds it once more. Source: arXiv
    2205.05198.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_memopt.memory.carried_prompt import CarriedPrompt
from verl_memopt.memory.discarded_values import Gated, Maker, Normed, Rows, normed, product_tiles, products
from verl_memopt.memory.knob import Claim, Knob
from verl_memopt.memory.lora import LoraLinear
from verl_memopt.memory.read_rows import read_rows
from verl_memopt.memory.recomputed_mlp import recomputed_mlp
from verl_memopt.memory.rotation import Rotary

KEY = "actor_rollout_ref.model.recompute_elementwise"

KNOWN = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Blocks of two RMS norms, rotary attention with or without norms of queries and keys, and down(silu(gate(x)) * up(x))."""

logger = logging.getLogger(__name__)


def recompute_elementwise(
    decoder: Any, trained: bool, mlp_tiles: Callable[[nn.Module], int | None] = lambda block: None
) -> Callable[[Tensor], Tensor] | None:
    """Makes a decoder's blocks make their cheap values again in backward, without changing a class, a name or state.

    decoder: has ``layers`` and a final ``norm``. trained: false for a model that only ever runs without gradients; its layers may
    then be of any kind (quantised). mlp_tiles: over how many tiles, at least, a block's MLP is to be computed, keeping nothing;
    None to keep its gate and up.
    Gives the final norm, [R, h] -> [R, h], which the decoder itself then leaves out, as few rows are read; or None for a decoder
    with blocks of a class that is not in KNOWN: it is left as it is, with a warning.
    """
    unknown = next((reason for block in decoder.layers if (reason := _unlike(block, trained))), None)
    if unknown is not None:
        logger.warning("%s=true: %s; the blocks of this model keep these values", KEY, unknown)
        return None
    for block in decoder.layers:
        block.forward = functools.partial(_block, block, mlp_tiles(block))
    decoder.norm.forward = _passed_on
    return functools.partial(_normed, decoder.norm)


def _passed_on(hidden_states: Tensor) -> Tensor:
    return hidden_states


def _normed(norm: Any, x: Tensor) -> Tensor:
    return normed(x, norm.weight, norm.variance_epsilon)


def _unlike(block: Any, trained: bool) -> str | None:
    """Says what keeps a block from being computed here, if anything."""
    name = type(block).__name__
    if name not in KNOWN:
        return f"{name} is not one of {', '.join(KNOWN)}"
    if block.self_attn.config.hidden_act not in ("silu", "swish"):
        return f"{name} has the activation {block.self_attn.config.hidden_act}, not silu"
    layers = [module for module in block.modules() if hasattr(module, "in_features")]
    other = next((layer for layer in layers if trained and type(layer) not in (nn.Linear, LoraLinear)), None)
    return None if other is None else f"{name} has a layer of class {type(other).__name__}"


def _block(
    block: Any, tiles: int | None, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **others: Any
) -> Tensor:
    """Gives what the block's own forward gives: hidden_states [1, T, h] -> [1, T, h], or the tokens that are read."""
    x, read = read_rows(hidden_states[0], _rows_of(others))
    # Sums are of three dimensions, so that what FSDP2 gets is no view.
    hidden = read[None] + _attention(block, x, position_embeddings, others)[None]
    # Not in larger tiles than all tokens would have.
    least = None if tiles is None else max(tiles, len(product_tiles(x)))
    return hidden + _mlp(block, least, hidden[0])[None]


def _mlp(block: Any, tiles: int | None, x: Tensor) -> Tensor:
    norm, mlp = block.post_attention_layernorm, block.mlp
    made = Normed(norm.variance_epsilon)
    if tiles is not None or not torch.is_grad_enabled():
        return recomputed_mlp(x, made, norm.weight, [getattr(mlp, name) for name in (*GATE_UP, *DOWN)], tiles or 1)
    gate, up = _layers(made, (x,), (norm.weight,), mlp, GATE_UP)
    (down,) = _layers(Gated(), (gate, up), (), mlp, DOWN)
    return down


QUERY_KEY_VALUE, GATE_UP, DOWN = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",)


def _attention(block: Any, x: Tensor, tables: tuple[Tensor, Tensor], others: dict[str, Any]) -> Tensor:
    norm, read = block.input_layernorm, _rows_of(others)
    rows = None if read is None else Rows(read, others["pack_trees"].read_places)
    query, key, value = _layers(
        Normed(norm.variance_epsilon), (x,), (norm.weight,), block.self_attn, QUERY_KEY_VALUE, rows, ("q_proj",)
    )
    return attended(block.self_attn, query, key, value, tables, others)


def _rows_of(others: dict[str, Any]) -> Tensor | None:
    """Gives the places of queries among the block's tokens; None for all, as where what they see besides is carried."""
    return None if isinstance(others.get("carried"), CarriedPrompt) else others["pack_trees"].read


def attended(
    attention: Any, query: Tensor, key: Tensor, value: Tensor, tables: tuple[Tensor, Tensor], others: dict[str, Any]
) -> Tensor:
    """Gives the output [T', h] of a known block's attention from what its layers made: query [T', n], key and value [T, m].

    With a prompt carried from elsewhere its keys and values come first; a prompt that is to be carried is recorded.
    """
    if others.get("carried") is not None:
        key, value, tables = others["carried"].extend(attention.layer_idx, key, value, tables)
    attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    heads = (given.view(given.shape[0], -1, attention.head_dim).transpose(0, 1)[None] for given in (query, key, value))
    out, _ = attend(
        attention,
        *heads,
        scaling=attention.scaling,
        sliding_window=window_of(attention),
        rotary=_rotary(attention, tables),
        **others,
    )
    return attention.o_proj(out.reshape(query.shape[0], -1))


def _rotary(attention: Any, tables: tuple[Tensor, Tensor]) -> Rotary:
    cos, sin = (table[0] for table in tables)
    if not hasattr(attention, "q_norm"):
        return Rotary(cos, sin, (None, None), 0.0)
    return Rotary(cos, sin, (attention.q_norm.weight, attention.k_norm.weight), attention.q_norm.variance_epsilon)


def window_of(attention: Any) -> int | None:
    """Gives how many positions back a token of a known block sees; None for all."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(attention.config, "sliding_window", None) if type(attention).__name__.startswith("Mistral") else None


def _layers(
    maker: Maker,
    sources: tuple[Tensor, ...],
    parameters: tuple[Tensor, ...],
    parent: Any,
    names: Sequence[str],
    rows: Rows | None = None,
    of_rows: Sequence[str] = (),
) -> list[Tensor]:
    """Gives the outputs [T, m] of the named linear layers over the value that is made from the sources.

    rows: those over which the layers in ``of_rows`` run; None for all.
    """
    layers = [getattr(parent, name) for name in names]
    if not torch.is_grad_enabled():
        value = maker.make(sources, parameters, sources[0] if maker.overwrites else None)
        part = value if rows is None else value[rows.index]
        return [layer(part if name in of_rows else value) for name, layer in zip(names, layers, strict=True)]
    adapted = [layer for layer in layers if isinstance(layer, LoraLinear) and layer.active]
    weights = [layer.weight for layer in layers] + [layer.lora_A for layer in adapted]
    marked = [getattr(parent, name) for name in of_rows]
    of_weights = [any(layer is one for one in marked) for layer in (*layers, *adapted)]
    outs = list(products(maker, sources, parameters, weights, rows, of_weights))
    thin = dict(zip(map(id, adapted), outs[len(layers) :], strict=True))
    return [_finished(layer, out, thin.get(id(layer))) for layer, out in zip(layers, outs, strict=False)]


def _finished(layer: Any, out: Tensor, thin: Tensor | None) -> Tensor:
    out = out if layer.bias is None else out + layer.bias
    return out if thin is None else out + layer.scale * linear(thin, layer.lora_B)


KNOB = Knob(
    name="recompute_elementwise",
    keys=(KEY,),
    on=(f"{KEY}=true",),
    off=(f"{KEY}=false",),
    claims=(Claim("update_actor", "activations", lambda before, after: before.activation_bytes - after.activation_bytes),),
)
