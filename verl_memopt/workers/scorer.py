"""A sharded model that gives log-probs: the policy and the reference alike."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from verl_memopt.config.schema import Fsdp, Model
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.distributed.sharding import shard_model
from verl_memopt.errors import ConfigError
from verl_memopt.memory.activation_checkpointing import checkpoint_blocks, recomputed_blocks
from verl_memopt.memory.carried_prompt import CarriedPrompt
from verl_memopt.memory.lora import apply_lora
from verl_memopt.memory.native_offload import native_offload
from verl_memopt.memory.precision import mixed_precision
from verl_memopt.memory.prune_last_block import prune_last_block
from verl_memopt.memory.quantized_frozen import exact_weights, quantize_blocks
from verl_memopt.memory.recompute_elementwise import recompute_elementwise
from verl_memopt.memory.resharding import reshard_units
from verl_memopt.memory.sharding_units import sharding_units
from verl_memopt.memory.shared_prompt import chains
from verl_memopt.memory.tiled_mlp import tile_mlps
from verl_memopt.models.attention import choose_attention
from verl_memopt.models.build import (
    WeightFolder,
    empty_model,
    fill_from_folder,
    load_model_config,
    mapped_weights,
    rebuild_buffers,
)
from verl_memopt.models.pack import Pack, pack_branches, pack_groups, pack_prompt, pack_rows
from verl_memopt.models.policy_model import PolicyModel, allocate, dtype_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """What a log-prob pass gives. log_probs: fp32 [R] on the host, in batch order; entropy: the same, when asked for."""

    log_probs: Tensor
    entropy: Tensor | None


def build_scorer(
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
    """Gives the sharded model without weights in it; :func:`materialize` fills it.

    key: the settings section to name in errors. compile_head: compile the per-chunk functions. recompute: gradient
    checkpointing. trained: the policy, which has adapters where LoRA is asked for. quantization: of a frozen model's blocks.
    """
    masters = dtype_of(fsdp.model_dtype, f"{key}.fsdp_config.model_dtype")
    compute = dtype_of(fsdp.dtype, f"{key}.fsdp_config.dtype")
    reduce = dtype_of(fsdp.mixed_precision.reduce_dtype, f"{key}.fsdp_config.mixed_precision.reduce_dtype")
    attention = choose_attention(model.attn_implementation, device, compute)
    lm = empty_model(load_model_config(model, folder), attention, masters, model.trust_remote_code)
    policy = PolicyModel(lm, model.logprob_chunk_tokens, compile_head, model.logprob_vocab_tile)
    if trained and model.lora_rank > 0:
        apply_lora(lm, model.lora_rank, model.lora_alpha, model.target_modules, model.exclude_modules)
    if quantization != "none":
        quantize_blocks(policy.blocks(), quantization)
    blocks = _blocks(policy, fsdp)
    mode, shards = (model.gradient_checkpointing_mode, model.gradient_checkpointing_every), model.tiled_mlp.num_shards
    own_code = not type(lm).__module__.startswith("transformers.")
    if own_code:
        _tell_own_code(lm, model)
    if model.tiled_mlp.enabled:
        tile_mlps(policy.blocks(), shards, trained)
    if model.recompute_elementwise and not own_code:
        again = {id(block) for block in (recomputed_blocks(blocks, *mode) if recompute else ())}
        policy.final_norm = recompute_elementwise(
            lm.get_decoder(), trained, lambda block: shards if model.tiled_mlp.enabled else 1 if id(block) in again else None
        )
    if model.prune_last_block and not own_code:
        policy.prunes = prune_last_block(lm.get_decoder(), recomputed=policy.final_norm is not None)
    _refuse_units_inside_blocks(policy, fsdp, key)
    # On several ranks all must run the same forwards and backwards, and their groups are cut differently.
    policy.carries = policy.final_norm is not None and mesh.size() == 1
    if recompute:
        checkpoint_blocks(blocks, *mode)
    units = sharding_units(lm.get_input_embeddings(), blocks, lm.get_output_embeddings(), policy.tied, fsdp.own_units)
    precision, offload = mixed_precision(masters, compute, reduce), native_offload(fsdp.offload_policy)
    shard_model(policy, units, mesh, precision, offload, fsdp.reshard_after_forward, fsdp.forward_prefetch)
    return policy


def _tell_own_code(lm: PreTrainedModel, model: Model) -> None:
    """Says which knobs leave a model alone whose code is not transformers': they know blocks by class, and it may differ."""
    section = "actor_rollout_ref.model"
    if model.tiled_mlp.enabled:
        raise ConfigError(
            f"{section}.tiled_mlp.enabled=true: {type(lm).__name__} runs code of its own, whose MLP is not known here. "
            f"Set {section}.tiled_mlp.enabled=false."
        )
    for name in ("recompute_elementwise", "prune_last_block"):
        if getattr(model, name):
            logger.warning(
                "%s.%s=true: %s runs code of its own; its blocks are left as they are", section, name, type(lm).__name__
            )


