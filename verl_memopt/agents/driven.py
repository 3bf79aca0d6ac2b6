"""What agent loops ask of the engine, and which of the tokens that they return are what it sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_memopt.agents.conversation import Turn
from verl_memopt.rollout.engine import Output, SamplingSettings


@dataclass
class Request:
    number: int
    """The agent loop's number of it."""
    prompt_ids: list[int]
    sampling: SamplingSettings
    output: Output | None = None
    """None = it is under way."""


class UnknownTokensError(Exception):
    """An agent loop returned what the update cannot learn. The text says why."""


def sampling_params(sampling: SamplingSettings) -> dict[str, Any]:
    """Return the sampling settings of a run in vLLM's names."""
    return {
        "temperature": sampling.temperature if sampling.do_sample else 0.0,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": sampling.log_probs,
    }


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**31


_RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: _is_number(value) and value >= 0, "a number of at least 0"),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "above 0 and at most 1"),
    "top_k": (lambda value: _is_whole(value) and value >= -1, "a whole number, -1 = off"),
    "min_p": (lambda value: _is_number(value) and 0 <= value <= 1, "between 0 and 1"),
    "repetition_penalty": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "max_tokens": (lambda value: _is_whole(value) and value > 0, "a whole number above 0"),
    "ignore_eos": (lambda value: isinstance(value, bool), "true or false"),
    "stop": (lambda value: isinstance(value, list) and all(isinstance(text, str) and text for text in value), "a list of texts"),
    "stop_token_ids": (lambda value: isinstance(value, list) and all(_is_whole(token) and token >= 0 for token in value), "ids"),
}  # fmt: skip
_IGNORED = {"logprobs", "n", "seed", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"}
"""Parameters that change nothing here: each request has one response, with the log-probs and the seed of the run."""


def request_sampling(given: Mapping[str, Any], base: SamplingSettings) -> SamplingSettings:
    """Return the sampling settings of a request.

    Args:
        given: Parameters in vLLM's names. None = as in the run.
        base: The settings of the run.

    Raises:
        ValueError: A parameter is unknown or out of range.
    """
    changes = {
        "max_tokens" if name == "max_new_tokens" else name: value
        for name, value in given.items()
        if name not in _IGNORED and value is not None
    }
    if isinstance(changes.get("stop"), str):
        changes["stop"] = [changes["stop"]]
    for name, value in changes.items():
        if name not in _RANGES:
            raise ValueError(f"the sampling parameter {name!r:.50} is not supported; use {', '.join(_RANGES)}")
        fits, words = _RANGES[name]
        if not fits(value):
            raise ValueError(f"the sampling parameter {name}={value!r:.50} must be {words}")
    if changes.get("top_k") == 0:
        changes["top_k"] = -1
    if "temperature" in changes:
        changes["do_sample"] = changes["temperature"] > 0
        if not changes["do_sample"]:
            changes["temperature"] = base.temperature
    for name, more in (("stop", base.stop), ("stop_token_ids", base.stop_token_ids)):
        if name in changes:
            changes[name] = tuple(dict.fromkeys([*changes[name], *more]))
    return replace(base, **{**changes, "max_tokens": min(changes.get("max_tokens", base.max_tokens), base.max_tokens)})


def _distribution(sampling: SamplingSettings) -> tuple[Any, ...]:
    return (
        sampling.do_sample, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty
    )  # fmt: skip


def turns_of(
    sequences: Sequence[tuple[list[int], list[int]]],
    requests: Sequence[Request],
    sampling: SamplingSettings,
    prompt_length: int,
    response_length: int,
) -> tuple[list[Turn], bool]:
    """Return the turns that the update learns, and whether the last one is whole.

    A turn is a run of tokens that the agent loop calls sampled, and that the engine sampled after exactly the tokens before it.
    The end of a response may be cut off. A response that several sequences contain is one turn.

    Args:
        sequences: Token ids, and for each 1 if the agent loop says that the engine sampled it.
        requests: The requests of the conversation.
        sampling: The settings of the run.
        prompt_length: Largest number of tokens before the first sampled one.
        response_length: Largest number of tokens from there on.

    Raises:
        UnknownTokensError: The engine did not sample the tokens there, or not from the distribution that the run learns.
    """
    found: dict[int, Turn] = {}
    is_whole = True
    for ids, sampled in sequences:
        if len(ids) != len(sampled) or set(sampled) - {0, 1}:
            raise UnknownTokensError("run returned a mask that does not fit to its tokens")
        first = sampled.index(1) if 1 in sampled else len(ids)
        if first > prompt_length:
            raise UnknownTokensError(
                f"run returned {first} tokens before the first sampled one; prompt_length is {prompt_length}"
            )
        if len(ids) - first > response_length:
            raise UnknownTokensError(
                f"run returned {len(ids) - first} tokens from the first sampled one on; response_length is {response_length}"
            )
        place = first
        while place < len(ids):
            if not sampled[place]:
                place += 1
                continue
            end = next((at for at in range(place, len(ids)) if not sampled[at]), len(ids))
            number, length = _request_at(ids, place, end, requests, sampling)
            output = requests[number].output
            assert output is not None
            if number not in found or length > len(found[number].output_ids):
                log_probs = None if output.log_probs is None else output.log_probs[:length]
                routes = None if output.routes is None else output.routes[: place + length - 1]
                found[number] = Turn(ids[:place], output.response_ids[:length], log_probs, routes)
            place += length
            is_whole = length == len(output.response_ids) and output.finish_reason != "length"
    return [found[number] for number in sorted(found)], is_whole


def _request_at(ids: list[int], place: int, end: int, requests: Sequence[Request], sampling: SamplingSettings) -> tuple[int, int]:
    """Return the request that sampled ``ids[place:end]`` or its beginning, and how many of the tokens."""
    best = (-1, 0)
    for number, request in enumerate(requests):
        if request.output is None or len(request.prompt_ids) != place or request.prompt_ids != ids[:place]:
            continue
        length = min(len(request.output.response_ids), end - place)
        if length > best[1] and request.output.response_ids[:length] == ids[place : place + length]:
            best = number, length
    number, length = best
    if not length:
        raise UnknownTokensError(
            f"run returned tokens from position {place} on that the engine did not sample there. Mask with 0 what it did not "
            "sample, and return the ids that it read and sampled, unchanged"
        )
    if _distribution(requests[number].sampling) != _distribution(sampling):
        raise UnknownTokensError(
            f"run returned tokens from position {place} on that were sampled with other parameters than those of the run, which "
            "the update cannot learn. Mask them with 0, or pass on the sampling_params that run gets"
        )
    return number, length
