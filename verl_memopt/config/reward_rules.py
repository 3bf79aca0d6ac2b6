"""Rewards: the combinations of settings that are refused, and the keys of models and of the sandbox service without effect."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from verl_memopt.config.keys import idle, leaf_types, other_than, refused, value_at
from verl_memopt.config.reward_limits import CASE_SECONDS, CASES, SANDBOX, URL
from verl_memopt.config.schema import POLICY_TOKENIZER, Settings
from verl_memopt.memory.knob import (
    Predicate,
    Refusal,
    Sentence,
    SequenceRole,
    UnusedKey,
    devices_of,
    for_devices,
    longest_sample,
    pool_keys,
    sequence_ranks,
    uneven_shards,
)

ENABLE, MANAGER = "reward_model.enable", "reward_model.reward_manager"
RLT = "rlt"
"""Value of ``reward_model.reward_manager`` with which a student scores explanations."""
RESIDENCY = "reward_model.residency"
FURTHER = "reward_model.further_models"
_MODEL, _FSDP = "reward_model.model", "reward_model.model.fsdp_config"
_ROWS, _BY_TOKENS = "reward_model.micro_batch_size_per_gpu", "reward_model.use_dynamic_bsz"
_TOKENS = "reward_model.forward_max_token_len_per_gpu"
_OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
_LONGEST = "reward_model.reward_kwargs.max_resp_len"


def _has_classifier(settings: Settings) -> bool:
    # A reward model scores, not a student of RLT.
    return settings.reward_model.enable and settings.reward_model.reward_manager != RLT


def even_shards(
    section: str, role: SequenceRole, given: Predicate = lambda settings: True, here: Sentence | None = None
) -> Iterator[Refusal]:
    """Yield the rule that a role's devices divide into the shard groups of ``section``, the ``fsdp_config`` of its model."""
    yield from for_devices(
        role,
        lambda devices: Refusal(
            (f"{section}.fsdp_size", *devices),
            lambda settings: uneven_shards(devices_of(settings, role), value_at(settings, section)) and given(settings),
            "does not divide the devices",
            lambda settings: f"Set a divisor of {devices_of(settings, role)}, or -1.",
            here,
        ),
    )


OWN = "enable_resource_pool"


def own_pool(role: SequenceRole, given: Predicate = lambda settings: True) -> Iterator[Refusal]:
    """Yield the rules of a role that has devices of its own."""
    key, group = f"{role}.{OWN}", "trainer.worker_group"
    yield refused(
        {key: True, group: "local"},
        "the local worker group has one device, and no process for others",
        f"Set {group}=ray, or {key}=false.",
        given,
    )
    for count in pool_keys(role):
        yield refused({key: True, count: 0}, "a pool needs devices", f"Set {count} to 1 or more, or {key}=false.", given)


def _longest_conversation(settings: Settings) -> int:
    longest = longest_sample(settings)
    return min(longest, settings.reward_model.max_length or longest)


def _has_no_buffer(settings: Settings) -> bool:
    longest, buffer = settings.reward_model.reward_kwargs.max_resp_len, settings.reward_model.reward_kwargs.overlong_buffer_cfg
    return buffer.enable and not 0 < buffer.len <= (longest or 0)


def _overlong() -> Iterator[Refusal]:
    # DAPO's penalty for long responses.
    yield refused(
        {f"{_OVERLONG}.enable": True, MANAGER: other_than("dapo")},
        "the penalty for long responses belongs to the manager dapo",
        f"Set {MANAGER}=dapo, or {_OVERLONG}.enable=false.",
    )
    yield Refusal(
        (f"{_OVERLONG}.len", _LONGEST),
        _has_no_buffer,
        "the buffer must have a token at least, and no more than the longest response",
        lambda settings: f"Set {_OVERLONG}.len between 1 and {settings.reward_model.reward_kwargs.max_resp_len}.",
    )


def _has_foreign_tokenizer(settings: Settings) -> bool:
    policy = settings.actor_rollout_ref.model
    own = (None, POLICY_TOKENIZER, policy.path, policy.tokenizer_path)
    return _has_classifier(settings) and settings.reward_model.model.input_tokenizer not in own


