"""The options of a model's blocks, and what wraps the model afterwards, in the order of application."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from verl_memopt.config.schema import CriticModel, Fsdp, Model
from verl_memopt.distributed.sharding import prefetch_forward, shard_model, stays_plain
from verl_memopt.errors import ConfigError
from verl_memopt.memory.activations.activation_checkpointing import checkpoint_blocks, chosen_blocks
from verl_memopt.memory.activations.prune_last_block import can_prune
from verl_memopt.memory.activations.recompute_elementwise import can_recompute
from verl_memopt.memory.activations.tiled_mlp import check_mlps
from verl_memopt.memory.parameters.lora import apply_lora
from verl_memopt.memory.parameters.native_offload import native_offload
from verl_memopt.memory.parameters.precision import mixed_precision
from verl_memopt.memory.parameters.quantized_frozen import quantize_blocks
from verl_memopt.memory.parameters.sharding_units import sharding_units
from verl_memopt.models.architecture import POLICY_KEY
from verl_memopt.models.decoder import BlockOptions, Decoder, DecoderBlock, class_name, of_llama_family
from verl_memopt.models.packed_model import PackedModel
from verl_memopt.models.value_model import ValueHead

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
SHARDS_BYTES = (2, 13)
"""The first version of torch whose FSDP2 is known to shard parameters that are no floating point numbers."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelUse:
    """What a run does with one model, and the settings sections that errors about it name.

    Attributes:
        model_key: The section of the model itself.
        fsdp_key: The section of its sharding.
        recompute: Activation checkpointing is on.
        trained: A model that is trained, which has adapters if LoRA is on.
        quantization: Quantization of a frozen model's blocks.
    """

    model_key: str
    fsdp_key: str
    recompute: bool = False
    trained: bool = False
    quantization: str = "none"


def parallelize(
    packed: PackedModel,
    model: Model | CriticModel,
    fsdp: Fsdp,
    mesh: DeviceMesh,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    use: ModelUse,
) -> None:
    """Apply LoRA, quantisation, checkpointing, FSDP2 and parameter offload to a model without weights.

    Args:
        packed: The model; its blocks already have their options.
        model: Settings of the model.
        fsdp: Settings of its sharding.
        mesh: Device mesh of the ranks.
        dtypes: Dtypes of the masters, of compute and of the gradient reduction.
        use: What the run does with the model.

    Raises:
        ConfigError: The model has no modules for the adapters or units.
    """
    if use.trained and model.lora_rank > 0:
        apply_lora(packed.lm, model.lora_rank, model.lora_alpha, model.target_modules, model.exclude_modules, use.model_key)
    precision, offload = mixed_precision(*dtypes), native_offload(fsdp.offload_policy)
    if use.quantization != "none":
        if not stays_plain(mesh, precision, offload) and TORCH < SHARDS_BYTES:
            raise ConfigError(
                f"{use.fsdp_key.rpartition('.')[0]}.quantization={use.quantization}: torch {torch.__version__} cannot shard "
                f"quantized parameters. Install torch 2.13 or newer, set quantization=none, or keep the model unsharded: one "
                f"device, {use.fsdp_key}.model_dtype equal to dtype, and {use.fsdp_key}.offload_policy=false."
            )
        quantize_blocks(packed.blocks(), use.quantization)
    units = wrapped_modules(packed, packed.blocks(), fsdp)
    _refuse_units_inside_blocks(packed, fsdp, use)
    if use.recompute:  # before sharding, so that FSDP's hooks stay outside of the recomputed part
        others = [unit for unit in units if not isinstance(unit, DecoderBlock)]  # a block of ours does it itself
        checkpoint_blocks(others, model.gradient_checkpointing_mode, model.gradient_checkpointing_every)
    # The value head is tiny and its product runs in fp32, so a cast to the compute dtype would only lose digits.
    exact = [packed.head] if isinstance(packed.head, ValueHead) else []
    large_head = None if exact else packed.head
    sharded = sharding_units(packed.lm.get_input_embeddings(), units, large_head, packed.tied, fsdp.own_units)
    shard_model(packed, sharded, mesh, precision, offload, fsdp.reshard_after_forward, exact)
    if fsdp.forward_prefetch:
        prefetch_forward(sharded)


