"""Build a sharded model, and fill it with the weights of a folder: the policy and the reference alike."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl_memopt.config.schema import Fsdp, Model
from verl_memopt.models.attention import choose_attention
from verl_memopt.models.build import empty_model, fill_from_folder, load_model_config, mapped_weights, rebuild_buffers
from verl_memopt.models.parallelize import block_options, parallelize
from verl_memopt.models.policy_model import PolicyModel, allocate, dtype_of


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
    masters = dtype_of(fsdp.model_dtype, f"{key}.fsdp_config.model_dtype")
    compute = dtype_of(fsdp.dtype, f"{key}.fsdp_config.dtype")
    reduce = dtype_of(fsdp.mixed_precision.reduce_dtype, f"{key}.fsdp_config.mixed_precision.reduce_dtype")
    attention = choose_attention(model.attn_implementation, device, compute)
    lm = empty_model(load_model_config(model, folder), attention, masters, model.trust_remote_code)
    blocks = block_options(lm, model, fsdp, recompute, trained)
    # Only one rank alone can reuse a prefix KV: several ranks must run the same forwards, but cut their groups differently.
    supports_prefix_kv = blocks is not None and blocks[0].recompute and mesh.size() == 1
    policy = PolicyModel(lm, model.logprob_chunk_tokens, compile_head, model.logprob_vocab_tile, blocks, supports_prefix_kv)
    parallelize(policy, model, fsdp, mesh, (masters, compute, reduce), key, recompute, trained, quantization)
    return policy


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


def materialize_mapped(policy: PolicyModel, folder: Path, device: torch.device) -> list[Tensor]:
    """Allocate the model's storage on the device, unfilled.

    Returns:
        For each parameter its values in the memory-mapped folder.
    """
    allocate(policy, device)
    rebuild_buffers(policy, device)
    return mapped_weights(policy, folder)
