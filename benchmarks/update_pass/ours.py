"""This project's own path: the sharded model of a worker on one rank, and ``Policy.accumulate``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.update_pass.sides import CLIP, TEMPERATURE, Job, Side
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor, Model, TrainedFsdp
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.distributed.device import join_process_group, training_mesh
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.weights import named_weights
from verl_memopt.trainer.micro_batching import Budget
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.trained_model import MicroBatch, micro_batches_of

KEY = "actor_rollout_ref.actor"


def build_ours(job: Job, shared: bool = True) -> Side:
    """Gives the project's update. shared: each prompt is computed once for the answers to it in a micro-batch."""
    policy, micro_batches, counts = sharded_policy(job), cut(job, shared), counts_of(job)
    assert policy.model.supports_prefix_kv

    def update() -> None:
        policy.accumulate(micro_batches, counts, TEMPERATURE)

    return Side(policy.model, update, lambda: {name: whole(parameter.grad) for name, parameter in named_weights(policy.model)})


def cut(job: Job, shared: bool) -> list[MicroBatch]:
    """Gives the micro-batches as the trainer cuts and packs them; without a budget, of the rows that the others take."""
    batch = to_batch(job, shared)
    if job.work.token_budget is None:
        rows = [list(some) for some in job.cuts()]
    else:
        budget = Budget(True, job.work.token_budget, None, f"{KEY}.ppo_max_token_len_per_gpu")
        rows = budget.micro_batches(batch.row_tokens(), [str(row) for row in range(batch.num_rows)])
    return list(micro_batches_of(batch, rows, with_prefix_kv=True))


def counts_of(job: Job) -> GlobalCounts:
    tokens = sum(len(answer) for answer in job.batch.answers)
    return GlobalCounts(tokens=float(tokens), sequences=float(len(job.batch.answers)))


def sharded_policy(job: Job) -> Policy:
    join_process_group(job.device, 0, 1, "", 0, 600)
    mesh = training_mesh(job.device.type, 1, -1)
    fsdp = TrainedFsdp(model_dtype=job.work.dtype, dtype=job.work.dtype)
    model = Model(path=str(job.folder), logprob_chunk_tokens=job.work.chunk_tokens)
    actor = Actor(
        use_dynamic_bsz=True, use_torch_compile=False, loss_agg_mode="seq-mean-token-sum", clip_ratio_low=CLIP,
        clip_ratio_high=CLIP, fsdp_config=fsdp,
    )  # fmt: skip
    policy = build_policy(model, fsdp, job.folder, mesh, job.device, ModelUse(recompute=job.checkpointing, trained=True))
    materialize(policy, job.folder, job.device)
    return Policy(policy, actor, schedule_steps=1, world_size=1, device=job.device)


def to_batch(job: Job, shared: bool = False) -> RolloutBatch:
    """Gives the rows as the trainer's batch. Old log-probs are absent: the policy is its own."""
    batch = job.batch
    answers = Ragged.from_rows(batch.answers, torch.int64)
    rows = range(len(batch.answers))
    group = torch.arange(len(rows)) // batch.k
    return RolloutBatch(
        prompts=Ragged.from_rows([batch.prompt_of(row) for row in rows], torch.int64), responses=answers, group=group,
        prompt_group=group if shared else None, advantages=torch.tensor(batch.advantages).repeat_interleave(answers.lengths),
        batch_size=[],
    )  # fmt: skip


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
