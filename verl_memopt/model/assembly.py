"""Build a model, then apply its wrappers: quantisation, LoRA, checkpointing and sharding, in this order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl_memopt.config.schema import CriticModel, Fsdp, Model, ScoringModel, TrainedFsdp
from verl_memopt.distributed.device import is_gpu
from verl_memopt.errors import ConfigError
from verl_memopt.memory.activation_checkpointing_torch import checkpoint_blocks
from verl_memopt.memory.lora import base_rests_as_computed
from verl_memopt.memory.lora_torch import apply_lora
from verl_memopt.memory.precision_torch import CastUnits
from verl_memopt.memory.quantized_base import experts_stay_packed
from verl_memopt.memory.quantized_frozen import MXFP4
from verl_memopt.memory.quantized_frozen_torch import check_quantizable, pack_experts, quantize_blocks
from verl_memopt.memory.sequence_parallel import check_heads, key_copies
from verl_memopt.memory.sequence_parallel_torch import sequence_group
from verl_memopt.memory.shared_weights_torch import GatheredWeights
from verl_memopt.memory.streamed_params_torch import StreamedParams, allocate_on_host, native_offload
from verl_memopt.model.attention import choose_attention
from verl_memopt.model.block_options import block_options, class_name
from verl_memopt.model.captured_block import CapturedBlocks, why_not_captured
from verl_memopt.model.decoder import Decoder, DecoderBlock
from verl_memopt.model.delta_kernels import with_kernels
from verl_memopt.model.experts import Experts
from verl_memopt.model.families import POLICY_KEY, SCORE_CAP, STATE_LAYER, is_mxfp4, layer_configs, layer_types
from verl_memopt.model.packed_model import PackedModel, PolicyModel, dtype_of
from verl_memopt.model.packing_check import REWARD_KEY, frozen_value_model
from verl_memopt.model.value_model import CRITIC_KEY, ValueHead, ValueModel, stored_head
from verl_memopt.model.weights import (
    REFERENCE_DTYPE,
    base_weights,
    empty_model,
    fill_from_folder,
    load_model_config,
    mapped_weights,
    rebuild_buffers,
)

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
SHARDS_BYTES = (2, 13)
"""The first version of torch whose FSDP2 is known to shard parameters of integer dtypes."""

NEIGHBOURS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers in one module that multiply the same input."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelUse:
    """How a run uses one model, and which sections of the settings error messages name."""

    model_key: str = POLICY_KEY
    """The section of the model itself."""
    fsdp_key: str = "actor_rollout_ref.actor.fsdp_config"
    """The section of its sharding."""
    recompute: bool = False
    """Whether activation checkpointing is on."""
    trained: bool = False
    """Whether the model is trained."""
    quantization: str = "none"
    """Quantization of a frozen model's blocks, or of the frozen base model under adapters."""
    compiled: bool = False
    """Compile the functions that compute a chunk of the LM head."""
    shared: bool = False
    """The model computes with the weights of an engine."""
    replicated: bool = False
    """The model computes with an engine's weights, and each of several devices has all of them."""

    @property
    def knobs_key(self) -> str:
        # A reward model uses the knobs of the policy.
        return POLICY_KEY if self.model_key == REWARD_KEY else self.model_key


Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]
"""Dtypes of parameters at rest, of compute and of the reduction of gradients."""


