"""The reward function that a run uses: the user's, from a file, or the rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from verl_memopt.data.plugin import load_from_file
from verl_memopt.errors import RewardError
from verl_memopt.rewards.rules import score_by_rule

RewardFunction = Callable[..., Any]
"""Called with data_source, solution_str, ground_truth, extra_info by name; gives a number, or a dict with ``score``."""

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(path: str | None, name: str, reward_kwargs: Mapping[str, Any]) -> RewardFunction:
    """The function ``name`` of the file ``path`` with ``reward_kwargs`` bound, or the rules when ``path`` is None.

    Raises RewardError when the file or the function is missing, or the function does not take the arguments.
    """
    if path is None:
        return score_by_rule
    function = load_from_file(path, name, key="custom_reward_function.path", error=RewardError)
    if not callable(function):
        raise RewardError(f"custom_reward_function.name={name}: {path} has it, but it is no function. Name a function.")
    _check_signature(function, path, name, reward_kwargs)
    return partial(function, **reward_kwargs)


def _check_signature(function: RewardFunction, path: str, name: str, reward_kwargs: Mapping[str, Any]) -> None:
    clash = sorted(set(reward_kwargs) & set(ARGUMENTS))
    if clash:
        raise RewardError(f"custom_reward_function.reward_kwargs: {', '.join(clash)} is given for each row. Leave it out.")
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **reward_kwargs)
    except TypeError as problem:
        wanted = f"{name}({', '.join([*ARGUMENTS[:3], 'extra_info=None', *(f'{given}=None' for given in reward_kwargs)])})"
        raise RewardError(
            f"custom_reward_function.name={name}: {path} defines {name}{signature}, which cannot be called as it will be "
            f"({problem}). Define {wanted}."
        ) from problem