def _is_too_small(settings: Settings) -> bool:
    reward = settings.reward_model
    reads_ids = _has_classifier(settings) and bool(reward.use_dynamic_bsz) and reward.model.input_tokenizer is None
    return reads_ids and (reward.forward_max_token_len_per_gpu or 0) < _least_tokens(settings)


def _least_tokens(settings: Settings) -> int:
    return -(-_longest_conversation(settings) // sequence_ranks(settings, "reward_model"))


def _has_wrong_names(models: dict[str, Any]) -> bool:
    return not all(name and isinstance(path, str) and path for name, path in models.items())


def _model() -> Iterator[Refusal]:
    path, tokenizer, longest = f"{_MODEL}.path", f"{_MODEL}.input_tokenizer", "reward_model.max_length"
    folder = f"Set {path} to the folder of a sequence classifier with one label."
    yield refused({ENABLE: True, path: None}, "no reward model is named", folder, _has_classifier)
    function = "custom_reward_function.path"
    yield refused(
        {FURTHER: bool, function: None},
        "only a function can make one reward of the scores of several models",
        f"Set {function} to one that reads them, or remove {FURTHER}.",
        _has_classifier,
    )
    yield refused(
        {FURTHER: _has_wrong_names},
        "each model is a name and a folder or hub id",
        f"Write it as {{name:folder}}, as in {FURTHER}={{helpful:models/helpful}}.",
    )
    yield Refusal(
        (tokenizer,),
        _has_foreign_tokenizer,
        "responses are decoded with the policy's own tokenizer",
        f"Set {POLICY_TOKENIZER}, or null where the reward model shares that tokenizer.",
    )
    without_size, way_out = "a micro-batch of the reward model has no size", f"Set {_ROWS}, or {_BY_TOKENS}=true."
    yield refused({_ROWS: None, _BY_TOKENS: operator.not_}, without_size, way_out, _has_classifier)
    yield Refusal(
        (_TOKENS,),
        _is_too_small,
        "a sample may have more tokens (data.max_prompt_length + data.max_response_length)",
        lambda settings: f"Raise it to at least {_least_tokens(settings)}, or lower {longest}.",
    )
    yield from even_shards(_FSDP, "reward_model", lambda settings: settings.reward_model.enable)
    yield from own_pool("reward_model", lambda settings: settings.reward_model.enable)
    yield refused(
        {f"reward_model.{OWN}": True, MANAGER: RLT},
        "a student scores with the log-probs of the teacher beside it, and may be the reference's own module",
        f"Set reward_model.{OWN}=false.",
        lambda settings: settings.reward_model.enable,
    )
    yield refused(
        {f"{_FSDP}.offload_policy": True, f"{_FSDP}.param_offload": True},
        "with offload_policy parameters never leave the host",
        "Set one of the two to false; param_offload is the faster one.",
        lambda settings: settings.reward_model.enable,
    )


def _lacks_own_student(settings: Settings, in_place: bool) -> bool:
    """Return whether a key of the student's model has no effect.

    ``in_place``: the key says where the weights are kept. If student and reference swap in one place, the reference's key
    decides.
    """
    reward = settings.reward_model
    if not reward.enable or reward.reward_manager != RLT:
        return not reward.enable
    return reward.model.path is None or (in_place and reward.residency == "swap")


def _unused() -> Iterator[UnusedKey]:
    either = f"{ENABLE} is false, {MANAGER} is rlt, or {_BY_TOKENS} decides otherwise"
    yield UnusedKey(_ROWS, lambda settings: not _has_classifier(settings) or bool(settings.reward_model.use_dynamic_bsz), either)
    yield UnusedKey(_TOKENS, lambda settings: not _has_classifier(settings) or not settings.reward_model.use_dynamic_bsz, either)
    tokenizer, without_model = f"{_MODEL}.input_tokenizer", f"{ENABLE} is false, or {MANAGER} is rlt"
    for key in (_BY_TOKENS, "reward_model.max_length", tokenizer):
        yield UnusedKey(key, lambda settings: not _has_classifier(settings), without_model)
    path = f"{_MODEL}.path"
    own = f"reward_model.{OWN}"
    yield from idle(ENABLE, False, path, own, FURTHER)
    for key in pool_keys("reward_model"):
        yield UnusedKey(
            key,
            lambda settings: not (settings.reward_model.enable and settings.reward_model.enable_resource_pool),
            f"{ENABLE} or {own} is false",
        )
    for key in (key for key in leaf_types() if key.startswith(f"{_MODEL}.") and key not in (tokenizer, path)):
        in_place = key.startswith(f"{_FSDP}.")
        yield UnusedKey(
            key,
            partial(_lacks_own_student, in_place=in_place),
            f"{ENABLE} is false, or the student uses the reference's own module" + (f" ({RESIDENCY}=swap)" if in_place else ""),
        )
    for key in (RESIDENCY, *(key for key in leaf_types() if key.startswith("reward_model.rlt."))):
        yield UnusedKey(key, lambda settings: settings.reward_model.reward_manager != RLT, f"{MANAGER} is not rlt")


REWARD_RULES: tuple[Refusal, ...] = (*_overlong(), *_model())
"""What penalties and reward models refuse, for :mod:`verl_memopt.config.checks`."""

WITHOUT_REWARD_MODEL = {unused.key: unused for unused in _unused()}
"""Key -> why it has no effect in a run without a reward model."""


# Combinations of the settings of a sandbox service that are refused or have no effect.

MAX_CONCURRENT = f"{SANDBOX}.max_concurrent"
_LIMIT = "custom_reward_function.timeout_seconds"

ROUND_SECONDS = CASE_SECONDS + 5
"""Longest time of a call with a margin for the service itself."""


def rows_at_a_time(slots: int) -> int:
    """Return how many rows a reward process scores at once.

    With 4 slots or more, the test cases of these rows are at most 2.5 times the slots. Other rows can use the slots of a row
    whose last case is slow, and no case waits for more than two programs that never end.
    """
    return max(1, slots // 4)


def longest_row_seconds(max_concurrent: int) -> int:
    """Return the longest time of a row in which every program runs until the service stops it.

    With fewer than 4 slots the cases of one row wait for each other.

    Args:
        max_concurrent: Programs that all reward processes together may run at once.
    """
    return max(3, math.ceil(CASES / max_concurrent)) * ROUND_SECONDS


def _is_http(address: str) -> bool:
    try:
        parts = urlsplit(address)
        # urlsplit checks the port only when it is read.
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _is_bypassed(settings: Settings) -> bool:
    return settings.custom_reward_function.path is not None or settings.reward_model.enable


def _longest(settings: Settings) -> int:
    return longest_row_seconds(settings.reward_model.sandbox_fusion.max_concurrent)


def _is_too_short(settings: Settings) -> bool:
    is_used = settings.reward_model.sandbox_fusion.url is not None and not _is_bypassed(settings)
    return is_used and settings.custom_reward_function.timeout_seconds < _longest(settings)


def _refusals() -> Iterator[Refusal]:
    way_out = "Set it to that of the service's run_code, such as http://localhost:8080/run_code."
    yield refused({URL: lambda url: url is not None and not _is_http(url)}, "it is no http or https address", way_out)
    yield Refusal(
        (_LIMIT, MAX_CONCURRENT),
        _is_too_short,
        f"a row whose programs all run into the service's limit of {CASE_SECONDS} s takes longer",
        lambda settings: f"Set {_LIMIT} to at least {_longest(settings)}{_or_more(settings)}.",
    )


def _or_more(settings: Settings) -> str:
    # The second way out, if running more programs at once would make the limit long enough.
    limit, slots = settings.custom_reward_function.timeout_seconds, settings.reward_model.sandbox_fusion.max_concurrent
    enough = next((calls for calls in range(slots + 1, CASES + 1) if longest_row_seconds(calls) <= limit), None)
    return "" if enough is None else f", or {MAX_CONCURRENT} to at least {enough}"


SANDBOX_RULES: tuple[Refusal, ...] = tuple(_refusals())
"""What the service's settings refuse, for :mod:`verl_memopt.config.checks`."""

SANDBOX_UNUSED: tuple[UnusedKey, ...] = (
    *(
        UnusedKey(key, _is_bypassed, f"custom_reward_function.path or {ENABLE} decides the reward, and no rule does")
        for key in (URL, "reward_model.tolerant_rules")
    ),
    *idle(URL, None, MAX_CONCURRENT, f"{SANDBOX}.memory_limit_mb"),
)
"""When a key of the rules or of the service has no effect, for :mod:`verl_memopt.config.checks`."""