def parallelize(
    packed: PackedModel, model: Model | CriticModel, fsdp: Fsdp, mesh: DeviceMesh, dtypes: Dtypes, use: ModelUse
) -> None:
    """Apply quantisation, LoRA, checkpointing, FSDP2 and parameter offload to a model without weights.

    The blocks of ``packed`` must have their options already, and experts that are not whole must be packed.

    Raises:
        ConfigError: No module of the model matches the settings of adapters or FSDP2 units, or torch cannot shard its quantised
            blocks.
    """
    # The order is fixed: quantise, add adapters, checkpoint, shard. Each operation wraps the result of the ones before it.
    precision, offload = mixed_precision(*dtypes), native_offload(fsdp.offload_policy)
    if use.quantization != "none":
        if not (use.replicated or stays_plain(mesh, offload)) and TORCH < SHARDS_BYTES:
            raise ConfigError(
                f"{use.fsdp_key.rpartition('.')[0]}.quantization={use.quantization}: torch {torch.__version__} cannot shard "
                f"quantized parameters. Install torch 2.13 or newer, set quantization=none, or keep the model unsharded: one "
                f"device, and {use.fsdp_key}.offload_policy=false."
            )
        if use.trained:
            check_quantizable(packed.blocks(), f"{use.model_key}.quantization={use.quantization}")
        quantize_blocks(packed.blocks(), use.quantization)
    # After quantisation, because adapters wrap the quantised layers.
    if model.lora_rank > 0:  # a frozen model has adapters only if it is a teacher with adapters of its own
        layers, key = (model.target_modules, model.exclude_modules), use.model_key
        experts = model.target_parameters, packed.computes_experts
        apply_lora(packed.lm, model.lora_rank, model.lora_scale, *layers, key, packed.masters, *experts)
    units = wrapped_modules(packed, packed.blocks(), fsdp)
    _refuse_units_inside_blocks(packed, fsdp, use)
    if use.recompute:  # before sharding, so that recomputation does not run FSDP2's hooks again
        others = [unit for unit in units if not isinstance(unit, DecoderBlock)]  # a DecoderBlock checkpoints itself
        checkpoint_blocks(others, model.gradient_checkpointing_mode, model.gradient_checkpointing_every)
    # The value head is tiny and computes in fp32, so a cast to the compute dtype would only lose digits.
    own_dtype = [packed.head] if isinstance(packed.head, ValueHead) else []
    if fsdp.own_units and not packed.tied:
        # A tied matrix is used at both ends of the forward, so it stays in the root unit.
        units = [packed.lm.get_input_embeddings(), *units, *([] if own_dtype else [packed.head])]
    captured = _captured(packed, units, fsdp, stays_plain(mesh, offload) and not use.replicated, use.fsdp_key)
    if use.replicated:
        packed.rows = GatheredWeights(units, mesh, dtypes[2])
        return
    if stays_plain(mesh, offload):
        if precision.param_dtype is not None or captured:
            packed.casts = CastUnits(units, dtypes[1], fsdp.reshard_after_forward is not False, own_dtype, captured)
        return
    shard_model(packed, units, mesh, precision, offload, fsdp.reshard_after_forward, own_dtype)
    # The next unit is then gathered while this unit computes.
    for unit, following in pairwise(units) if fsdp.forward_prefetch else ():
        if isinstance(unit, FSDPModule) and isinstance(following, FSDPModule):
            unit.set_modules_to_forward_prefetch([following])


def _captured(packed: PackedModel, units: Sequence[nn.Module], fsdp: Fsdp, alone: bool, key: str) -> list[DecoderBlock]:
    # Make blocks run as CUDA graphs, and return them. Warn once if some cannot.
    if not isinstance(fsdp, TrainedFsdp) or not fsdp.cuda_graphs:
        return []
    blocks: Any = packed.blocks()
    reasons = [why_not_captured(block) if alone else "it is for one device without offload_policy" for block in blocks]
    captured = [block for block, reason in zip(blocks, reasons, strict=True) if reason is None and block in units]
    if len(captured) < len(blocks):
        reason = next((reason for reason in reasons if reason), "wrap_policy names other units than the blocks")
        logger.warning(
            "%s.cuda_graphs=true: %d of %d blocks run without: %s", key, len(blocks) - len(captured), len(blocks), reason
        )
    packed.graphs = CapturedBlocks() if captured else None
    for block in captured:
        block.captured = packed.graphs
    return captured


def wrapped_modules(root: nn.Module, blocks: Sequence[nn.Module], fsdp: Fsdp) -> list[nn.Module]:
    # Modules that are checkpointed and sharded one by one: the blocks, or the modules of the named classes.
    wanted = fsdp.wrap_policy.transformer_layer_cls_to_wrap
    if wanted is None:
        return list(blocks)
    units = [module for module in root.modules() if class_name(module) in wanted]
    if not units:
        kinds = sorted({class_name(block) for block in blocks})
        raise ConfigError(
            f"fsdp_config.wrap_policy.transformer_layer_cls_to_wrap={list(wanted)}: the model has no such module. "
            f"Its blocks are of class {', '.join(kinds)}. Leave the key out to use them."
        )
    return units


