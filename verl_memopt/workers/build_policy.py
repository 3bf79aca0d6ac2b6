"""Build a sharded model, and fill it with the weights of a folder: the policy, the reference and the critic alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from verl_memopt.config.schema import CriticModel, Fsdp, Model, ScoringModel
from verl_memopt.models.architecture import POLICY_KEY
from verl_memopt.models.attention import choose_attention
from verl_memopt.models.build import (
    REFERENCE_DTYPE,
    empty_model,
    fill_from_folder,
    load_model_config,
    mapped_weights,
    rebuild_buffers,
)
from verl_memopt.models.decoder import BlockOptions
from verl_memopt.models.packed_model import PackedModel, allocate
from verl_memopt.models.parallelize import ModelUse, block_options, parallelize
from verl_memopt.models.policy_model import PolicyModel, dtype_of
from verl_memopt.models.reward_folder import REWARD_KEY, frozen_value_model
from verl_memopt.models.value_model import CRITIC_KEY, ValueModel, stored_head

AnyModel = TypeVar("AnyModel", bound=PackedModel)
TakeOver = Callable[[PreTrainedModel, list[BlockOptions] | None, bool], AnyModel]
"""Makes a packed model of a model of transformers, the options of its blocks, and whether answers may use a prefix KV."""


def build_policy(
    model: Model,
    fsdp: Fsdp,
    folder: Path,
    mesh: DeviceMesh,
    device: torch.device,
    key: str,
    compile_head: bool,
    recompute: bool,
    trained: bool = False,
    quantization: str = "none",
) -> PolicyModel:
    """Return the sharded model without weights. :func:`materialize` fills it.

    Args:
        model: The ``model`` section of the settings.
        fsdp: The ``fsdp_config`` section of the role.
        folder: Folder of the model.
        mesh: The mesh to shard over.
        device: The device to compute on.
        key: The settings section to name in errors.
        compile_head: Compile the per-chunk functions.
        recompute: Gradient checkpointing.
        trained: The policy, which has adapters if LoRA is on.
        quantization: Quantization of a frozen model's blocks.
    """

    def take_over(lm: PreTrainedModel, blocks: list[BlockOptions] | None, supports_prefix_kv: bool) -> PolicyModel:
        chunk, tile = model.logprob_chunk_tokens, model.logprob_vocab_tile
        return PolicyModel(lm, chunk, compile_head, tile, blocks, supports_prefix_kv)

    use = ModelUse(POLICY_KEY, f"{key}.fsdp_config", recompute, trained, quantization)
    return _build(take_over, model, fsdp, folder, mesh, device, use)


def build_critic(
    model: CriticModel, folder: Path, mesh: DeviceMesh, device: torch.device, trained: bool = True, key: str = CRITIC_KEY
) -> ValueModel:
    """Return the sharded value model without weights. :func:`materialize_critic` fills it.

    Args:
        model: The ``critic.model`` section of the settings.
        folder: Folder of the model.
        mesh: The mesh to shard over.
        device: The device to compute on.
        trained: Add adapters if LoRA is on.
        key: The settings section to name in errors.
    """

    def take_over(lm: PreTrainedModel, blocks: list[BlockOptions] | None, supports_prefix_kv: bool) -> ValueModel:
        return ValueModel(lm, blocks, supports_prefix_kv, key)

    use = ModelUse(key, f"{key}.fsdp_config", model.enable_gradient_checkpointing, trained)
    return _build(take_over, model, model.fsdp_config, folder, mesh, device, use)


def build_reward_model(model: ScoringModel, policy: Model, folder: Path, mesh: DeviceMesh, device: torch.device) -> ValueModel:
    """Return the sharded reward model without weights. :func:`materialize_critic` fills it.

    Args:
        model: The ``reward_model.model`` section of the settings.
        policy: The policy's ``model`` section, whose knobs act in the reward model too.
        folder: Folder of the model.
        mesh: The mesh to shard over.
        device: The device to compute on.
    """

    def take_over(lm: PreTrainedModel, blocks: list[BlockOptions] | None, supports_prefix_kv: bool) -> ValueModel:
        return ValueModel(lm, blocks, supports_prefix_kv, REWARD_KEY)

    use = ModelUse(REWARD_KEY, f"{REWARD_KEY}.fsdp_config", quantization=model.quantization)
    as_critic = frozen_value_model(model, policy)
    return _build(take_over, as_critic, model.fsdp_config, folder, mesh, device, use)


def _build(
    take_over: TakeOver[AnyModel],
    model: Model | CriticModel,
    fsdp: Fsdp,
    folder: Path,
    mesh: DeviceMesh,
    device: torch.device,
    use: ModelUse,
) -> AnyModel:
    masters = dtype_of(fsdp.model_dtype, f"{use.fsdp_key}.model_dtype")
    compute = dtype_of(fsdp.dtype, f"{use.fsdp_key}.dtype")
    reduce = dtype_of(fsdp.mixed_precision.reduce_dtype, f"{use.fsdp_key}.mixed_precision.reduce_dtype")
    attention = choose_attention(model.attn_implementation or "auto", device, compute, use.model_key)
    config = load_model_config(model, folder, use.model_key)
    lm = empty_model(config, attention, masters, bool(model.trust_remote_code), use.model_key)
    blocks = block_options(lm, model, fsdp, use.recompute, use.trained, use.model_key)
    # Only one rank alone can reuse a prefix KV: several ranks must run the same forwards, but cut their groups differently.
    supports_prefix_kv = blocks is not None and blocks[0].recompute and mesh.size() == 1
    packed = take_over(lm, blocks, supports_prefix_kv)
    parallelize(packed, model, fsdp, mesh, (masters, compute, reduce), use)
    return packed


def materialize(policy: PolicyModel, folder: Path, device: torch.device, on_host: bool = False) -> None:
    """Allocate the model's storage and fill it from the folder, shard by shard.

    Args:
        policy: A model without weights.
        folder: Folder of the weights.
        device: The device to compute on.
        on_host: Allocate on the host instead of the device.
    """
    allocate(policy, device, on_host)
    rebuild_buffers(policy, device)
    fill_from_folder(policy, folder)


def materialize_critic(
    critic: ValueModel, folder: Path, device: torch.device, on_host: bool = False, key: str = CRITIC_KEY
) -> bool:
    """Allocate the critic's storage and fill it from the folder. A head that the folder lacks starts with zeros.

    Args:
        critic: A model without weights.
        folder: Folder of the weights.
        device: The device to compute on.
        on_host: Allocate on the host instead of the device.
        key: The settings section to name in errors.

    Returns:
        Whether the folder has a value head.
    """
    stored = stored_head(folder, key)
    allocate(critic, device, on_host)
    rebuild_buffers(critic, device, key)
    fill_from_folder(critic, folder, key, stored)
    return stored["score.weight"] is not None


def materialize_mapped(policy: PolicyModel, folder: Path, device: torch.device, dtype_key: str = REFERENCE_DTYPE) -> list[Tensor]:
    """Allocate the model's storage on the device, unfilled.

    Args:
        policy: A model without weights.
        folder: Folder of the weights.
        device: The device to compute on.
        dtype_key: The setting of the model's dtype, to name in errors.

    Returns:
        For each parameter its values in the memory-mapped folder.
    """
    allocate(policy, device)
    rebuild_buffers(policy, device)
    return mapped_weights(policy, folder, dtype_key)
