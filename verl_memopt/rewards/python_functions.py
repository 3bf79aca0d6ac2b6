"""Reward functions given as Python objects, by :func:`verl_memopt.train` or TRL's trainers.

They are pickled into the run folder with cloudpickle: functions of a notebook, lambdas and closures with their code. They run in
the reward processes, like a function from a file, under time and memory limits. If such a function changes a variable of the
notebook, only the copy in the reward process changes.

The names of the arguments decide between three signatures:

- TRL's: ``f(prompts, completions, completion_ids, trainer_state, **columns)`` gets lists, and returns a list.
- verl's: ``f(data_source, solution_str, ground_truth, extra_info)``, or its plural for a whole batch.
- plain: ``f(answer)`` or ``f(answer, row)``, with the response as text and the row as a dict.

Each may be ``async def``, and may return None for a row to which it does not apply.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_memopt.errors import RewardError
from verl_memopt.model.given import write_classifier
from verl_memopt.observe.own_files import differs_from_name, is_there
from verl_memopt.observe.secrets import secrets_in
from verl_memopt.rewards.score import read_score
from verl_memopt.rewards.scorer import ARGUMENTS, BATCH_ARGUMENTS, is_async

logger = logging.getLogger(__name__)

FILE = "rewards.pkl"
"""File in a run's folder ``inputs/`` with its pickled functions."""
RM_SCORE = "rm_score"
"""Name of the reward model's score in the arguments of a reward function, and in the entries of a row."""
RM_SCORES = "rm_scores"
"""Name of the scores of all further reward models in the same places: a dict, name of the model -> its score."""
ENVIRONMENT_REWARD = "environment_reward"
"""Entry of a row's result with the reward that the environment of its conversation gave."""
TRL, VERL, VERL_BATCH, PLAIN = "TRL's", "verl's", "verl's for a batch", "plain"
Row = tuple[str, str, Any, dict[str, Any]]
"""data_source, response, ground truth, extra_info."""


@dataclass(frozen=True)
class NamedFunction:
    name: str
    weight: float
    kind: str
    function: Callable[..., Any]

    @classmethod
    def of(cls, name: str, function: Any, weight: float) -> NamedFunction:
        if not callable(function):
            raise RewardError(f"rewards: {function!r:.100} is not a function. Give a function, or a list of functions.")
        try:
            parameters = inspect.signature(function).parameters
        except ValueError as problem:
            raise RewardError(
                f"rewards: {name} has no signature ({problem}). Wrap it in a function of (answer, row)."
            ) from problem
        named = {parameter.name for parameter in parameters.values()}
        if named & {"completions", "prompts", "environments"}:
            return cls(name, weight, TRL, function)
        if "solution_strs" in named:
            return cls(name, weight, VERL_BATCH, function)
        if "solution_str" in named:
            return cls(name, weight, VERL, function)
        variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        needed = [
            parameter
            for parameter in parameters.values()
            if parameter.default is parameter.empty and parameter.kind not in variable
        ]
        taken = [
            parameter
            for parameter in parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        if not taken or len(needed) > 2:
            raise RewardError(
                f"rewards: {name}{inspect.signature(function)} is of no known kind. Define {name}(answer, row), TRL's "
                f"{name}(prompts, completions, **columns), or verl's {name}({', '.join(ARGUMENTS)})."
            )
        return cls(name, weight, PLAIN, function)

    @property
    def scores_batch(self) -> bool:
        return self.kind in (TRL, VERL_BATCH)

    def call(self, rows: Sequence[Row]) -> Any:
        """Call the function: with all rows if it takes a batch, else with the only row. An async function gives a coroutine."""
        if self.kind == VERL_BATCH:
            return self.function(**dict(zip(BATCH_ARGUMENTS, map(list, zip(*rows, strict=True)), strict=True)))
        if self.kind == TRL:
            return self._call_as_trl(rows)
        (row,) = rows
        if self.kind == VERL:
            return self.function(**dict(zip(ARGUMENTS, row, strict=True)))
        source, answer, truth, extra = row
        taken = inspect.signature(self.function).parameters.values()
        places = sum(parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in taken)
        if places == 1:
            return self.function(answer)
        return self.function(answer, {**extra, "data_source": source, "ground_truth": truth})

    def _call_as_trl(self, rows: Sequence[Row]) -> Any:
        logged: dict[str, Sequence[Any]] = {}
        arguments = _trl_arguments(rows) | {
            "log_extra": logged.__setitem__,
            "log_metric": lambda name, value: logged.__setitem__(name, [value] * len(rows)),
        }
        parameters = inspect.signature(self.function).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in parameters}
        given = self.function(**arguments)
        return _finished(given, logged) if inspect.isawaitable(given) else _with_logged(given, logged)