def _refuse_units_inside_blocks(packed: PackedModel, fsdp: Fsdp, use: ModelUse) -> None:
    wanted = fsdp.wrap_policy.transformer_layer_cls_to_wrap or ()
    decoder: Any = packed.decoder
    for block in packed.blocks():
        mixture: Any = getattr(block, "mixture", None)
        beside = [mixture, getattr(block, "router", None)]
        parts = mixture.children() if isinstance(mixture, Experts) else beside if mixture is not None else ()
        inside = sorted({class_name(module) for module in parts} & set(wanted))
        if inside:
            raise ConfigError(
                f"{use.fsdp_key}.wrap_policy.transformer_layer_cls_to_wrap={list(wanted)}: {', '.join(inside)} is a part of "
                f"the experts of a block, which compute their parts themselves. Leave the key out, or name {class_name(block)}."
            )
    ours = isinstance(decoder, Decoder) and (decoder.recompute or decoder.prunes)
    for block in packed.blocks() if ours else ():
        inside = sorted({class_name(module) for module in block.modules() if module is not block} & set(wanted))
        if inside:
            raise ConfigError(
                f"{use.fsdp_key}.wrap_policy.transformer_layer_cls_to_wrap={list(wanted)}: {', '.join(inside)} lies inside "
                f"{class_name(block)}. With recompute_elementwise=true, prune_last_block=true or block_tile_tokens of "
                f"{use.knobs_key} a block is one unit. Leave the key out, or set both to false and block_tile_tokens to null."
            )


# Build a sharded model, and fill it with the weights of a folder. The policy, the reference and the critic all use this.

AnyModel = TypeVar("AnyModel", bound=PackedModel)


def build_policy(
    model: Model, fsdp: Fsdp, folder: Path, mesh: DeviceMesh, device: torch.device, use: ModelUse | None = None
) -> PolicyModel:
    """Build the sharded model without weights. :func:`materialize` fills it.

    ``use`` says how the run uses the model. None = a frozen model without memory knobs.
    """
    use = use or ModelUse()
    chunk, tile = model.logprob_chunk_tokens, model.logprob_vocab_tile
    take_over = partial(PolicyModel, chunk_tokens=chunk, compiled=use.compiled, vocab_tile=tile)
    return _build(take_over, model, fsdp, folder, mesh, device, use)


def build_trained_policy(
    model: Model, fsdp: Fsdp, folder: Path, mesh: DeviceMesh, device: torch.device, compiled: bool, shares: bool = False
) -> PolicyModel:
    """Build the trained policy, sharded, without weights. :func:`materialize` fills it.

    ``shares`` says whether it will compute with the weights of an engine.
    """
    recompute, quantization, replicated = model.enable_gradient_checkpointing, model.quantization, shares and mesh.size() > 1
    use = ModelUse(
        recompute=recompute, trained=True, quantization=quantization, compiled=compiled, shared=shares, replicated=replicated
    )
    return build_policy(model, fsdp, folder, mesh, device, use)


def build_critic(model: CriticModel, folder: Path, mesh: DeviceMesh, device: torch.device) -> ValueModel:
    use = ModelUse(CRITIC_KEY, f"{CRITIC_KEY}.fsdp_config", model.enable_gradient_checkpointing, trained=True)
    return _build(ValueModel, model, model.fsdp_config, folder, mesh, device, use)


def build_reward_model(model: ScoringModel, policy: Model, folder: Path, mesh: DeviceMesh, device: torch.device) -> ValueModel:
    use = ModelUse(REWARD_KEY, f"{REWARD_KEY}.fsdp_config", quantization=model.quantization)
    as_critic = frozen_value_model(model, policy)
    return _build(partial(ValueModel, key=REWARD_KEY), as_critic, model.fsdp_config, folder, mesh, device, use)


