"""How far the engine's log-probs may be from the trainer's."""

from __future__ import annotations

from verl_memopt.config.schema import ActorRolloutRef
from verl_memopt.models.policy_model import dtype_of

LIMIT_FP32 = 1e-3
LIMIT_HALF = 0.2
LIMIT_FP8_CACHE = 1.0
"""Mean nats. How they were found: docs/decisions/log_prob_agreement.md."""


def log_prob_limit(settings: ActorRolloutRef) -> float | None:
    """Return the largest mean difference in nats that ``rollout.max_logprob_diff`` allows; None for any.

    Its ``auto`` follows the coarsest dtype among the engine's weights, its KV cache and the trainer's compute.
    """
    rollout = settings.rollout
    asked = rollout.max_logprob_diff
    if asked is None or isinstance(asked, float):
        return asked
    assert asked == "auto", asked
    if rollout.kv_cache_dtype.startswith("fp8"):
        return LIMIT_FP8_CACHE
    names = [rollout.dtype, settings.actor.fsdp_config.dtype, settings.actor.fsdp_config.model_dtype]
    names += [rollout.kv_cache_dtype] if rollout.kv_cache_dtype != "auto" else []
    sizes = [dtype_of(name, "dtype").itemsize for name in names]
    return LIMIT_FP32 if min(sizes) == 4 else LIMIT_HALF
