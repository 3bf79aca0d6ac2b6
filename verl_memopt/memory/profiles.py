"""Set many knobs with one name: for your card's size, for a model that barely fits, or for many devices.

Use it when: you start on a new machine. Take the profile of your card's size (``memory=24g``). If a model does not fit, begin
    with ``memory=constrained``.
Saves: what the keys of the profile save. A run logs these keys, and ``verl-memopt train memory=constrained --cfg job`` prints
    them.
Costs: what these keys cost.
Works with: every recipe and every key. A key on the command line overrides the profile. On one device, a profile that offloads
    weights keeps one copy of them on the device instead: it sets ``rollout.share_weights`` without ``param_offload``, and also
    ``split_master_weights`` and ``grad_offload`` if all weights are trained. With LoRA it does so on each of several devices. On
    one device it streams the reference: ``ref.fsdp_config.param_offload=stream``.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from verl_memopt.errors import ConfigError
from verl_memopt.memory import grad_offload, shared_weights, split_masters, streamed_params
from verl_memopt.memory.cards import CARDS, check_card, gigabytes, names_card
from verl_memopt.memory.critic_rules import has_critic, twin, twin_refusal
from verl_memopt.memory.knob import Knob, devices_of, has_own_teacher, needs_reference, num_devices
from verl_memopt.memory.param_offload import ACTOR_KEY, REFERENCE_KEY, STREAM, TEACHER_KEY

if TYPE_CHECKING:
    from verl_memopt.config.role_settings import TrainedFsdp
    from verl_memopt.config.schema import Settings

PROFILES = ("constrained", "balanced", "large_multi_gpu", *CARDS)
"""The profiles named after a size are for one card of so many GB. The file of each says which models fit."""


def profile_named(name: str) -> str:
    """Return the profile for a name, which is the name of a profile or a card size that :func:`gigabytes` can parse.

    Raises:
        ConfigError: No profile is for a card of that size.
    """
    if name in PROFILES or not names_card(name):
        return name
    try:
        number = gigabytes(name)
    except ValueError as error:
        raise ConfigError(f"{error}.") from error
    check_card(number)
    if (card := f"{number:g}g") in CARDS:
        return card
    smaller = [card_size for card_size in CARDS if gigabytes(card_size) < number]
    instead = f" memory={smaller[-1]} memory.card_gb={number:g} is for yours." if smaller else ""
    raise ConfigError(f"no profile is for a card of that size. Choose one of {', '.join(CARDS)}.{instead}")


KNOB = Knob(cost="what its keys cost", besides=tuple(f"memory={name}" for name in PROFILES))


SETTLED = (
    *(ACTOR_KEY, grad_offload.KEY, split_masters.KEY, shared_weights.KEY, REFERENCE_KEY, TEACHER_KEY),
    *(twin(grad_offload.KEY), twin(split_masters.KEY)),
)
"""Keys whose values :func:`one_copy` and :func:`streamed` settle, from the other keys of a run."""


def one_copy(settings: Settings, written: Set[str]) -> dict[str, object]:
    """Return the keys that replace ``param_offload`` in a profile where one device can hold all weights: key -> value.

    Trainer and engine then share one copy of the weights, which stays on the device; everything else rests on the host. With
    adapters this is also done on each of several devices, because the sync to an engine with its own copy would set the memory
    peak. The result is empty where sharing is impossible, or where the user has ``written`` one of the keys. ``settings`` include
    the profile's keys.
    """
    roles = settings.actor_rollout_ref
    fsdp = roles.actor.fsdp_config
    adapts, quantized = roles.model.lora_rank > 0, roles.model.quantization != "none"
    several, shares = num_devices(settings) > 1, roles.rollout.name == "vllm" or (adapts and quantized)
    if (several and not adapts) or not fsdp.param_offload:
        return {}
    must = several and quantized  # FSDP2 cannot shard the base
    if adapts and (not shares or (has_critic(settings) and not must)):
        return {}  # sharing a frozen base saves little, and a critic has more room if the base leaves the device
    keys: dict[str, object] = {ACTOR_KEY: False}
    if not adapts:  # with adapters, gradients and masters are small
        keys |= {grad_offload.KEY: True, split_masters.KEY: _has_remainder(fsdp)}
    if not shares or several:  # with vLLM or a quantised base on one device, sharing is the default
        keys[shared_weights.KEY] = True
    if has_critic(settings) and not settings.critic.model.lora_rank and devices_of(settings, "critic") == 1:
        critic = settings.critic.model.fsdp_config
        keys |= {twin(grad_offload.KEY): True, twin(split_masters.KEY): _has_remainder(critic)}
    return {} if keys.keys() & written else keys


def streamed(settings: Settings, written: Set[str]) -> dict[str, object]:
    """Return the keys that make reference and teacher stream, where a profile offloads them and they can stream: key -> value.

    With the profiles' micro-batches a block computes for about as long as the next one takes to arrive. So streaming takes no
    longer than copying the whole model before its phase, and it needs less memory on device and host.
    """
    rests = {
        REFERENCE_KEY: settings.actor_rollout_ref.ref.fsdp_config.param_offload is True and needs_reference(settings),
        TEACHER_KEY: settings.teacher.fsdp_config.param_offload is True and has_own_teacher(settings),
    }
    may = {key: key not in written and streamed_params.may_stream(key)(settings) for key in rests}
    return {key: STREAM for key in rests if rests[key] and may[key]}


def _has_remainder(fsdp: TrainedFsdp) -> bool:
    return (fsdp.model_dtype, fsdp.dtype) == ("fp32", "bfloat16")


def can_be(settings: Settings) -> bool:
    """Whether no knob of :func:`one_copy` refuses these settings, and trainer and engine can share their weights."""
    refuses = [refusal for knob in (grad_offload, split_masters) for refusal in knob.KNOB.refuses]
    if has_critic(settings):  # a critic has these two knobs, but never shares weights with an engine
        refuses += [twin_refusal(refusal) for refusal in refuses]
    refused = any(refusal.when(settings) for refusal in (*refuses, *shared_weights.KNOB.refuses))
    return not refused and shared_weights.why_not(settings.actor_rollout_ref, num_devices(settings), sleeps=True) is None
