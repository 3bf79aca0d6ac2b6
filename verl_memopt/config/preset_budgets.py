"""Token budgets of memory profiles that make room for the longest sample of a run.

A profile cannot know a run's lengths. A sample is never split, so a budget below the longest sample cannot be kept anyway: it
becomes the length of that sample, and a log line says so. A budget that the user wrote stays, and is refused if it is too small.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from typing import Any

from verl_memopt.config.keys import value_at
from verl_memopt.config.schema import Settings

logger = logging.getLogger(__name__)

LENGTHS = ("data.max_prompt_length", "data.max_response_length")
BUDGETS = (
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
)
"""Tokens of a micro-batch, as profiles set them."""


def with_room_for_samples(values: Mapping[str, Any], of_presets: Set[str]) -> dict[str, Any]:
    """Return the settings with the budgets of presets raised to the longest sample that the lengths allow.

    Args:
        values: Dotted key -> value, of the keys that are set.
        of_presets: Keys whose value is a preset's.
    """
    lengths = [values.get(key, value_at(Settings(), key)) for key in LENGTHS]
    if not all(isinstance(length, int) for length in lengths):
        return dict(values)  # reported elsewhere
    longest = sum(lengths)
    raised = {key: longest for key in BUDGETS if key in of_presets and values[key] < longest}
    critic_only = raised.keys() <= {BUDGETS[-1]}
    if raised and not critic_only:
        logger.warning(
            "the profile's budget of %d tokens is raised to %d, the longest sample (%s + %s), so the run needs more memory than "
            "the profile's file says. Lower the lengths to keep its figures",
            min(values[key] for key in raised), longest, *LENGTHS,
        )  # fmt: skip
    return {**values, **raised}