def block_options(
    lm: PreTrainedModel, model: Model | CriticModel, fsdp: Fsdp, checkpoints: bool, trained: bool, key: str = POLICY_KEY
) -> list[BlockOptions] | None:
    """Return the options of each block; None for an architecture that computes its blocks itself.

    A knob that such an architecture lacks is refused, or logged where the run is still correct without it.

    Args:
        lm: The model, as transformers made it.
        model: Settings of the model.
        fsdp: Settings of its sharding, whose units are what is checkpointed.
        checkpoints: Activation checkpointing is on.
        trained: false for a model that only ever runs without gradients.
        key: The settings section of the model, to name in errors.

    Raises:
        ConfigError: MLPs cannot run over tiles.
    """
    blocks: Any = getattr(lm.get_decoder(), "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        return None  # PackedModel refuses it by name
    if not type(lm).__module__.startswith("transformers."):
        _tell_own_code(lm, model, key)
        return None
    tiles = model.tiled_mlp.num_shards if model.tiled_mlp.enabled else None
    if tiles is not None:
        check_mlps(blocks, trained, f"{key}.tiled_mlp")
    recompute = model.recompute_elementwise and can_recompute(blocks, trained, f"{key}.recompute_elementwise")
    prunes = model.prune_last_block and can_prune(blocks[-1], f"{key}.prune_last_block")
    if not of_llama_family(lm):
        assert tiles is None, f"{class_name(blocks[0])} has an MLP that is known in a block that is not"
        return None
    mode, wanted = model.gradient_checkpointing_mode, fsdp.wrap_policy.transformer_layer_cls_to_wrap
    among_units = checkpoints and (wanted is None or class_name(blocks[0]) in wanted)
    chosen = chosen_blocks(len(blocks), mode, model.gradient_checkpointing_every) if among_units else ()
    return [
        BlockOptions(
            recompute=recompute,
            # A second forward of the whole block stops before an MLP that keeps its input alone.
            mlp_tiles=1 if tiles is None and recompute and place in chosen and mode != "selective" else tiles,
            prune=prunes and place == len(blocks) - 1,
            checkpoint=None if place not in chosen else "selective" if mode == "selective" else "full",
        )
        for place in range(len(blocks))
    ]


def wrapped_modules(root: nn.Module, blocks: Sequence[nn.Module], fsdp: Fsdp) -> list[nn.Module]:
    """Return the modules that are checkpointed and sharded one by one: the blocks, or those of the named classes.

    Raises:
        ConfigError: The model has no module of these classes.
    """
    wanted = fsdp.wrap_policy.transformer_layer_cls_to_wrap
    if wanted is None:
        return list(blocks)
    units = [module for module in root.modules() if class_name(module) in wanted]
    if not units:
        kinds = sorted({class_name(block) for block in blocks})
        raise ConfigError(
            f"fsdp_config.wrap_policy.transformer_layer_cls_to_wrap={list(wanted)}: the model has no such module. "
            f"Its blocks are {', '.join(kinds)}; leave the key out to take them."
        )
    return units


def _tell_own_code(lm: PreTrainedModel, model: Model | CriticModel, key: str) -> None:
    """Refuse or log the knobs that do not act on a model with code of its own: they know blocks by their class."""
    if model.tiled_mlp.enabled:
        raise ConfigError(
            f"{key}.tiled_mlp.enabled=true: {type(lm).__name__} runs code of its own, whose MLP is not known here. "
            f"Set {key}.tiled_mlp.enabled=false."
        )
    for name in ("recompute_elementwise", "prune_last_block"):
        if getattr(model, name):
            logger.warning("%s.%s=true: %s runs code of its own; its blocks are left as they are", key, name, type(lm).__name__)


def _refuse_units_inside_blocks(packed: PackedModel, fsdp: Fsdp, use: ModelUse) -> None:
    wanted = fsdp.wrap_policy.transformer_layer_cls_to_wrap or ()
    decoder: Any = packed.decoder
    ours = isinstance(decoder, Decoder) and (decoder.recompute or decoder.prunes)
    for block in packed.blocks() if ours else ():
        inside = sorted({class_name(module) for module in block.modules() if module is not block} & set(wanted))
        if inside:
            raise ConfigError(
                f"{use.fsdp_key}.wrap_policy.transformer_layer_cls_to_wrap={list(wanted)}: {', '.join(inside)} lies inside "
                f"{class_name(block)}, whose weights recompute_elementwise=true and prune_last_block=true of "
                f"{use.model_key} read as one unit. Leave the key out, or set both to false."
            )