def _build(
    take_over: Callable[..., AnyModel],
    model: Model | CriticModel,
    fsdp: Fsdp,
    folder: Path,
    mesh: DeviceMesh,
    device: torch.device,
    use: ModelUse,
) -> AnyModel:
    masters = dtype_of(fsdp.model_dtype, f"{use.fsdp_key}.model_dtype")
    compute = dtype_of(fsdp.dtype, f"{use.fsdp_key}.dtype")
    # Streamed weights arrive in the dtype in which they compute.
    resting = compute if fsdp.streams or _rests_as_computed(model, fsdp, mesh, use) else masters
    reduce = dtype_of(fsdp.mixed_precision.reduce_dtype, f"{use.fsdp_key}.mixed_precision.reduce_dtype")
    # Start with an empty model, because no weights may be read before the model is sharded.
    config = load_model_config(model, folder, use.model_key)
    name = model.attn_implementation or "auto"
    attention = choose_attention(name, device, compute, use.knobs_key, getattr(config, SCORE_CAP, None))
    lm = empty_model(config, attention, resting, bool(model.trust_remote_code), use.model_key)
    blocks = block_options(lm, model, fsdp, use.knobs_key, use.trained, use.recompute)
    packed = take_over(lm, blocks=blocks)
    for block in packed.blocks() if isinstance(packed.decoder, Decoder) else ():
        if isinstance(block, DecoderBlock) and block.is_linear:
            block.linear_attn.shape = with_kernels(block.linear_attn.shape, name, device, compute, use.knobs_key)
    if isinstance(packed, ValueModel):
        # The value head computes in fp32. So it always keeps the dtype of the master weights, even if other parameters rest in
        # a shorter dtype.
        packed.score = ValueHead(packed.embedding_weight, lm.config.hidden_size, masters)
    if fsdp.sequence_ranks > 1:
        _check_heads(config, fsdp.sequence_ranks, use)
        packed.sequence = sequence_group(mesh.device_type, mesh.size(), fsdp.sequence_ranks)
    packed.streams, packed.stays_on_host = fsdp.streams, fsdp.offload_policy or fsdp.streams
    packed.masters, packed.compute = masters, compute
    # Tiled blocks keep no keys and values that answers could reuse. Ranks that share a sequence have only parts of them.
    whole = blocks is not None and blocks[0].recompute and blocks[0].tile_tokens is None
    packed.supports_prefix_kv = whole and packed.sequence is None
    stored = is_mxfp4(config)
    stays = use.trained and stored and experts_stay_packed(model.lora_rank, fsdp, mesh.size(), use.shared)
    if isinstance(packed.decoder, Decoder) and (stays or use.quantization != "none"):
        pack_experts(packed.blocks(), MXFP4 if stored else use.quantization)
    parallelize(packed, model, fsdp, mesh, (resting, compute, reduce), use)
    return packed


def _rests_as_computed(model: Model | CriticModel, fsdp: Fsdp, mesh: DeviceMesh, use: ModelUse) -> bool:
    # Whether trained parameters rest in the compute dtype. Otherwise they rest in the longer dtype of the master weights.
    if not use.trained or not isinstance(fsdp, TrainedFsdp):
        return False
    return fsdp.split_master_weights or base_rests_as_computed(model.lora_rank, fsdp, mesh.size() == 1 or use.replicated)


def _check_heads(config: Any, ranks: int, use: ModelUse) -> None:
    # Refuse sequence parallelism if the ranks cannot share the query heads equally. Warn if key heads must be repeated.
    sizes = config.get_text_config()
    layers = layer_configs(sizes)
    if STATE_LAYER in layer_types(sizes):
        raise ConfigError(
            f"{use.fsdp_key}.ulysses_sequence_parallel_size={ranks}: layers of {config.model_type} carry a state from token to "
            f"token, so ranks cannot share the tokens of a row. Set it to 1. For long rows set {use.knobs_key}.block_tile_tokens."
        )
    if getattr(sizes, "num_kv_shared_layers", 0):
        raise ConfigError(
            f"{use.fsdp_key}.ulysses_sequence_parallel_size={ranks}: some layers of {config.model_type} read the keys of an "
            "earlier one, and ranks that share the tokens of a row do not hand these on. Set it to 1."
        )
    heads = int(sizes.num_attention_heads)
    kv_heads = min(int(getattr(layer, "num_key_value_heads", None) or heads) for layer in layers)
    key = f"{use.fsdp_key}.ulysses_sequence_parallel_size"
    check_heads(heads, ranks, key)
    copies = key_copies(heads, kv_heads, ranks)
    if copies > 1:
        logger.warning(
            "%s=%d: the model has %d key heads, and the ranks cannot share them equally. Each head goes to %d ranks, so the "
            "keys and values of attention need %d times the bytes.", key, ranks, kv_heads, copies, copies,
        )  # fmt: skip


