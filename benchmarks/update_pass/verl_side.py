"""verl's FSDP engine on one rank: its own model build, forward step and loss, called as its batch loop calls them.

verl has no CPU path, so two things around the computation are left out there: FSDP's wrapping of the model (which only adds
copies on one rank) and the question which device is current. Rows are padded, as packed ones need flash-attn.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

from benchmarks.update_pass.ray_stand_in import ray_or_stand_in

with warnings.catch_warnings(), ray_or_stand_in():
    warnings.simplefilter("ignore")  # About the engines of packages that are not installed.
    import verl.models.transformers.monkey_patch as monkey_patch
    import verl.trainer.config as verl_config
    import verl.workers.engine.fsdp.transformer_impl as engine_room
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.utils.losses import ppo_loss

from benchmarks.update_pass.sides import CLIP, PAD, TEMPERATURE, Job, Side, padded, plain_model, plain_side
from verl_memopt.distributed.device import is_gpu, join_process_group

AGGREGATION = "seq-mean-token-sum"
ATTENTION = "padding_masked"


def build_verl(job: Job, fused: bool = False) -> Side:
    """Gives the engine with whole logits, as its defaults have it.

    fused: with ``use_fused_kernels`` and their torch backend, logits in chunks of 512 positions.
    """
    engine = _engine(job, fused)
    loss_of = functools.partial(ppo_loss, config=_actor())
    data = [micro_batch(job, rows, fused) for rows in job.cuts()]

    def update() -> None:
        for micro_batch in data:
            loss, _ = engine.forward_step(micro_batch, loss_function=loss_of, forward_only=False)
            loss.backward()

    return plain_side(engine.module, update)


def _engine(job: Job, fused: bool) -> Any:
    engine = engine_room.FSDPEngineWithLMHead(*settings_of_engine(job, fused))
    engine.module = _built_alone(engine).to(job.device).train()
    engine._autocast_dtype = job.dtype
    return engine


def settings_of_engine(job: Job, fused: bool) -> tuple[Any, ...]:
    """Return what an engine of verl is built from, on one rank without Ray."""
    join_process_group(job.device, 0, 1, "", 0, 600)
    # It would patch a class of TRL's that TRL 1.16 no longer has.
    monkey_patch.is_trl_available = lambda: False
    if not is_gpu(job.device):
        engine_room.get_device_id = lambda: "cpu"
    model = HFModelConfig(
        path=str(job.folder), enable_gradient_checkpointing=job.checkpointing, use_remove_padding=False,
        use_fused_kernels=fused, fused_kernel_options={"impl_backend": "torch"},
        override_config={"attn_implementation": "sdpa"},
    )  # fmt: skip
    config = FSDPEngineConfig(strategy="fsdp2", model_dtype=job.work.dtype, use_torch_compile=False)
    optimizer = FSDPOptimizerConfig(lr=1e-6, total_training_steps=1)
    return model, config, optimizer, verl_config.CheckpointConfig()


def _built_alone(engine: Any) -> nn.Module:
    """Gives the engine's module. verl changes the forward of its class, which others use as well; here it is the module's own."""
    kind = type(plain := AutoModelForCausalLM.from_config(engine.model_config.hf_config))
    del plain
    before = kind.forward
    try:
        module = engine._build_module()
        module.forward = types.MethodType(kind.forward, module)
        return module
    finally:
        kind.forward = before


def _actor() -> ActorConfig:
    return ActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=CLIP, clip_ratio_high=CLIP,
        loss_agg_mode=AGGREGATION,
    )  # fmt: skip


def micro_batch(job: Job, rows: Sequence[int], fused: bool) -> TensorDict:
    """Gives a micro-batch as the engine takes it: ragged rows as nested tensors, and switches beside them."""
    batch = job.batch
    prompts = [torch.tensor(batch.prompt_of(row)) for row in rows]
    answers = [torch.tensor(batch.answers[row]) for row in rows]
    whole = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    columns = {
        "prompts": prompts, "responses": answers, "input_ids": whole, "position_ids": [torch.arange(len(ids)) for ids in whole],
        "response_mask": [torch.ones_like(answer) for answer in answers],
        "old_log_probs": [job.old_log_probs[row] for row in rows],
        "advantages": [torch.full((len(batch.answers[row]),), batch.advantages[row]) for row in rows],
    }  # fmt: skip
    tensors = {name: nested(column, job.device) for name, column in columns.items()}
    data = TensorDict(tensors, batch_size=[len(rows)])
    tensordict_utils.assign_non_tensor(
        data, temperature=TEMPERATURE, use_remove_padding=False, use_fused_kernels=fused, calculate_entropy=False,
        pad_token_id=PAD, dp_size=1, batch_num_tokens=sum(map(len, batch.answers)), global_batch_size=len(batch.answers),
    )  # fmt: skip
    return data


def nested(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.nested.as_nested_tensor([row.to(device) for row in rows], layout=torch.jagged)


def build_verl_prefix_grouper(job: Job) -> Side:
    """Gives verl's forward over shared prompts, by the package prefix-grouper, with verl's loss.

    No engine of 0.9.1 calls that forward, though its settings have the switch for it. Its attention is flash-attn's, which
    takes masks of padding; here torch's takes the same masks.
    """
    from verl.trainer.ppo.prefix_grouper_utils import forward_micro_batch_with_prefix_grouper

    AttentionInterface.register(ATTENTION, monkey_patch._create_prefix_grouper_wrapper(_padding_masked))
    model = plain_model(job, ATTENTION)
    actor = _actor()
    data = [_grouped(job, rows) for rows in job.cuts()]

    def update() -> None:
        for micro_batch, given in data:
            _, log_probs = forward_micro_batch_with_prefix_grouper(
                micro_batch, model, TEMPERATURE, False, job.device.type, job.dtype
            )
            _vanilla_loss(log_probs, given, actor, len(job.batch.answers)).backward()

    return plain_side(model, update)


def _padding_masked(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Attends causally, queries being the last of the keys' positions, to keys that are no padding. mask: [batch, keys]."""
    queries, keys = query.shape[2], key.shape[2]
    options = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    if queries == keys and bool(mask.all()):
        out = scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    else:
        causal = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        out = scaled_dot_product_attention(query, key, value, attn_mask=causal & mask.bool()[:, None, None], **options)
    return out.transpose(1, 2), None


def _grouped(job: Job, rows: Sequence[int]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    prompts, _ = padded([job.batch.prompt_of(row) for row in rows], "left", job.device)
    responses, mask = padded([job.batch.answers[row] for row in rows], "right", job.device)
    uid = [row // job.batch.k for row in rows]
    micro_batch = {"prompts": prompts, "responses": responses, "response_mask": mask, "uid": uid, "pad_token_id": PAD}
    old = torch.nn.utils.rnn.pad_sequence([job.old_log_probs[row] for row in rows], batch_first=True)
    advantages = torch.tensor([job.batch.advantages[row] for row in rows], device=job.device)[:, None].expand_as(mask)
    return micro_batch, {"old_log_prob": old, "advantages": advantages, "response_mask": mask.bool()}


def _vanilla_loss(log_probs: Tensor, given: dict[str, Tensor], actor: ActorConfig, sequences: int) -> Tensor:
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=None, global_batch_size=sequences)
    loss, _ = compute_policy_loss_vanilla(log_prob=log_probs, loss_agg_mode=AGGREGATION, config=actor, **given)
    return loss
