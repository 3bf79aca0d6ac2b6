"""The reward function of a run: the user's own, loaded from a file, or the rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from verl_memopt.data.plugin import load_from_file
from verl_memopt.errors import RewardError
from verl_memopt.rewards.rules import score_batch_by_rule, score_by_rule
from verl_memopt.rewards.sandbox import Sandbox, rules_with_sandbox

RewardFunction = Callable[..., Any]
"""Called with the arguments of one row by name. Returns a number, or a dict with ``score``; a coroutine of it if ``async``.

A function for a whole batch is called with the lists of the arguments, and returns a list.
"""

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Arguments of a function that scores one row."""

BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""Arguments of a function that scores a whole batch."""


def load_reward_function(
    path: str | None, name: str, reward_kwargs: Mapping[str, Any], whole_batch: bool = False, sandbox: Sandbox | None = None
) -> RewardFunction:
    """Return the reward function, with its keyword arguments bound.

    Args:
        path: The user's Python file. None = the rules.
        name: The function in it.
        reward_kwargs: Further keyword arguments for every call.
        whole_batch: The function scores all rows in one call.
        sandbox: The service that runs programs for the rules. None = there is none.

    Raises:
        RewardError: The file or the function is missing, or the function does not accept the arguments.
    """
    if path is None and sandbox is not None:
        return rules_with_sandbox(sandbox, whole_batch)
    if path is None:
        return score_batch_by_rule if whole_batch else score_by_rule
    function = load_from_file(path, name, key="custom_reward_function.path", error=RewardError)
    if not callable(function):
        raise RewardError(f"custom_reward_function.name={name}: the object in {path} is not a function. Name a function.")
    _check_signature(function, path, name, reward_kwargs, BATCH_ARGUMENTS if whole_batch else ARGUMENTS)
    return partial(function, **reward_kwargs)


def _check_signature(
    function: RewardFunction, path: str, name: str, reward_kwargs: Mapping[str, Any], arguments: tuple[str, ...]
) -> None:
    clash = sorted(set(reward_kwargs) & set(arguments))
    if clash:
        passed = "is passed for each row already" if arguments is ARGUMENTS else "is passed with each call already"
        raise RewardError(f"custom_reward_function.reward_kwargs: {', '.join(clash)} {passed}. Remove it.")
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(arguments), **reward_kwargs)
    except TypeError as problem:
        expected = f"{name}({', '.join([*arguments[:3], f'{arguments[3]}=None', *(f'{key}=None' for key in reward_kwargs)])})"
        manager = "" if arguments is ARGUMENTS else " for reward_model.reward_manager=batch"
        raise RewardError(
            f"custom_reward_function.name={name}: {path} defines {name}{signature}, which does not accept the arguments of a "
            f"reward function{manager} ({problem}). Define {expected}."
        ) from problem
