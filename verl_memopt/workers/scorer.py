"""A sharded model that computes log-probs: the policy and the reference alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl_memopt.config.schema import Fsdp, Model
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.memory.batching.shared_prompt import chains
from verl_memopt.memory.parameters.quantized_frozen import exact_weights
from verl_memopt.memory.parameters.resharding import reshard_units
from verl_memopt.models.attention import choose_attention
from verl_memopt.models.build import (
    WeightFolder,
    empty_model,
    fill_from_folder,
    load_model_config,
    mapped_weights,
    rebuild_buffers,
)
from verl_memopt.models.pack import Pack, pack_groups, pack_prompt, pack_rows, pack_suffixes
from verl_memopt.models.parallelize import block_options, parallelize
from verl_memopt.models.policy_model import PolicyModel, allocate, dtype_of
from verl_memopt.ops.prefix_kv import PrefixKV


@dataclass(frozen=True)
class LogProbs:
    """The result of a log-prob pass.

    ``log_probs`` is fp32 [R] on the host, in batch order. ``entropy`` has the same form, and is None if not requested.
    """

    log_probs: Tensor
    entropy: Tensor | None


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


def quantization_error(policy: PolicyModel, folder: Path, device: torch.device, temperature: float) -> tuple[float, float]:
    """Return the (mean, largest) difference in nats between the log-probs of a quantised model and of its unquantised weights.

    Measured on 4 x 64 random tokens. The unquantised weights are read from the folder, one layer at a time.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(policy.lm.config.vocab_size)
    tokens = torch.randint(vocabulary, (4 * 65,), generator=generator)
    pack = pack_rows(tokens[:4], [1] * 4, tokens[4:], [64] * 4).to(device)
    weights = WeightFolder(folder)
    quantized, _ = pack_log_probs(policy, pack, temperature, False)
    with exact_weights(policy, lambda name: weights.read(name, ()).to(device)):
        exact, _ = pack_log_probs(policy, pack, temperature, False)
    reshard_units(policy)
    difference = (quantized - exact).abs()
    return float(difference.mean()), float(difference.max())


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward of some rows. The optional tensors are fp32 [R], in the order of ``pack.targets``.

    ``prompt`` is the prompt to compute before the first of its responses, if the pack contains responses alone. ``ends`` is True
    if the last of its responses is in this micro-batch.
    """

    pack: Pack
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    prompt: Pack | None = None
    ends: bool = True

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch on a device. The copies are asynchronous."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        flat = moved(self.old_log_probs), moved(self.ref_log_probs), moved(self.advantages)
        prompt = None if self.prompt is None else self.prompt.to(device)
        return MicroBatch(self.pack.to(device), *flat, prompt, self.ends)


def micro_batch(batch: RolloutBatch, rows: Sequence[int], shared: bool = False) -> MicroBatch:
    """Return the micro-batch of the chosen rows, on the host. Only this function reads lengths from tensors.

    Args:
        batch: The batch.
        rows: The chosen rows.
        shared: Rows of one group share their prompt.
    """
    chosen = batch.select(rows)
    prompts, responses = chosen.prompts, chosen.responses
    tokens = (prompts.flat, prompts.sizes(), responses.flat, responses.sizes())
    pack = pack_groups(*tokens, chosen.group.tolist()) if shared else pack_rows(*tokens)
    return MicroBatch(pack, chosen.old_log_probs, chosen.ref_log_probs, chosen.advantages)


def micro_batches_of(
    batch: RolloutBatch, rows: Sequence[Sequence[int]], shared: bool, with_prefix_kv: bool
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of the chosen rows.

    Args:
        batch: The batch.
        rows: Rows of each micro-batch.
        shared: Rows of one group share their prompt.
        with_prefix_kv: Compute one prompt for neighbouring micro-batches, as :func:`chains` groups them.
    """
    tokens = batch.row_tokens(shared)
    for chain in chains(rows, tokens) if shared and with_prefix_kv else [[some] for some in rows]:
        if len(chain) == 1:
            yield micro_batch(batch, chain[0], shared)
            continue
        prompt = pack_prompt(batch.select(chain[0][:1]).prompts.flat)
        for some in chain:
            chosen = batch.select(some)
            pack = pack_suffixes(prompt.input_ids.shape[1], chosen.responses.flat, chosen.responses.sizes())
            flat = chosen.old_log_probs, chosen.ref_log_probs, chosen.advantages
            yield MicroBatch(pack, *flat, prompt, some is chain[-1])


def pack_log_probs(
    policy: PolicyModel, pack: Pack, temperature: float, with_entropy: bool, prefix_kv: PrefixKV | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs fp32 [R] of a pack's targets and, if requested, their entropies, without gradients."""
    with torch.no_grad():
        return policy(pack, temperature, with_entropy, None, prefix_kv)


def compute_log_probs(
    policy: PolicyModel,
    batch: RolloutBatch,
    micro_batches: Sequence[Sequence[int]],
    temperature: float,
    with_entropy: bool,
    device: torch.device,
    shared: bool = False,
) -> LogProbs:
    """Return the log-probs of every response token, without gradients.

    Args:
        policy: The model.
        batch: The batch of this rank.
        micro_batches: Rows of each forward. Together they hold every row once, and all ranks have the same number of them.
        temperature: Divides the logits.
        with_entropy: Compute entropies too.
        device: The device of the model.
        shared: Rows of one group share their prompt.
    """
    micros = [micro.to(device) for micro in micro_batches_of(batch, micro_batches, shared, policy.supports_prefix_kv)]
    scored, prefix_kv = [], None
    for rows, micro in zip(micro_batches, micros, strict=True):
        if micro.prompt is not None and prefix_kv is None:
            with torch.no_grad():
                prefix_kv = policy.compute_prefix(micro.prompt)
        scored.append((rows, *pack_log_probs(policy, micro.pack, temperature, with_entropy, prefix_kv)))
        prefix_kv = None if micro.ends else prefix_kv
    reshard_units(policy)
    sizes = batch.responses.sizes()
    log_probs = scatter_tokens([(rows, log_prob) for rows, log_prob, _ in scored], sizes)
    if not with_entropy:
        return LogProbs(log_probs, None)
    return LogProbs(log_probs, scatter_tokens([(rows, entropy) for rows, _, entropy in scored if entropy is not None], sizes))
