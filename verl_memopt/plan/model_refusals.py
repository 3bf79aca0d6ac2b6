"""What a run refuses only when it builds its models, told from their sizes, so that ``fit`` proposes none of it.

The build refuses the same where it sees the modules: ``parallelize`` and ``_check_heads`` of ``model/assembly.py``,
``block_options`` of ``model/block_options.py``, and the arguments of ``rollout/vllm_process.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl_memopt.config.schema import CriticModel, Model, Settings, TrainedFsdp
from verl_memopt.memory.critic_rules import has_critic
from verl_memopt.memory.knob import num_devices
from verl_memopt.memory.lora import EXPERT_WEIGHTS, expert_weights, matches
from verl_memopt.memory.quantized_base import KEY as QUANTIZATION
from verl_memopt.memory.shared_weights import KEY as SHARE
from verl_memopt.memory.shared_weights import why_not
from verl_memopt.model.attention import HEAD_MULTIPLE
from verl_memopt.model.sizes import ModelSize
from verl_memopt.plan.peaks import Sizes, shares_weights, traits_of

_AR = "actor_rollout_ref"
_ENGINE = f"{_AR}.rollout.name"


def why_refused(settings: Settings, sizes: Sizes) -> str | None:
    """Return the error with which the build of a run would refuse its settings for its models. None = it would not."""
    return next(_reasons(settings, sizes), None)


def _reasons(settings: Settings, sizes: Sizes) -> Iterator[str]:
    roles, critic = settings.actor_rollout_ref, settings.critic.model
    yield from _of_blocks(f"{_AR}.model", roles.model, f"{_AR}.actor.fsdp_config", roles.actor.fsdp_config, sizes.policy)
    if has_critic(settings):
        yield from _of_blocks(
            "critic.model", critic, "critic.model.fsdp_config", critic.fsdp_config, sizes.critic or sizes.policy
        )
    yield from _of_quantization(settings, sizes.policy)
    if roles.rollout.name == "vllm":
        yield from _of_vllm(settings, sizes.policy)


def _of_blocks(key: str, model: Model | CriticModel, sharding: str, fsdp: TrainedFsdp, size: ModelSize) -> Iterator[str]:
    if model.tiled_mlp.enabled and not size.has_own_blocks:
        yield f"{key}.tiled_mlp.enabled=true: the model has MLPs that are not known. Set it to false."
    if model.lora_rank and model.target_parameters:
        yield from _of_adapted_experts(f"{key}.target_parameters", model.target_parameters, size)
    if model.block_tile_tokens is not None:
        reason = None if size.has_own_blocks else "the model has blocks that are not known"
        reason = reason or ("its blocks have norms of the outputs of attention and MLP" if size.post_norms else None)
        reason = reason or (f"heads have a size of {size.head_dim}" if size.head_dim % HEAD_MULTIPLE else None)
        if reason is not None:
            yield f"{key}.block_tile_tokens={model.block_tile_tokens}: {reason}. Set it to null."
    if fsdp.sequence_ranks > 1 and (size.linear_layers or any(size.reading)):
        reason = "carry a state from token to token" if size.linear_layers else "read the keys of an earlier one"
        yield f"{sharding}.ulysses_sequence_parallel_size={fsdp.sequence_ranks}: layers of the model {reason}. Set it to 1."


def _of_adapted_experts(key: str, endings: Sequence[str], size: ModelSize) -> Iterator[str]:
    if size.mixture is None or not size.has_own_blocks:
        yield f"{key}={list(endings)}: no experts of the model are computed here. Set it to null."
        return
    names = [name for weight in EXPERT_WEIGHTS for name in expert_weights(size.mixture, size.layers, weight)]
    for wrong in (ending for ending in endings if not any(matches(name, [ending]) for name in names)):
        yield f"{key}=[{wrong}]: no weight of experts has this name. Set it to names such as {', '.join(EXPERT_WEIGHTS)}."


def _of_quantization(settings: Settings, policy: ModelSize) -> Iterator[str]:
    roles, devices = settings.actor_rollout_ref, num_devices(settings)
    base = f"{QUANTIZATION}={roles.model.quantization}"
    if roles.model.quantization == "none" or policy.mixture is None:
        return
    if not policy.has_own_blocks:
        yield f"{base}: the model has experts that transformers computes, and only linear layers are quantised. Set it to none."
    if devices > 1 and not shares_weights(roles, policy, devices, sleeps=True):
        yield f"{base}: on several devices an engine must share the base, and vLLM does not share experts. Set {_ENGINE}=hf."


def _of_vllm(settings: Settings, size: ModelSize) -> Iterator[str]:
    roles = settings.actor_rollout_ref
    if size.sinks:
        yield f"{_ENGINE}=vllm: vLLM loads the experts of this model only when it starts. Set {_ENGINE}=hf."
    devices = num_devices(settings)
    if roles.rollout.share_weights is True and why_not(roles, devices, sleeps=True) is None:
        reason = why_not(roles, devices, True, traits_of(size))
        if reason is not None:
            yield f"{SHARE}=true: {reason} Set {SHARE}=auto to run with two copies."