def allocate(model: PackedModel, device: torch.device, shared: Mapping[str, Tensor] | None = None, joins: bool = True) -> None:
    """Allocate a model's parameters, uninitialised, and the units that are cast to compute. Tied parameters stay one tensor.

    Args:
        model: A model without storage.
        device: The device on which it computes.
        shared: An engine's weights by their Hugging Face names. They become the parameters.
        joins: On a GPU, place weights that multiply the same input one after another in memory, so that one product can use
            them together. Engines and FSDP2's units do this too.
    """
    if shared is not None:
        _place(model, device, _shared_weights(model, shared))
        if model.rows is not None:
            model.rows.take_over(model)
        if model.casts is not None:
            model.casts.take_over(model)
        return
    if model.streams:
        # FSDP2 also casts the inputs of its units. A streamed model is not sharded by FSDP2, so it must cast them itself.
        inputs = None if model.masters == model.compute else model.compute
        model.stream = StreamedParams(model.blocks(), _vocabulary(model), device, inputs)
        _place(model, device, model.stream.resting)
        return
    # Allocation gives every parameter its own memory, so tie the embedding and the head again below.
    tied = model.tied
    if model.stays_on_host:
        allocate_on_host(model, device)
    elif joins and is_gpu(device) and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        # One product over joined weights replaces three or two.
        _place(model, device, _neighbours(model, device))
    else:
        model.to_empty(device=device)
    if tied:
        model.head.weight = model.lm.get_input_embeddings().weight
    if model.casts is not None:
        model.casts.take_over(model)


def _shared_weights(model: PackedModel, shared: Mapping[str, Tensor]) -> dict[Tensor, Tensor]:
    weights = dict(base_weights(model))  # without adapters, which the engine does not have
    assert all(shared[name].shape == weight.shape and shared[name].dtype == weight.dtype for name, weight in weights.items())
    return {
        weight: nn.Parameter(shared[name], weight.requires_grad) if isinstance(weight, nn.Parameter) else shared[name].detach()
        for name, weight in weights.items()
    }


def _vocabulary(model: PackedModel) -> list[list[nn.Module]]:
    embedding, head = model.lm.get_input_embeddings(), model.head
    if isinstance(head, ValueHead):  # a value head is one vector, and stays on the device
        return [[embedding]]
    return [[embedding, head]] if model.tied else [[embedding], [head]]


def _neighbours(model: PackedModel, device: torch.device) -> dict[Tensor, nn.Parameter]:
    """Make uninitialised parameters for layers that multiply the same input, one after another in memory.

    Returns old parameter -> new parameter.
    """
    made = dict[Tensor, nn.Parameter]()
    sides = [[getattr(module, name, None) for name in names] for module in model.modules() for names in NEIGHBOURS]
    beside: list[Any]
    for beside in ([getattr(layer, kind, None) for layer in layers] for layers in sides for kind in ("weight", "bias")):
        if (
            all(isinstance(weight, nn.Parameter) for weight in beside)
            and len({(weight.dtype, weight.shape[1:]) for weight in beside}) == 1
        ):
            whole = torch.empty((sum(map(len, beside)), *beside[0].shape[1:]), dtype=beside[0].dtype, device=device)
            parts = whole.split([len(weight) for weight in beside])
            made |= {weight: nn.Parameter(part, weight.requires_grad) for weight, part in zip(beside, parts, strict=True)}
    return made


def _place(model: PackedModel, device: torch.device, made: Mapping[Tensor, Any]) -> None:
    # Replace parameters and buffers of the model by those in ``made``, and allocate all others.
    others = (parameter for parameter in model.parameters() if parameter not in made)
    made = {**made, **{other: nn.Parameter(torch.empty_like(other, device=device), other.requires_grad) for other in others}}
    # Replace by identity and not by name, because a tied parameter is in two modules.
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = None if parameter is None else made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = made[buffer] if buffer in made else torch.empty_like(buffer, device=device)


def materialize(policy: PolicyModel, folder: Path, device: torch.device, shared: Mapping[str, Tensor] | None = None) -> None:
    """Allocate the model's storage and fill it from the folder, shard by shard. ``shared`` is as in :func:`allocate`."""
    allocate(policy, device, shared)
    rebuild_buffers(policy, device)
    fill_from_folder(policy, folder)


