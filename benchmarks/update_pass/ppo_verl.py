"""verl's PPO: the policy's engine, and its engine with a value head, each with its own loss."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDict

from benchmarks.update_pass.pair import critic_model, pair_side
from benchmarks.update_pass.ray_stand_in import ray_or_stand_in
from benchmarks.update_pass.sides import CLIP_VALUE, Job, Side, plain_side
from benchmarks.update_pass.verl_side import (
    AGGREGATION,
    build_verl,
    build_verl_fused,
    build_verl_prefix_grouper,
    micro_batch,
    nested,
    settings_of_engine,
)

with warnings.catch_warnings(), ray_or_stand_in():
    warnings.simplefilter("ignore")
    import verl.workers.engine.fsdp.transformer_impl as engine_room
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import value_loss


def build_verl_ppo(job: Job) -> Side:
    """Return the update with whole logits, the engine's default."""
    return _side(job, build_verl)


def build_verl_ppo_fused(job: Job) -> Side:
    """Return the update with ``use_fused_kernels`` for the policy."""
    return _side(job, build_verl_fused)


def build_verl_ppo_prefix_grouper(job: Job) -> Side:
    """Return the update with the policy's prompts shared. verl has no such forward for a critic."""
    return _side(job, build_verl_prefix_grouper)


def _side(job: Job, build_actor: Callable[[Job], Side]) -> Side:
    return pair_side(build_actor(job), _critic(job))


def _critic(job: Job) -> Side:
    """Return the critic's engine on one rank.

    Its own build of the module asks for flash-attn, so the module is transformers' token classifier, which that build would give.
    """
    engine: Any = engine_room.FSDPEngineWithValueHead(*settings_of_engine(job, job.critic_folder))
    engine.module = critic_model(job)
    engine._autocast_dtype = job.dtype
    config = CriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, cliprange_value=CLIP_VALUE, loss_agg_mode=AGGREGATION)
    loss_of = functools.partial(value_loss, config)
    data = [_micro_batch(job, rows) for rows in job.cuts()]

    def update() -> None:
        for each in data:
            loss, _ = engine.forward_step(each, loss_function=lambda **given: loss_of(**given), forward_only=False)
            loss.backward()

    return plain_side(engine.module, update)


def _micro_batch(job: Job, rows: Sequence[int]) -> TensorDict:
    data = micro_batch(job, rows, fused=False)
    data["values"] = nested([job.values[row] for row in rows], job.device)
    data["returns"] = nested([job.returns[row] for row in rows], job.device)
    return data
