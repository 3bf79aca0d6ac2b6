"""The options of each block of our own decoder, from the settings, and which models it can compute."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from verl_memopt.config.schema import CriticModel, Fsdp, Model
from verl_memopt.errors import ConfigError
from verl_memopt.memory.activation_checkpointing_torch import chosen_blocks
from verl_memopt.memory.prune_last_block import can_prune
from verl_memopt.memory.recompute_elementwise_torch import can_recompute, gate_of, is_silu, why_kept
from verl_memopt.memory.tiled_mlp_torch import check_mlps
from verl_memopt.model.attention import HEAD_MULTIPLE
from verl_memopt.model.families import own_blocks

logger = logging.getLogger(__name__)

PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")
"""The submodules of a decoder of the Llama family, in the order of its parameters."""

LAYER_INPUTS = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
"""Further submodules of a small Gemma 4, which give each token an input of its own for each layer."""


@dataclass(frozen=True)
class BlockOptions:
    """How one block saves memory. By default it keeps for backward what plain autograd keeps."""

    recompute: bool = False
    """Compute norms, rotary positions and activations again in backward (``recompute_elementwise``)."""

    mlp_tiles: int | None = None
    """Keep only the input of the MLP, and run it over at least this many tiles of tokens (``tiled_mlp``). None = also keep the
    outputs of gate and up, without tiles."""

    prune: bool = False
    """Compute queries, attention and MLP only for tokens whose state predicts a response token (``prune_last_block``)."""

    checkpoint: Literal["full", "selective"] | None = None
    """What activation checkpointing keeps: the input of the block ("full"), or also the outputs of matrix products and attention
    ("selective"). None = no checkpointing."""

    tile_tokens: int | None = None
    """Keep only the input of the block, and run the whole block over tiles of this many tokens (``block_tile_tokens``)."""


def block_options(
    lm: PreTrainedModel, model: Model | CriticModel, fsdp: Fsdp, key: str, trained: bool, checkpoints: bool
) -> list[BlockOptions] | None:
    """Return the options of each block. None = transformers computes the blocks of this architecture.

    A knob that this architecture does not support is logged or refused. ``key`` is the model's section of the settings.
    ``checkpoints`` says whether activation checkpointing is on.

    Raises:
        ConfigError: The MLPs or the blocks cannot run over tiles.
    """
    blocks: Any = getattr(lm.get_decoder(), "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        return None  # PackedModel refuses this model
    if not type(lm).__module__.startswith("transformers."):
        _tell_own_code(lm, model, key)
        return None
    tiles = model.mlp_tiles
    if tiles is not None:
        check_mlps(blocks, trained, f"{key}.tiled_mlp")
    recompute = model.recompute_elementwise and can_recompute(blocks, trained, f"{key}.recompute_elementwise")
    prunes = model.prune_last_block and can_prune(blocks[-1], f"{key}.prune_last_block")
    if model.block_tile_tokens is not None:
        _check_tiled_blocks(lm, blocks, trained, key)
    if not is_llama_like(lm):
        assert tiles is None, f"{class_name(blocks[0])} has an MLP that is known in a block that is not"
        return None
    mode, wanted = model.gradient_checkpointing_mode, fsdp.wrap_policy.transformer_layer_cls_to_wrap
    # If the wrap policy names other classes, the blocks are not checkpointed.
    among_units = checkpoints and (wanted is None or class_name(blocks[0]) in wanted)
    chosen = chosen_blocks(len(blocks), mode, model.gradient_checkpointing_every) if among_units else ()
    return [
        BlockOptions(
            recompute=recompute,
            # With a tiled MLP, which keeps only its input, the second forward of a checkpointed block stops before the MLP.
            mlp_tiles=1 if tiles is None and recompute and place in chosen and mode != "selective" else tiles,
            prune=prunes and place == len(blocks) - 1,
            checkpoint=None if place not in chosen else "selective" if mode == "selective" else "full",
            tile_tokens=model.block_tile_tokens,
        )
        for place in range(len(blocks))
    ]


def _check_tiled_blocks(lm: PreTrainedModel, blocks: Any, trained: bool, key: str) -> None:
    # Refuse a model whose blocks cannot run over tiles. Warn about blocks that are computed without tiles.
    name = f"{key}.block_tile_tokens"
    reason = why_kept(blocks, trained)
    if reason is None and not is_llama_like(lm):
        reason = f"{type(lm).__name__} has unknown parts"
    if reason is None and hasattr(blocks[0], "post_feedforward_layernorm"):
        reason = f"{class_name(blocks[0])} has norms of the outputs of attention and MLP"
    if reason is not None:
        raise ConfigError(
            f"{name}: tiles work only for blocks of {', '.join(own_blocks())} with plain linear layers, but {reason}. "
            f"Set {name}=null."
        )
    attentions = [block.self_attn for block in blocks if hasattr(block, "self_attn")]
    size = int(attentions[0].head_dim)
    if size % HEAD_MULTIPLE:
        raise ConfigError(
            f"{name}: the model's heads have a size of {size}, and kernels of a GPU need a multiple of {HEAD_MULTIPLE}. "
            f"Set {name}=null."
        )
    windows = [window_of(attention) for attention in attentions]
    if any(window is not None for window in windows):
        whole = sum(window is not None for window in windows)
        logger.warning("%s: %d of %d blocks have a sliding window, and are computed without tiles", name, whole, len(windows))


def _tell_own_code(lm: PreTrainedModel, model: Model | CriticModel, key: str) -> None:
    # Refuse or log knobs that have no effect on a model with its own code, because they recognise blocks by their class.
    if model.tiled_mlp.enabled:
        raise ConfigError(
            f"{key}.tiled_mlp.enabled=true: {type(lm).__name__} runs code of its own, whose MLP is unknown. "
            f"Set {key}.tiled_mlp.enabled=false."
        )
    if model.block_tile_tokens is not None:
        raise ConfigError(
            f"{key}.block_tile_tokens={model.block_tile_tokens}: {type(lm).__name__} runs code of its own, whose blocks are "
            f"unknown. Set {key}.block_tile_tokens=null."
        )
    for name in ("recompute_elementwise", "prune_last_block"):
        if getattr(model, name):
            logger.warning("%s.%s=true has no effect: %s runs code of its own", key, name, type(lm).__name__)


def is_llama_like(lm: Any) -> bool:
    """Whether :class:`Decoder` can replace the decoder of a causal LM. Those of :func:`own_blocks` qualify."""
    decoder = lm.get_decoder()
    known_blocks = all(type(block).__name__ in own_blocks() and _knows_mixture(block) for block in decoder.layers)
    # A model folder may contain its own code with the same class names.
    own_code = not type(lm).__module__.startswith("transformers.")
    return known_blocks and not own_code and {name for name, _ in decoder.named_children()} - set(LAYER_INPUTS) == set(PARTS)


def _knows_mixture(block: Any) -> bool:
    # Experts compute silu, and those beside an MLP what recomputed MLPs know. An MLP calls the activation of transformers.
    if hasattr(block, "experts"):
        return gate_of(block.router.config) is not None
    return not hasattr(block.mlp, "experts") or is_silu(block)


def class_name(module: nn.Module) -> str:
    return getattr(module, "source_class", type(module).__name__)


def window_of(attention: Any) -> int | None:
    """Return the number of positions that a token of a transformers attention sees, with its own position. None = all."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(attention.config, "sliding_window", None) if type(attention).__name__.startswith("Mistral") else None