def _blocks(policy: PolicyModel, fsdp: Fsdp) -> list[torch.nn.Module]:
    wanted = fsdp.wrap_policy.transformer_layer_cls_to_wrap
    if wanted is None:
        return policy.blocks()
    blocks = [module for module in policy.modules() if type(module).__name__ in wanted]
    if not blocks:
        kinds = sorted({type(block).__name__ for block in policy.blocks()})
        raise ConfigError(
            f"fsdp_config.wrap_policy.transformer_layer_cls_to_wrap={list(wanted)}: the model has no such module. "
            f"Its blocks are {', '.join(kinds)}; leave the key out to take them."
        )
    return blocks


def _refuse_units_inside_blocks(policy: PolicyModel, fsdp: Fsdp, key: str) -> None:
    wanted = fsdp.wrap_policy.transformer_layer_cls_to_wrap or ()
    ours = policy.final_norm is not None or policy.prunes
    for block in policy.blocks() if ours else ():
        inside = sorted({type(module).__name__ for module in block.modules() if module is not block} & set(wanted))
        if inside:
            raise ConfigError(
                f"{key}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap={list(wanted)}: {', '.join(inside)} lies inside "
                f"{type(block).__name__}, whose weights recompute_elementwise=true and prune_last_block=true of "
                "actor_rollout_ref.model read as one unit. Leave the key out, or set both to false."
            )


def materialize(policy: PolicyModel, folder: Path, device: torch.device, on_host: bool = False) -> None:
    """Gives the model its storage, on the device or ``on_host``, and fills it from the folder, shard by shard."""
    allocate(policy, device, on_host)
    rebuild_buffers(policy, device)
    fill_from_folder(policy, folder)


def materialize_mapped(policy: PolicyModel, folder: Path, device: torch.device) -> list[Tensor]:
    """Gives the model its storage on the device, unfilled, and for each parameter its values in the mapped folder."""
    allocate(policy, device)
    rebuild_buffers(policy, device)
    return mapped_weights(policy, folder)


def quantization_error(policy: PolicyModel, folder: Path, device: torch.device, temperature: float) -> tuple[float, float]:
    """Gives (mean, largest) difference in nats between the log-probs of a quantised model and of its unquantised weights.

    Measured on 4 x 64 random tokens; the unquantised weights are read from the folder, a layer at a time.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(policy.lm.config.vocab_size)
    tokens = torch.randint(vocabulary, (4 * 65,), generator=generator)
    pack = pack_rows(tokens[:4], [1] * 4, tokens[4:], [64] * 4).to(device)
    weights = WeightFolder(folder)
    quantized, _ = score_pack(policy, pack, temperature, False)
    with exact_weights(policy, lambda name: weights.read(name, ()).to(device)):
        exact, _ = score_pack(policy, pack, temperature, False)
    reshard_units(policy)
    difference = (quantized - exact).abs()
    return float(difference.mean()), float(difference.max())


@dataclass(frozen=True)
class MicroBatch:
    """What one forward of some rows needs. The optional tensors are fp32 [R], in the order of ``pack.targets``.

    prompt: where the pack is of answers alone, the prompt that is to be computed before the first of them; ends: whether the
    last of them is here.
    """

    pack: Pack
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    prompt: Pack | None = None
    ends: bool = True

    def to(self, device: torch.device) -> MicroBatch:
        """Gives the micro-batch on a device; the copies do not wait."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        flat = moved(self.old_log_probs), moved(self.ref_log_probs), moved(self.advantages)
        prompt = None if self.prompt is None else self.prompt.to(device)
        return MicroBatch(self.pack.to(device), *flat, prompt, self.ends)