def _trl_arguments(rows: Sequence[Row]) -> dict[str, Any]:
    # As in TRL, a completion is a list of messages if its prompt is a list of messages.
    extras = [extra for *_, extra in rows]
    answers = [answer for _, answer, _, _ in rows]
    # A conversation of several turns has its own messages.
    chats = [
        extra.get("completion") or [{"role": "assistant", "content": text}] for text, extra in zip(answers, extras, strict=True)
    ]
    columns = {name: [extra.get(name) for extra in extras] for name in dict.fromkeys(name for extra in extras for name in extra)}
    for name in ("completion", "messages", "num_turns"):
        if "completion" in extras[0]:
            columns.pop(name, None)
    prompts = columns.pop("prompt")
    states: list[Any] = columns.pop("trainer_state")
    completions = [text if isinstance(prompt, str) else chat for prompt, text, chat in zip(prompts, answers, chats, strict=True)]
    return columns | {"prompts": prompts, "completions": completions, "trainer_state": SimpleNamespace(**states[0])}


async def _finished(given: Any, logged: Mapping[str, Sequence[Any]]) -> Any:
    return _with_logged(await given, logged)


def _with_logged(values: Any, logged: Mapping[str, Sequence[Any]]) -> Any:
    if not logged or not isinstance(values, Sequence):
        return values
    parts = [dict(zip(logged, part, strict=True)) for part in zip(*logged.values(), strict=True)]
    # Values that a function logs become further entries of its rows.
    return [value if value is None else {"score": value, **part} for value, part in zip(values, parts, strict=False)]


class ModelScore:
    """A reward function that returns the score of a reward model, which the workers have computed.

    ``further``: it is not the first of the reward models.
    """

    def __init__(self, name: str, further: bool = False) -> None:
        self.__name__, self.further = name, further

    def __call__(self, answer: str, row: Mapping[str, Any]) -> float:
        return float(row[RM_SCORES][self.__name__] if self.further else row[RM_SCORE])


def is_model(given: Any) -> bool:
    if isinstance(given, str | Path):
        text = str(given)
        return not (text.endswith(".py") or ".py:" in text) and ("/" in text or is_there(text))
    return hasattr(given, "save_pretrained")


def reward_settings(
    rewards: Any, weights: Sequence[float] | None, tokenizers: Sequence[Any] | None, inputs: Path
) -> dict[str, Any]:
    """Return the settings of the rewards of a call, by key, and write functions and models into ``inputs``.

    Args:
        rewards: Functions and reward models, or ``"file.py:function"``. None = score by rules.
        weights: One per reward. None = 1 each.
        tokenizers: One per reward. An entry is None for a function, or if the model's folder has the tokenizer. None = all None.
        inputs: Folder of a run for inputs from Python.

    Raises:
        RewardError: An entry is neither a function nor a model, or cannot be combined with the others.
    """
    if rewards is None:
        return {}
    if isinstance(rewards, str | Path) and not is_model(rewards):
        file, _, function = str(rewards).partition(".py:")
        named = {"custom_reward_function.name": function} if function else {}
        return {"custom_reward_function.path": f"{file}.py" if function else file, **named}
    functions = with_names(rewards)
    models = [name for name, reward in functions.items() if is_model(reward)]
    if not models:
        return save_functions(named_functions(functions, weights), inputs / FILE)
    given = dict(zip(functions, tokenizers or [None] * len(functions), strict=True))
    folders = {
        name: write_classifier(functions[name], given[name], inputs / f"reward_model{number or ''}")
        for number, name in enumerate(models)
    }
    first, *others = models
    settings: dict[str, Any] = {"reward_model.enable": True, "reward_model.model.path": folders[first]}
    if len(functions) == 1 and list(weights or [1.0]) == [1.0]:
        return settings
    if others:
        settings["reward_model.further_models"] = {name: folders[name] for name in others}
    scored = {name: ModelScore(name, name != first) if name in folders else reward for name, reward in functions.items()}
    return settings | save_functions(named_functions(scored, weights), inputs / FILE)


def with_names(rewards: Any) -> dict[str, Any]:
    """Return name -> reward for one reward, a list, or a mapping. A repeated name gets the suffix ``_2``, ``_3`` and so on."""
    if isinstance(rewards, Mapping):
        return dict(rewards)
    listed = isinstance(rewards, Iterable) and not callable(rewards) and not isinstance(rewards, str)
    named: dict[str, Any] = {}
    for reward in list(rewards) if listed else [rewards]:
        name, number = _name_of(reward), 1
        while (label := name if number == 1 else f"{name}_{number}") in named:
            number += 1
        named[label] = reward
    return named


def _name_of(reward: Any) -> str:
    if isinstance(reward, str | Path):
        return Path(reward).name
    if is_model(reward):
        return str(getattr(reward.config, "_name_or_path", "")).rpartition("/")[2] or type(reward).__name__
    return str(getattr(reward, "__name__", type(reward).__name__)).strip("<>")


def named_functions(rewards: Any, weights: Sequence[float] | None = None) -> list[NamedFunction]:
    named = list(with_names(rewards).items())
    if not named:
        raise RewardError("rewards: the list is empty. Give at least one function.")
    if weights is not None and len(weights) != len(named):
        raise RewardError(f"reward_weights: there are {len(weights)} weights for {len(named)} functions. Give one for each.")
    given = [1.0] * len(named) if weights is None else map(float, weights)
    return [NamedFunction.of(name, function, weight) for (name, function), weight in zip(named, given, strict=True)]


