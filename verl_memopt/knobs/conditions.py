"""Facts about settings that the conditions of several knobs ask for."""

from __future__ import annotations

from typing import Any

LENGTHS = ("data.max_prompt_length", "data.max_response_length")


def world_size(settings: Any) -> int:
    """Return the number of devices of the run, which is also the number of ranks that share a batch."""
    return int(settings.trainer.nnodes * settings.trainer.n_gpus_per_node)


def needs_reference(settings: Any) -> bool:
    """Return whether a KL to the reference is asked for anywhere."""
    return bool(settings.algorithm.use_kl_in_reward or settings.actor_rollout_ref.actor.use_kl_loss)


def trained_roles(settings: Any) -> tuple[str, ...]:
    """Return the roles whose models are built: the actor, and the reference where there is a KL."""
    return ("actor", "ref") if needs_reference(settings) else ("actor",)
