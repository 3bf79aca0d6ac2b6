"""Groups of keys that the conditions of several knobs depend on, and what they mean together."""

from __future__ import annotations

LENGTHS = ("data.max_prompt_length", "data.max_response_length")
"""Their sum is the longest sample in tokens."""

DEVICES = ("trainer.nnodes", "trainer.n_gpus_per_node")
"""Their product is the number of devices of the run, which is also the number of ranks that share a batch."""

WITH_CRITIC = ("gae",)
"""Values of ``algorithm.adv_estimator`` that read the values of a critic. With any other no critic is built."""

WITHOUT_GROUPS = (*WITH_CRITIC, "reinforce_plus_plus", "remax")
"""Values of ``algorithm.adv_estimator`` that do not compare the responses to one prompt, so that a single one is enough."""

WITHOUT_BASELINE = ("rloo", "rloo_vectorized", "grpo", "grpo_vectorized")
"""Values that take the reward itself as advantage where each prompt has a single response, as verl does."""

LOSSES_OF_SEQUENCES = ("sequence", "gspo", "geo_mean")
"""Values of ``actor.policy_loss.loss_mode`` with one ratio per sequence: a token's gradient depends on its whole sequence."""

KL = ("algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss")
"""Either of them asks for a KL to the reference."""


def needs_reference(use_kl_in_reward: bool, use_kl_loss: bool) -> bool:
    """Return whether the run needs the log-probs of a reference.

    Args:
        use_kl_in_reward: the reward has a KL to the reference.
        use_kl_loss: the loss has one.
    """
    return use_kl_in_reward or use_kl_loss
