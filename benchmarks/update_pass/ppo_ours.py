"""This project's own path of PPO: the policy's update, and the critic of a worker on one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.update_pass.ours import build_ours, build_ours_no_sharing, counts_of, cut, whole
from benchmarks.update_pass.pair import pair_side
from benchmarks.update_pass.sides import CLIP_VALUE, Job, Side
from verl_memopt.config.schema import Critic as CriticSettings
from verl_memopt.config.schema import CriticModel, TrainedFsdp
from verl_memopt.distributed.device import join_process_group, training_mesh
from verl_memopt.model.assembly import build_critic, materialize_critic
from verl_memopt.worker.critic import Critic
from verl_memopt.worker.trained_model import MicroBatch


def build_ours_ppo_no_sharing(job: Job) -> Side:
    """Return the update with the prompt computed once per answer, in both models."""
    return pair_side(build_ours_no_sharing(job), _critic_side(job, cut(job, shared=False)))


def build_ours_ppo(job: Job) -> Side:
    """Return the update with each prompt computed once for the answers to it, in both models."""
    return pair_side(build_ours(job), _critic_side(job, cut(job, shared=True)))


def _critic_side(job: Job, micro_batches: Sequence[MicroBatch]) -> Side:
    critic = sharded_critic(job)
    assert critic.model.supports_prefix_kv
    counts = counts_of(job)

    def update() -> None:
        critic.trained.accumulate(micro_batches, counts, critic.loss)

    return Side(
        critic.model,
        update,
        lambda: {name.removeprefix("lm."): whole(parameter.grad) for name, parameter in critic.model.named_parameters()},
    )


def sharded_critic(job: Job) -> Critic:
    """Return the critic as a worker builds it, on one rank."""
    join_process_group(job.device, 0, 1, "", 0, 600)
    fsdp = TrainedFsdp(model_dtype=job.work.dtype, dtype=job.work.dtype)
    model = CriticModel(
        path=str(job.critic_folder), enable_gradient_checkpointing=job.checkpointing, trust_remote_code=False,
        attn_implementation="auto", fsdp_config=fsdp,
    )  # fmt: skip
    settings = CriticSettings(model=model, cliprange_value=CLIP_VALUE, loss_agg_mode="seq-mean-token-sum")
    value_model = build_critic(model, job.critic_folder, training_mesh(job.device.type, 1, -1), job.device)
    assert materialize_critic(value_model, job.critic_folder, job.device)
    return Critic(value_model, settings, optimizer_steps=1, world_size=1, device=torch.device(job.device))
