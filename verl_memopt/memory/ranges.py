"""What settings may hold and what several of them mean together: ranges of numbers, and questions that many rules ask.

A number with a range is ``Annotated[type, Range]``, read by the check of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:
    from verl_memopt.config.schema import ActorRolloutRef, Fsdp, Settings

DEVICES = ("trainer.nnodes", "trainer.n_gpus_per_node")
"""The keys behind :func:`num_devices`."""

KL = ("algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss")
"""The keys behind :func:`needs_reference`."""


def num_devices(settings: Settings) -> int:
    """Return the devices of the run, which is also the number of ranks that share a batch."""
    return settings.trainer.nnodes * settings.trainer.n_gpus_per_node


def fsdp_of(settings: Settings, role: Literal["actor", "ref"]) -> Fsdp:
    """Return how a role is sharded."""
    roles = settings.actor_rollout_ref
    return roles.actor.fsdp_config if role == "actor" else roles.ref.fsdp_config


SequenceRole = Literal["actor", "ref", "critic", "reward_model"]


def sequence_ranks(settings: Settings, role: SequenceRole) -> int:
    """Return the devices that share the tokens of a micro-batch of a role."""
    if role == "critic":
        return settings.critic.model.fsdp_config.sequence_ranks
    if role == "reward_model":
        return settings.reward_model.model.fsdp_config.sequence_ranks
    roles = settings.actor_rollout_ref
    return roles.actor.fsdp_config.sequence_ranks if role == "actor" else reference_ranks(roles)


def reference_ranks(roles: ActorRolloutRef) -> int:
    """Return the devices that share the tokens of a micro-batch of the reference. With LoRA the policy is the reference."""
    return (roles.actor if roles.model.lora_rank > 0 else roles.ref).fsdp_config.sequence_ranks


def data_ranks(settings: Settings, role: SequenceRole) -> int:
    """Return the groups of devices that share a batch of a role: each gets rows of its own. At least one."""
    return max(num_devices(settings) // sequence_ranks(settings, role), 1)


def uneven_shards(settings: Settings, fsdp: Fsdp) -> bool:
    """Return whether the devices do not divide into shard groups. A size below 1 is all devices, or reported elsewhere."""
    return fsdp.fsdp_size > 0 and num_devices(settings) % fsdp.fsdp_size != 0


def longest_sample(settings: Settings) -> int:
    """Return the tokens of the longest sample."""
    return settings.data.max_prompt_length + settings.data.max_response_length


def needs_reference(settings: Settings) -> bool:
    """Return whether a KL asks for the log-probs of a reference."""
    in_reward, in_loss = settings.algorithm.use_kl_in_reward, settings.actor_rollout_ref.actor.use_kl_loss
    return in_reward or in_loss


@dataclass(frozen=True)
class Range:
    """What a number must be."""

    text: str
    """The end of the sentence "the value ..."."""
    holds: Callable[[Any], bool]
    """Return whether a value, which is not None, is in the range."""


@dataclass(frozen=True)
class Words:
    """The words that a key takes, or each item of its list, where its type does not say so."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Meanings:
    """What each word of a choice means, for the page of settings."""

    of: tuple[tuple[str, str], ...]
    """(word, meaning)."""


POSITIVE = Range("must be above 0", lambda value: value > 0)
NOT_NEGATIVE = Range("must not be negative", lambda value: value >= 0)
MINUS_ONE_OR_POSITIVE = Range("must be above 0, or -1", lambda value: value > 0 or value == -1)
MINUS_ONE_OR_MORE = Range("must not be negative, except -1", lambda value: value >= -1)
SHARE = Range("must lie between 0 and 1", lambda value: 0 <= value <= 1)
POSITIVE_SHARE = Range("must be above 0 and at most 1", lambda value: 0 < value <= 1)

PositiveInt = Annotated[int, POSITIVE]
PositiveFloat = Annotated[float, POSITIVE]
NaturalInt = Annotated[int, NOT_NEGATIVE]
"""A whole number from 0 up."""
NaturalFloat = Annotated[float, NOT_NEGATIVE]
"""A number from 0 up."""
CountOrMinusOne = Annotated[int, MINUS_ONE_OR_POSITIVE]
Share = Annotated[float, SHARE]
PositiveShare = Annotated[float, POSITIVE_SHARE]
