"""Suggest a key for an unknown one: the nearest known key, or the one that does what a key of TRL or of a recipe does."""

from __future__ import annotations

from difflib import SequenceMatcher

from verl_memopt.config.keys import leaf_keys
from verl_memopt.config.trl_spellings import ESTIMATORS, SPELLINGS
from verl_memopt.knobs.knob import knobs
from verl_memopt.recipes.registry import RECIPES

_AR = "actor_rollout_ref"


def _of_trl() -> dict[str, str]:
    """Return name of TRL -> our keys, of all names that a recipe of RLOO or GRPO reads."""
    keys: dict[str, list[str]] = {}
    for spelling in SPELLINGS:
        for name in spelling.names:
            keys.setdefault(name, []).append(" with ".join(spelling.keys))
    return {name: ", or ".join(dict.fromkeys(settings)) for name, settings in keys.items()}


READ = _of_trl()
"""The names of TRL that are read as our keys where they stand alone and the estimator is RLOO's or GRPO's."""

FOREIGN = {
    **READ,
    **{name: key for recipe in RECIPES.values() for name, key in recipe.equals.items()},
    "generation_aggregation_steps": "data.train_batch_size (a whole step is generated at once)",
    "missing_eos_penalty": "custom_reward_function.path (the penalty belongs in the reward function)",
    "reward_clip_range": "custom_reward_function.path (the clip belongs in the reward function)",
    "reward_funcs": "custom_reward_function.path",
    "vllm_mode": f"{_AR}.rollout.name (the engine always lives in the worker's process)",
    "use_vllm_server": f"{_AR}.rollout.name (the engine always lives in the worker's process)",
    "use_ray": "trainer.worker_group",
    "save_completions_probability": "trainer.rollout_data_dir",
    **{name: key for knob in knobs() for name, key in knob.known_as.items()},
}
"""Key of TRL or of a recipe -> what to set here."""

_ALIKE = 0.6
"""Share of letters in common, of the last part of a key, from which a key counts as near."""


def hint(key: str) -> str:
    """Return a sentence that names what to use in place of an unknown key."""
    answer = FOREIGN.get(key.rpartition(".")[2]) or nearest(key)
    if not answer:
        return "docs/configuration.md lists every key."
    by_estimator = f" With algorithm.adv_estimator={' or '.join(ESTIMATORS)} this name is read as that." if key in READ else ""
    return f"Did you mean {answer}?{by_estimator}"


def nearest(key: str) -> str | None:
    """Return the known key most like an unknown one, by its last part first, then by the whole, or None."""
    last = key.rpartition(".")[2]
    likeness = {known: _alike(last, known.rpartition(".")[2]) for known in leaf_keys()}
    near = [known for known in likeness if likeness[known] >= _ALIKE]
    return max(near, key=lambda known: 2 * likeness[known] + _alike(key, known), default=None)


def _alike(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()
