"""Rules of the reward settings: which combinations are refused, and which keys have no effect."""

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
"""Value of ``reward_model.reward_manager``: a student model scores explanations."""
RESIDENCY = "reward_model.residency"
FURTHER = "reward_model.further_models"
_MODEL, _FSDP = "reward_model.model", "reward_model.model.fsdp_config"
_ROWS, _BY_TOKENS = "reward_model.micro_batch_size_per_gpu", "reward_model.use_dynamic_bsz"
_TOKENS = "reward_model.forward_max_token_len_per_gpu"
_OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
_LONGEST = "reward_model.reward_kwargs.max_resp_len"


def _has_classifier(settings: Settings) -> bool:
    # Whether a reward model scores the responses, and not the student of RLT.
    return settings.reward_model.enable and settings.reward_model.reward_manager != RLT


def even_shards(
    section: str, role: SequenceRole, given: Predicate = lambda settings: True, here: Sentence | None = None
) -> Iterator[Refusal]:
    """Yield the rule that ``fsdp_size`` divides a role's devices. ``section``: the ``fsdp_config`` of the role's model."""
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
    """Yield the rules of a role with ``enable_resource_pool``."""
    key, group = f"{role}.{OWN}", "trainer.worker_group"
    yield refused(
        {key: True, group: "local"},
        "the local worker group has one device, and cannot start a process for another one",
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
    # DAPO's penalty for responses that are close to the length limit.
    yield refused(
        {f"{_OVERLONG}.enable": True, MANAGER: other_than("dapo")},
        "the penalty for long responses belongs to the manager dapo",
        f"Set {MANAGER}=dapo, or {_OVERLONG}.enable=false.",
    )
    yield Refusal(
        (f"{_OVERLONG}.len", _LONGEST),
        _has_no_buffer,
        "the buffer needs at least one token, and at most as many as the longest response",
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
        "only a reward function can combine the scores of several models",
        f"Set {function} to a file whose function does so, or remove {FURTHER}.",
        _has_classifier,
    )
    yield refused(
        {FURTHER: _has_wrong_names},
        "each model needs a name, and a folder or hub id",
        f"Write {{name:folder}}, such as {FURTHER}={{helpful:models/helpful}}.",
    )
    yield Refusal(
        (tokenizer,),
        _has_foreign_tokenizer,
        "responses can only be decoded with the policy's tokenizer",
        f"Set {POLICY_TOKENIZER}, or null if the reward model has the same tokenizer as the policy.",
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
        "the student needs the teacher's log-probs on the same device, and may be the reference itself",
        f"Set reward_model.{OWN}=false.",
        lambda settings: settings.reward_model.enable,
    )
    yield refused(
        {f"{_FSDP}.offload_policy": True, f"{_FSDP}.param_offload": True},
        "with offload_policy the parameters rest on the host already",
        "Set one of the two to false; param_offload is the faster one.",
        lambda settings: settings.reward_model.enable,
    )


def _lacks_own_student(settings: Settings, in_place: bool) -> bool:
    """Return whether a key of ``reward_model.model`` has no effect, because there is no such model or it has no own weights.

    ``in_place``: the key is about the placement of weights. With ``residency=swap`` the student shares the reference's place on
    the device, and the reference's key decides.
    """
    reward = settings.reward_model
    if not reward.enable or reward.reward_manager != RLT:
        return not reward.enable
    return reward.model.path is None or (in_place and reward.residency == "swap")


def _unused() -> Iterator[UnusedKey]:
    either = f"{ENABLE} is false, {MANAGER} is rlt, or {_BY_TOKENS} chooses the other unit of micro-batches"
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
"""What the length penalty and reward models refuse."""

WITHOUT_REWARD_MODEL = {unused.key: unused for unused in _unused()}
"""Key -> why it has no effect in a run without a reward model."""


# The sandbox service: refused combinations of its settings, and when its keys have no effect.

MAX_CONCURRENT = f"{SANDBOX}.max_concurrent"
_LIMIT = "custom_reward_function.timeout_seconds"

ROUND_SECONDS = CASE_SECONDS + 5
"""Longest time of one call to the service: a program's limit, and a margin for the service itself."""


def rows_at_a_time(slots: int) -> int:
    """Return how many rows a reward process scores at once. ``slots``: programs that it may run at once.

    With 4 slots or more, these rows together have at most 2.5 test cases per slot. So other rows can use the slots of a row whose
    last case is slow, and no case waits for more than two programs that run into the time limit.
    """
    return max(1, slots // 4)


def longest_row_seconds(max_concurrent: int) -> int:
    """Return the longest time in seconds that one row can take, if the service has to stop every program.

    A case waits for at most two others (see :func:`rows_at_a_time`), which is 3 rounds. With fewer than 4 slots the cases of one
    row also wait for each other.

    Args:
        max_concurrent: Programs that all reward processes together may run at once.
    """
    return max(3, math.ceil(CASES / max_concurrent)) * ROUND_SECONDS


def _is_http(address: str) -> bool:
    try:
        parts = urlsplit(address)
        # urlsplit does not check the port; reading `port` does, and may raise.
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
        f"a row can take longer, because each of its programs may run for {CASE_SECONDS} s until the service stops it",
        lambda settings: f"Set {_LIMIT} to at least {_longest(settings)}{_or_more(settings)}.",
    )


def _or_more(settings: Settings) -> str:
    # A second way out: run more programs at once, if the limit then is long enough.
    limit, slots = settings.custom_reward_function.timeout_seconds, settings.reward_model.sandbox_fusion.max_concurrent
    enough = next((calls for calls in range(slots + 1, CASES + 1) if longest_row_seconds(calls) <= limit), None)
    return "" if enough is None else f", or {MAX_CONCURRENT} to at least {enough}"


SANDBOX_RULES: tuple[Refusal, ...] = tuple(_refusals())
"""What the sandbox service refuses."""

SANDBOX_UNUSED: tuple[UnusedKey, ...] = (
    *(
        UnusedKey(key, _is_bypassed, f"custom_reward_function.path or {ENABLE} gives the reward, so no default rule is used")
        for key in (URL, "reward_model.tolerant_rules")
    ),
    *idle(URL, None, MAX_CONCURRENT, f"{SANDBOX}.memory_limit_mb"),
)
"""When a key of the default reward rules or of the sandbox service has no effect."""
