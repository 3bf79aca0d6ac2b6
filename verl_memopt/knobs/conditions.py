"""Groups of keys that the conditions of several knobs depend on, and what they mean together."""

from __future__ import annotations

LENGTHS = ("data.max_prompt_length", "data.max_response_length")
"""Their sum is the longest sample in tokens."""

DEVICES = ("trainer.nnodes", "trainer.n_gpus_per_node")
"""Their product is the number of devices of the run, which is also the number of ranks that share a batch."""

KL = ("algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss")
"""Either of them asks for a KL to the reference."""


def needs_reference(use_kl_in_reward: bool, use_kl_loss: bool) -> bool:
    """Return whether the run needs the log-probs of a reference.

    Args:
        use_kl_in_reward: the reward has a KL to the reference.
        use_kl_loss: the loss has one.
    """
    return use_kl_in_reward or use_kl_loss
