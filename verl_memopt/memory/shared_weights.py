"""Hold the policy's weights once: the trainer computes with the parameters of the rollout engine.

Use it when: each device trains and generates with an engine of its own. With vLLM it is on by default where results stay the
    same: on one device, and on several devices if the engine does not sleep.
Saves: on one device, the engine's copy of the weights (2 bytes per parameter in bfloat16, 4 in fp32) in every phase that would
    hold both copies, and the whole weight sync; only the prefix cache is reset. On W devices, 1/W of these bytes and everything
    that FSDP2 gathers for compute. The remainders of master weights, gradients and optimizer state stay sharded, and the sync
    copies to each device the rows that other devices have updated.
Costs: no time. While the trainer computes, a sleeping engine frees only its KV cache, because its weights are in use. On W
    devices an update then holds (1 - 1/W) of the weights more than FSDP2 beside an engine that also frees its weights.
Works with: gradient checkpointing, every attention path, ``optimizer_offload``, ``grad_offload``, ``fsdp_size``, sequence
    parallelism, tied heads, checkpoints and exports. A run may resume with or without it, on any number of devices. With LoRA
    each device shares the whole frozen base, quantised or not, and its engine gets only the adapters. It refuses tensor-parallel
    engines, ``param_offload``, and different precisions of trainer and engine. On several devices an update cannot continue after
    an out-of-memory error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

from verl_memopt.memory.knob import Claim, Knob, LadderRow, Range, Refusal, UnusedKey, num_devices
from verl_memopt.memory.lora import SLOT_RANKS, base_rests_as_computed
from verl_memopt.memory.precision import width

if TYPE_CHECKING:
    from verl_memopt.config.schema import ActorRolloutRef, Settings

KEY = "actor_rollout_ref.rollout.share_weights"
_ENGINE, _DTYPE, _LEVEL, _LOAD = (f"actor_rollout_ref.rollout.{name}" for name in ("name", "dtype", "sleep_level", "load_format"))
_SPLIT = "actor_rollout_ref.actor.fsdp_config.split_master_weights"
_RANK = "actor_rollout_ref.model.lora_rank"
_TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_MASTERS, _COMPUTE, _OFFLOAD, _NATIVE = (
    f"actor_rollout_ref.actor.fsdp_config.{name}" for name in ("model_dtype", "dtype", "param_offload", "offload_policy")
)
CHOICE = Range("must be true, false or auto", lambda value: value in (True, False, "auto"))


@dataclass(frozen=True)
class SharedWeights:
    share_weights: Annotated[bool | str, CHOICE] = "auto"
    """Let the trainer compute with the engine's own parameters: one copy of the weights on the device, and no weight sync. On
    several devices, each with an engine, a sync copies to each device the rows that other devices have updated. auto = true with
    ``name=vllm`` where results stay the same and no phase holds more memory, and with any engine and number of devices if the
    base under adapters is quantised. The log says whether auto shares, and if not, why. true = an error where sharing is
    impossible."""


@dataclass(frozen=True)
class Obstacle:
    keys: tuple[str, ...]
    """Keys that the error names."""
    when: Callable[[ActorRolloutRef, int], bool]
    """Return whether this obstacle exists, from the roles and the number of devices."""
    because: str
    way_out: str


OBSTACLES = (
    Obstacle(
        (_TENSOR_PARALLEL,),
        lambda roles, _: roles.rollout.tensor_model_parallel_size > 1,
        "a tensor-parallel engine has a part of each weight on each device, and the trainer computes with whole weights",
        f"Set {_TENSOR_PARALLEL}=1",
    ),
    Obstacle(
        (_RANK,),
        lambda roles, _: roles.rollout.name == "vllm" and roles.model.lora_rank > SLOT_RANKS[-1],
        f"vLLM has room for adapters up to rank {SLOT_RANKS[-1]}",
        f"Set {_RANK}={SLOT_RANKS[-1]}",
    ),
    Obstacle(
        (_DTYPE, _COMPUTE),
        lambda roles, _: roles.rollout.dtype != roles.actor.fsdp_config.dtype,
        "engine and trainer compute in different precisions",
        "Set both to the same",
    ),
    Obstacle(
        (_MASTERS, _COMPUTE),
        lambda roles, _: (
            roles.actor.fsdp_config.model_dtype != roles.actor.fsdp_config.dtype
            and not roles.actor.fsdp_config.split_master_weights
            and not base_rests_as_computed(roles.model.lora_rank, roles.actor.fsdp_config, whole=True)
        ),
        "the trainer's master weights rest in another precision than that of compute",
        f"Set {_SPLIT}=true, or {_MASTERS} to the precision of compute,",
    ),
    Obstacle(
        (_NATIVE,),
        lambda roles, _: roles.actor.fsdp_config.offload_policy,
        "the trainer's weights live on the host",
        f"Set {_NATIVE}=false",
    ),
    Obstacle(
        (_OFFLOAD,),
        lambda roles, _: bool(roles.actor.fsdp_config.param_offload),
        "the trainer's weights would leave the device, and so would the engine's",
        f"Set {_OFFLOAD}=false",
    ),
)
"""Reasons why weights cannot be shared. The first that exists is named."""


class ModelTraits(NamedTuple):
    """What of a model decides whether an engine can share its weights."""

    experts: bool = False
    """It has mixtures of experts."""
    states: bool = False
    """It has layers of linear attention."""
    packed: bool = False
    """Its folder stores experts in MXFP4."""


def why_not(roles: ActorRolloutRef, devices: int, sleeps: bool, model: ModelTraits | None = None) -> str | None:
    """Return why engine and trainer do not share weights under these settings, and the way out. None = they share them.

    An engine that changes its weights (by a quantisation of its own) cannot share them either, but that is known only once it
    runs.

    Args:
        roles: The settings.
        devices: Number of devices.
        sleeps: The engine sleeps outside of rollouts.
        model: The policy's model. None = one without any of these traits.
    """
    model = model or ModelTraits()
    if roles.rollout.share_weights is False:
        return f"{KEY}=false."
    for obstacle in OBSTACLES:
        if obstacle.when(roles, devices):
            return f"{obstacle.because} ({', '.join(obstacle.keys)}). {obstacle.way_out} to share them."
    if roles.rollout.name == "vllm" and model.experts:
        return f"vLLM keeps tensors that it derives from experts. Set {_ENGINE}=hf to share them."
    if roles.rollout.name == "vllm" and model.states and roles.model.lora_rank:
        return f"vLLM has no adapters for layers of linear attention, so it gets merged weights. Set {_ENGINE}=hf to share them."
    # A base in few bits. A second copy in the engine would be a decoded one.
    short = roles.model.lora_rank > 0 and (model.packed or roles.model.quantization != "none")
    if short and roles.rollout.load_format != "dummy":
        return f"the engine would decode the experts of the folder. Set {_LOAD}=dummy to share their bytes."
    if roles.rollout.name != "vllm" and roles.rollout.share_weights is not True and not short:
        return f"auto shares weights only with {_ENGINE}=vllm. Set {KEY}=true to share them."
    # A base in few bits must be shared: FSDP2 would shard its bytes, but an engine needs them whole.
    if devices > 1 and sleeps and not (short or roles.rollout.share_weights is True):
        return (
            f"an update would hold whole weights on each of {devices} devices, but only a shard if the engine sleeps. Set "
            f"{KEY}=true to share them: it saves a shard in rollouts, the copies that FSDP2 gathers, and most of the sync."
        )
    return None


def _is_refused(obstacle: Obstacle, settings: Settings) -> bool:
    roles = settings.actor_rollout_ref
    return roles.rollout.share_weights is True and obstacle.when(roles, num_devices(settings))


def bytes_a_parameter(roles: ActorRolloutRef, devices: int, shares: bool, sleeps: bool) -> dict[str, tuple[float, float]]:
    """Return bytes per parameter of weights, gradients and optimizer state: phase -> (on the devices, on the host).

    Not included are activations, copies that FSDP2 makes, and gradients of one or two blocks on their way to the host.

    Args:
        roles: The settings.
        devices: Number of devices of the run. Each holds a shard of the trainer's state and one engine. Shared weights are whole
            on each device.
        shares: Whether trainer and engine share the policy's weights.
        sleeps: Whether the engine sleeps outside of rollouts.
    """
    fsdp, optim = roles.actor.fsdp_config, roles.actor.optim
    split = fsdp.split_master_weights
    weight = width(fsdp.dtype if split else fsdp.model_dtype) * (devices if shares else 1)
    gradient = width(fsdp.mixed_precision.reduce_dtype if split else fsdp.model_dtype)
    state = optim.state_bytes(width(fsdp.model_dtype)) + 2 * split
    engine = 0 if shares else width(roles.rollout.dtype) * devices / roles.rollout.tensor_model_parallel_size
    native, freed = fsdp.offload_policy, not optim.in_backward
    off_state, off_gradient = native or fsdp.optimizer_offload, native or fsdp.grad_offload
    update = weight * (not native) + state * (not off_state) + gradient * freed * (not off_gradient)
    rests = bool(fsdp.param_offload) or native
    # The host buffer of offloaded parameters is kept while they are on the device.
    away = state * off_state + weight * rests
    asleep = engine * (sleeps and roles.rollout.sleep_level == 1)
    return {
        "update": (update + engine * (not sleeps), away + asleep + gradient * freed * off_gradient),
        "rollout": (engine + weight * (not rests) + state * (not off_state), away + gradient * fsdp.grad_offload),
    }


KNOB = Knob(
    cost="nothing",
    settings={"rollout": SharedWeights},
    same_numbers=True,
    refuses=tuple(
        Refusal((KEY, *obstacle.keys), partial(_is_refused, obstacle), obstacle.because, f"{obstacle.way_out}, or {KEY} to auto.")
        for obstacle in OBSTACLES
    ),
    unused_keys=(
        UnusedKey(
            _LEVEL, lambda settings: settings.actor_rollout_ref.rollout.share_weights is True, f"with {KEY} no weights sleep"
        ),
    ),
    claims=(Claim("update_weights", "rollout weights", lambda before, _: before.params * before.compute_bytes),),
    # Near the end, because it turns the policy's param_offload off again.
    row=LadderRow(198, on=(f"{KEY}=true", f"{_OFFLOAD}=false"), off=(f"{KEY}=false",)),
)
