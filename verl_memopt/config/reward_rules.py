"""Combinations of reward settings that are refused."""

from __future__ import annotations

from collections.abc import Iterator

from verl_memopt.config.keys import leaf_types
from verl_memopt.config.schema.rewards import POLICY_TOKENIZER
from verl_memopt.knobs.conditions import DEVICES, LENGTHS
from verl_memopt.knobs.knob import Idle, Refusal

ENABLE, MANAGER = "reward_model.enable", "reward_model.reward_manager"
RLT = "rlt"
"""Value of ``reward_model.reward_manager`` with which a student scores explanations."""
RESIDENCY = "reward_model.residency"
_AR, _MODEL, _FSDP = "actor_rollout_ref.model", "reward_model.model", "reward_model.model.fsdp_config"
_ROWS, _BY_TOKENS = "reward_model.micro_batch_size_per_gpu", "reward_model.use_dynamic_bsz"
_TOKENS = "reward_model.forward_max_token_len_per_gpu"
_OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
_LONGEST = "reward_model.reward_kwargs.max_resp_len"


def _overlong() -> Iterator[Refusal]:
    """Yield the rules of DAPO's penalty for long responses."""
    yield Refusal(
        (f"{_OVERLONG}.enable", MANAGER),
        lambda enabled, manager: enabled and manager != "dapo",
        "the penalty for long responses belongs to the manager dapo",
        f"Set {MANAGER}=dapo, or {_OVERLONG}.enable=false.",
    )
    yield Refusal(
        (f"{_OVERLONG}.len", _LONGEST),
        lambda length, longest, enabled: enabled and not 0 < length <= longest,
        "the buffer must have a token at least, and no more than the longest response",
        lambda length, longest, enabled: f"Set {_OVERLONG}.len between 1 and {longest}.",
        about=(f"{_OVERLONG}.enable",),
    )


def _model() -> Iterator[Refusal]:
    """Yield the rules of runs with a reward model."""
    path, tokenizer, longest = f"{_MODEL}.path", f"{_MODEL}.input_tokenizer", "reward_model.max_length"
    yield Refusal(
        (ENABLE, path),
        lambda enabled, folder, manager: enabled and manager != RLT and folder is None,
        "no reward model is named",
        f"Set {path} to the folder of a sequence classifier with one label.",
        about=(MANAGER,),
    )
    yield Refusal(
        (tokenizer,),
        lambda name, enabled, manager, *policys: enabled and manager != RLT and name not in (None, POLICY_TOKENIZER, *policys),
        "responses are decoded with the policy's own tokenizer",
        f"Set {POLICY_TOKENIZER}, or null where the reward model shares that tokenizer.",
        about=(ENABLE, MANAGER, f"{_AR}.path", f"{_AR}.tokenizer_path"),
    )
    yield Refusal(
        (_ROWS, _BY_TOKENS),
        lambda rows, by_tokens, enabled, manager: enabled and manager != RLT and rows is None and not by_tokens,
        "a micro-batch of the reward model has no size",
        f"Set {_ROWS}, or {_BY_TOKENS}=true.",
        about=(ENABLE, MANAGER),
    )
    yield Refusal(
        (_TOKENS,),
        lambda most, enabled, manager, by_tokens, tokenizer, cut, prompt, response: (
            (enabled and manager != RLT and by_tokens and tokenizer is None)
            and most < min(prompt + response, cut or prompt + response)
        ),
        "a sample may have more tokens (data.max_prompt_length + data.max_response_length)",
        lambda most, enabled, manager, by_tokens, tokenizer, cut, prompt, response: (
            f"Raise it to at least {min(prompt + response, cut or prompt + response)}, or lower {longest}."
        ),
        about=(ENABLE, MANAGER, _BY_TOKENS, tokenizer, longest, *LENGTHS),
    )
    yield Refusal(
        (f"{_FSDP}.fsdp_size", *DEVICES),
        lambda size, nodes, devices, enabled: enabled and size > 0 and nodes * devices % size != 0,
        "does not divide the devices",
        lambda size, nodes, devices, enabled: f"Set a divisor of {nodes * devices}, or -1.",
        about=(ENABLE,),
    )
    yield Refusal(
        (f"{_FSDP}.offload_policy", f"{_FSDP}.param_offload"),
        lambda native, other, enabled: native and other and enabled,
        "with offload_policy parameters never leave the host",
        "Set one of the two to false; param_offload is the faster one.",
        about=(ENABLE,),
    )


def _idle() -> Iterator[Idle]:
    """Yield when a key of the reward model or of RLT's student has no effect."""
    either = f"{ENABLE} is false, {MANAGER} is rlt, or {_BY_TOKENS} decides otherwise"
    deciding = (ENABLE, MANAGER, _BY_TOKENS)
    yield Idle(_ROWS, deciding, lambda enabled, manager, by_tokens: not enabled or manager == RLT or by_tokens, either)
    yield Idle(_TOKENS, deciding, lambda enabled, manager, by_tokens: not enabled or manager == RLT or not by_tokens, either)
    tokenizer, without_model = f"{_MODEL}.input_tokenizer", f"{ENABLE} is false, or {MANAGER} is rlt"
    for key in (_BY_TOKENS, "reward_model.max_length", tokenizer):
        yield Idle(key, (ENABLE, MANAGER), lambda enabled, manager: not enabled or manager == RLT, without_model)
    path = f"{_MODEL}.path"
    yield Idle(path, (ENABLE,), lambda enabled: not enabled, f"{ENABLE} is false")
    for key in (key for key in leaf_types() if key.startswith(f"{_MODEL}.") and key not in (tokenizer, path)):
        in_place = key.startswith(f"{_FSDP}.")
        yield Idle(
            key,
            (ENABLE, MANAGER, path, RESIDENCY),
            lambda enabled, manager, folder, where, in_place=in_place: (
                not enabled or (manager == RLT and (folder is None or (in_place and where == "swap")))
            ),
            f"{ENABLE} is false, or the student uses the reference's own module" + (f" ({RESIDENCY}=swap)" if in_place else ""),
        )
    for key in (RESIDENCY, *(key for key in leaf_types() if key.startswith("reward_model.rlt."))):
        yield Idle(key, (MANAGER,), lambda manager: manager != RLT, f"{MANAGER} is not rlt")


REWARD_RULES: tuple[Refusal, ...] = (*_overlong(), *_model())
"""All rules of this file, for :mod:`verl_memopt.config.checks`."""

WITHOUT_REWARD_MODEL = {idle.key: idle for idle in _idle()}
"""Key -> why it has no effect in a run without a reward model."""