def materialize_critic(critic: ValueModel, folder: Path, device: torch.device, key: str = CRITIC_KEY) -> bool:
    """Do the same as :func:`materialize`. Return whether the folder has a value head. If not, the head starts at 0."""
    stored = stored_head(folder, key)
    allocate(critic, device)
    rebuild_buffers(critic, device, key)
    fill_from_folder(critic, folder, key, stored)
    return stored["score.weight"] is not None


def materialize_mapped(policy: PolicyModel, folder: Path, device: torch.device, dtype_key: str = REFERENCE_DTYPE) -> list[Tensor]:
    """Allocate the model's storage on the device without values, and return each parameter's values in the mapped file.

    ``dtype_key`` and errors are as in :func:`verl_memopt.model.weights.mapped_weights`.
    """
    allocate(policy, device, joins=False)  # each parameter gets its values from another place in the file
    rebuild_buffers(policy, device)
    return mapped_weights(policy, folder, dtype_key)


# FSDP2 sharding of a model, unit by unit.


def stays_plain(mesh: DeviceMesh, offload: OffloadPolicy) -> bool:
    # FSDP2 is needed only for several devices, or for its own offloading.
    return mesh.size() == 1 and type(offload) is OffloadPolicy


def shard_model(
    root: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard_after_forward: bool | int,
    own_dtype: Sequence[nn.Module] = (),
) -> None:
    """Shard ``units``, then the rest of ``root``, over the mesh, in place.

    Args:
        root: The whole model.
        units: Modules that are gathered one by one, such as decoder blocks, in forward order.
        mesh: Devices to shard over.
        precision: Dtypes of compute and of the gradient reduction.
        offload: Whether shards rest on the host.
        reshard_after_forward: The argument of FSDP2's ``fully_shard``.
        own_dtype: Small units that compute in the dtype in which they rest.
    """
    options: dict[str, Any] = {
        "mesh": mesh, "mp_policy": precision, "offload_policy": offload, "reshard_after_forward": reshard_after_forward,
    }  # fmt: skip
    # Building the sub-mesh of an integer reshard reads tensor values, which fake tensors do not have.
    with unset_fake_temporarily():
        for unit in units:
            fully_shard(unit, **options)
        for unit in own_dtype:
            in_own_dtype = MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype)
            fully_shard(unit, **{**options, "mp_policy": in_own_dtype, "reshard_after_forward": False})
        # The root's parameters are used until the end of the forward, and again from the start of the backward.
        fully_shard(root, **{**options, "reshard_after_forward": False})


# The precision of parameters at rest, of compute, and of the reduction of gradients.
#
# Bytes saved, with N parameters over W devices and N_u parameters in the largest unit:
#
# - ``model_dtype=bfloat16`` halves master weights and gradients at rest, which need (4 + 4) x N / W bytes in fp32. The moments of
#   the optimizer have their own setting, ``optim.state_dtype``.
# - ``dtype=bfloat16`` halves activations and gathered parameters.
# - ``reduce_dtype=bfloat16`` halves the input of the reduction of the largest unit. It saves 2 x N_u x (1 - 1/W) bytes.


def mixed_precision(masters: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> MixedPrecisionPolicy:
    # None where two dtypes are equal, so that FSDP2 casts nothing.
    return MixedPrecisionPolicy(
        param_dtype=None if compute == masters else compute, reduce_dtype=None if reduce == compute else reduce
    )


# With ``own_units`` embedding and LM head are separate FSDP units. Each is gathered only while it computes, not for a whole pass.
#
# Bytes saved, with a vocabulary of V, a hidden size of h, N_l parameters in a block, b_c bytes per element of compute (2 for
# bfloat16) and b_r bytes per element of reduction (4 for fp32) over W ranks:
#
# - In a log-prob pass b_c x (V x h + N_l), or twice that if several ranks gather, less a chunk of logits. This is 9 % of the
#   log-prob peak of an 8B model over 8 devices (predicted by a run on fake tensors).
# - In an update b_c x (4 x V x h + N_l) - V x h x (b_c + b_r + b_r / W). This holds if the gather of both matrices is the peak
#   without the setting, and the reduction of the head's gradient is the peak with it.
#
# The chunked head is gathered once per update, not once per chunk. So is the embedding. Backward reads neither.