def micro_batch(batch: RolloutBatch, rows: Sequence[int], shared: bool = False) -> MicroBatch:
    """Gives the micro-batch of the chosen rows, on the host. The only place that reads lengths from tensors.

    shared: rows of one group share their prompt.
    """
    chosen = batch.select(rows)
    prompts, responses = chosen.prompts, chosen.responses
    tokens = (prompts.flat, prompts.sizes(), responses.flat, responses.sizes())
    pack = pack_groups(*tokens, chosen.group.tolist()) if shared else pack_rows(*tokens)
    return MicroBatch(pack, chosen.old_log_probs, chosen.ref_log_probs, chosen.advantages)


def micro_batches_of(batch: RolloutBatch, rows: Sequence[Sequence[int]], shared: bool, carries: bool) -> Iterator[MicroBatch]:
    """Yields the micro-batches of the chosen rows. carries: one prompt is computed for neighbours that :func:`chains` tells."""
    tokens = batch.row_tokens(shared)
    for chain in chains(rows, tokens) if shared and carries else [[some] for some in rows]:
        if len(chain) == 1:
            yield micro_batch(batch, chain[0], shared)
            continue
        prompt = pack_prompt(batch.select(chain[0][:1]).prompts.flat)
        for some in chain:
            chosen = batch.select(some)
            pack = pack_branches(prompt.input_ids.shape[1], chosen.responses.flat, chosen.responses.sizes())
            flat = chosen.old_log_probs, chosen.ref_log_probs, chosen.advantages
            yield MicroBatch(pack, *flat, prompt, some is chain[-1])


def score_pack(
    policy: PolicyModel, pack: Pack, temperature: float, with_entropy: bool, carried: CarriedPrompt | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gives log-probs fp32 [R] of a pack's targets and, when asked, entropies, without gradients."""
    with torch.no_grad():
        return policy(pack, temperature, with_entropy, None, carried)


def score_batch(
    policy: PolicyModel,
    batch: RolloutBatch,
    micro_batches: Sequence[Sequence[int]],
    temperature: float,
    with_entropy: bool,
    device: torch.device,
    shared: bool = False,
) -> Scores:
    """Gives the log-probs of every response token, without gradients.

    micro_batches: rows of each forward; together they hold every row once, and all ranks have the same number of them.
    shared: rows of one group share their prompt.
    """
    micros = [micro.to(device) for micro in micro_batches_of(batch, micro_batches, shared, policy.carries)]
    scored, carried = [], None
    for rows, micro in zip(micro_batches, micros, strict=True):
        if micro.prompt is not None and carried is None:
            with torch.no_grad():
                carried = policy.carry(micro.prompt)
        scored.append((rows, *score_pack(policy, micro.pack, temperature, with_entropy, carried)))
        carried = None if micro.ends else carried
    reshard_units(policy)
    sizes = batch.responses.sizes()
    log_probs = scatter_tokens([(rows, log_prob) for rows, log_prob, _ in scored], sizes)
    if not with_entropy:
        return Scores(log_probs, None)
    return Scores(log_probs, scatter_tokens([(rows, entropy) for rows, _, entropy in scored if entropy is not None], sizes))