def save_functions(functions: Sequence[NamedFunction], path: Path) -> dict[str, Any]:
    """Pickle functions into a file, and return the settings that let the reward processes call them."""
    import cloudpickle

    path.parent.mkdir(parents=True, exist_ok=True)
    for function in functions:
        try:
            pickled = cloudpickle.dumps(function.function)
        except Exception as problem:  # objects pickle themselves, and may raise anything
            raise RewardError(
                f"rewards: {function.name} cannot be sent to the reward processes, because something that it uses cannot be "
                f"pickled ({type(problem).__name__}: {problem}). Create it inside the function, or put the function into a file "
                "and give custom_reward_function.path."
            ) from problem
        say_secrets(f"rewards: {function.name}", function.function, pickled, path)
    buffer = io.BytesIO()
    cloudpickle.dump(list(functions), buffer)
    path.write_bytes(buffer.getvalue())
    batch = any(function.scores_batch for function in functions)
    asynchronous = any(is_async(function.function) for function in functions)
    name = f"{'score_batch' if batch else 'score_row'}{'_async' if asynchronous else ''}"
    return {
        "custom_reward_function.path": __file__,
        "custom_reward_function.name": name,
        "custom_reward_function.reward_kwargs": {"functions": str(path)},
        "custom_reward_function.pass_rollout": True,
        **({"reward_model.reward_manager": "batch"} if batch else {}),
    }


def say_secrets(what: str, function: Any, pickled: bytes, path: Path) -> None:
    if found := secrets_in(function, pickled):
        logger.warning(
            "%s contains what looks like a secret (%s), which is stored in %s unencrypted. Read it inside the function, from "
            "os.environ or a file", what, ", ".join(found), path.name,
        )  # fmt: skip


# The reward processes call one of four functions: for a row or for a batch, plain or async.

_loaded: dict[str, list[NamedFunction]] = {}


def _functions(path: str) -> list[NamedFunction]:
    # The functions are unpickled only once per process, because this may load a model.
    if path not in _loaded:
        import pickle

        if differs_from_name(Path(path)):
            raise RewardError(f"rewards: {path} has other contents than were written. Start the run from Python again.")
        try:
            _loaded[path] = pickle.loads(Path(path).read_bytes())
        except Exception as problem:  # it imports what the functions use
            raise RewardError(
                f"rewards: {path} cannot be read ({type(problem).__name__}: {problem}). Start the run from Python again."
            ) from problem
    return _loaded[path]


def score_row(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], functions: str) -> Any:
    row, found = (data_source, solution_str, ground_truth, extra_info), _functions(functions)
    return _weighed(found, [function.call([row]) for function in found])


async def score_row_async(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], functions: str
) -> Any:
    row, found = (data_source, solution_str, ground_truth, extra_info), _functions(functions)
    return _weighed(found, await asyncio.gather(*(_awaited(function.call([row])) for function in found)))


def score_batch(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, functions: str) -> list[Any]:
    rows, found = list(zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)), _functions(functions)
    columns = [function.call(rows) if function.scores_batch else [function.call([row]) for row in rows] for function in found]
    return _weighed_rows(found, columns, len(rows))


async def score_batch_async(
    data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, functions: str
) -> list[Any]:
    rows, found = list(zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)), _functions(functions)

    async def column(function: NamedFunction) -> Any:
        if function.scores_batch:
            return await _awaited(function.call(rows))
        return await asyncio.gather(*(_awaited(function.call([row])) for row in rows))

    return _weighed_rows(found, await asyncio.gather(*map(column, found)), len(rows))


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _weighed_rows(functions: Sequence[NamedFunction], columns: Sequence[Any], num_rows: int) -> list[Any]:
    for function, column in zip(functions, columns, strict=True):
        if not hasattr(column, "__len__") or isinstance(column, str | dict):
            raise RewardError(f"{function.name} returned {column!r:.200}, not a list of scores")
        if len(column) != num_rows:
            raise RewardError(f"{function.name} returned {len(column)} scores for {num_rows} rows")
    return [_weighed(functions, values) for values in zip(*columns, strict=True)]


def _weighed(functions: Sequence[NamedFunction], values: Sequence[Any]) -> Any:
    """Return the weighted sum of the scores, with each score by name.

    A function that returned None does not count. If all functions returned None, the score of the row is None.
    """
    total = 0.0
    named: dict[str, float | None] = {}
    further: dict[str, Any] = {}
    for function, value in zip(functions, values, strict=True):
        try:
            score, extra = read_score(value)
        except RewardError as problem:
            raise RewardError(f"{function.name} {problem}") from problem
        named[function.name] = None if math.isnan(score) else score
        total += 0.0 if math.isnan(score) else function.weight * score
        further |= extra
    applies = any(value is not None for value in named.values())
    return {**further, **(named if len(functions) > 1 else {}), "score": total if applies else None}
