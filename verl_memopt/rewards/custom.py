"""The reward function of a run: the user's own, loaded from a file, or the rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from verl_memopt.data.plugin import load_from_file
from verl_memopt.errors import RewardError
from verl_memopt.rewards.rules import score_by_rule

RewardFunction = Callable[..., Any]
"""Called with data_source, solution_str, ground_truth, extra_info by name. Returns a number, or a dict with ``score``."""

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(path: str | None, name: str, reward_kwargs: Mapping[str, Any]) -> RewardFunction:
    """Return the reward function, with its keyword arguments bound.

    Args:
        path: The user's Python file. None = the rules.
        name: The function in it.
        reward_kwargs: Further keyword arguments for every call.

    Raises:
        RewardError: The file or the function is missing, or the function does not accept the arguments.
    """
    if path is None:
        return score_by_rule
    function = load_from_file(path, name, key="custom_reward_function.path", error=RewardError)
    if not callable(function):
        raise RewardError(f"custom_reward_function.name={name}: the object in {path} is not a function. Name a function.")
    _check_signature(function, path, name, reward_kwargs)
    return partial(function, **reward_kwargs)


def _check_signature(function: RewardFunction, path: str, name: str, reward_kwargs: Mapping[str, Any]) -> None:
    clash = sorted(set(reward_kwargs) & set(ARGUMENTS))
    if clash:
        raise RewardError(f"custom_reward_function.reward_kwargs: {', '.join(clash)} is passed for each row already. Remove it.")
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **reward_kwargs)
    except TypeError as problem:
        expected = f"{name}({', '.join([*ARGUMENTS[:3], 'extra_info=None', *(f'{key}=None' for key in reward_kwargs)])})"
        raise RewardError(
            f"custom_reward_function.name={name}: {path} defines {name}{signature}, which does not accept the arguments of a "
            f"reward function ({problem}). Define {expected}."
        ) from problem
