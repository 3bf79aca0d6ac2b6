"""Rules of the sections ``teacher`` and ``distill``: which combinations are refused, and which keys have no effect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from verl_memopt.algorithms.records import DISTILL, SFT
from verl_memopt.config.keys import IS_SET, above, leaf_types, other_than, refused
from verl_memopt.config.reward_rules import even_shards, own_pool
from verl_memopt.config.role_settings import SAMPLED
from verl_memopt.config.schema import Settings
from verl_memopt.memory.critic_rules import own_pools
from verl_memopt.memory.knob import (
    Refusal,
    UnusedKey,
    has_own_teacher,
    has_teacher,
    pool_keys,
    sequence_ranks,
    teacher_is_elsewhere,
)

COEF, DIVERGENCE, PATH, PROMPT = "distill.coef", "distill.divergence", "teacher.model.path", "distill.teacher_prompt"
_ESTIMATOR, _ROLLOUT = "algorithm.adv_estimator", "actor_rollout_ref.rollout"
_ULYSSES = "teacher.fsdp_config.ulysses_sequence_parallel_size"
POOL = "teacher.enable_resource_pool"
ALIGN, TOKENIZER = "distill.align", "teacher.model.tokenizer_path"
ADAPTER = "teacher.model.lora_adapter_path"
FURTHER, OF_ROW = "teacher.further_models", "teacher.key"
URL, COLUMN, WEIGHTS = "teacher.endpoint.url", "teacher.log_probs_key", "teacher.weights"
IN_BRACES = re.compile(r"\{([A-Za-z_]\w*)\}")
"""A name of a column in the template of a teacher's prompt."""
_NO_TEACHER = f"{COEF} is 0, so there is no teacher"


def _splits_otherwise(settings: Settings) -> bool:
    return has_teacher(settings) and sequence_ranks(settings, "teacher") not in (1, sequence_ranks(settings, "actor"))


def _models() -> Iterator[Refusal]:
    yield refused(
        {COEF: above(0), PATH: None, PROMPT: None, URL: None, COLUMN: None, WEIGHTS: "policy", ADAPTER: None},
        "the policy would be compared with itself at the same prompt",
        f"Set {PATH} to the folder of a teacher, {URL} to its server, or {PROMPT} to a prompt that tells more than the policy's.",
    )
    for one, other in ((PATH, URL), (PATH, COLUMN), (URL, COLUMN)):
        yield refused({one: IS_SET, other: IS_SET}, "there is one teacher", "Remove one of them.", has_teacher)
    yield refused(
        {FURTHER: bool, PATH: None},
        "rows that name no teacher have none",
        f"Set {PATH} to the first teacher, or remove {FURTHER}.",
        has_teacher,
    )
    yield refused(
        {FURTHER: _has_wrong_names},
        "each teacher needs a name, and a folder or hub id",
        f"Write {{name:folder}}, such as {FURTHER}={{code:models/code}}.",
    )
    yield from own_pool("teacher", has_own_teacher)
    yield refused(
        {POOL: True, "distill.top_k": None, DIVERGENCE: lambda value: value != SAMPLED},
        "the update needs the teacher's states and head, which other devices do not have",
        f"Set distill.top_k=64 or {DIVERGENCE}={SAMPLED}, or {POOL}=false.",
        has_own_teacher,
    )


def _adapters() -> Iterator[Refusal]:
    for other in (URL, COLUMN, FURTHER):
        way_out, both = f"Remove {ADAPTER} or {other}.", {ADAPTER: IS_SET, other: bool}
        yield refused(both, "the adapters belong to one model of this run", way_out, has_teacher)
    rank = "actor_rollout_ref.model.lora_rank"
    yield refused(
        {ADAPTER: IS_SET, PATH: None, rank: 0},
        "the policy trains all of its weights, so there is no base to which the adapters belong",
        f"Set {PATH} to their base, or give the policy adapters too ({rank}).",
        has_teacher,
    )
    yield refused(
        {ADAPTER: IS_SET, PATH: None, WEIGHTS: "reference"},
        "the teacher is the reference or has adapters of its own",
        f"Remove one of them, or set {PATH}.",
        has_teacher,
    )
    yield refused(
        {ADAPTER: IS_SET, PATH: IS_SET, "actor_rollout_ref.model.load_mode": "mmap", "teacher.fsdp_config.param_offload": True},
        "the mapped files of the base have no adapters",
        "Set actor_rollout_ref.model.load_mode=stream, or teacher.fsdp_config.param_offload=stream.",
        has_teacher,
    )


def _text() -> Iterator[Refusal]:
    text: Mapping[str, Any] = {ALIGN: "text"}
    further: Mapping[str, Any]
    for further, why, way_out in (
        ({DIVERGENCE: other_than(SAMPLED)}, "tokens of two vocabularies have no divergence", f"Set {DIVERGENCE}={SAMPLED}."),
        ({"distill.discount": above(0)}, "tokens of a run answer together already", "Set distill.discount=0."),
        ({FURTHER: bool}, "there is one other tokenizer", f"Remove {FURTHER}."),
        ({PATH: None, URL: None}, "the policy has its own tokenizer", f"Set {ALIGN}=tokens."),
        (
            {URL: IS_SET, TOKENIZER: None},
            "the server gets token ids, which its tokenizer must make",
            f"Set {TOKENIZER} to the folder of the served model.",
        ),
        (
            {f"{_ROLLOUT}.multi_turn.enable": True},
            "a conversation has a prompt for each turn, and this one is for one turn",
            "Remove the tools, or take a teacher with the policy's tokenizer.",
        ),
    ):
        yield refused({**text, **further}, why, way_out, has_teacher)


def _elsewhere() -> Iterator[Refusal]:
    for key in (URL, COLUMN):
        yield refused(
            {key: IS_SET, "distill.top_k": None, DIVERGENCE: lambda value: value != SAMPLED},
            "log-probs of some tokens come from there, and this divergence compares the whole vocabulary",
            "Set distill.top_k=20, which compares the most probable tokens."
            if key == COLUMN
            else f"Set distill.top_k=20, which compares the most probable tokens, or {DIVERGENCE}={SAMPLED}.",
            has_teacher,
        )
    yield refused(
        {URL: IS_SET, f"{_ROLLOUT}.temperature": other_than(1.0)},
        "a server gives the log-probs of a temperature of 1",
        f"Set {_ROLLOUT}.temperature=1, or let the teacher run here ({PATH}).",
        has_teacher,
    )
    yield refused(
        {URL: IS_SET, "teacher.endpoint.api": "openai", "distill.top_k": IS_SET},
        "this API gives the texts of the most probable tokens, not their ids",
        f"Serve the teacher with vLLM and set teacher.endpoint.api=vllm, or set {DIVERGENCE}={SAMPLED}.",
        has_teacher,
    )
    yield refused(
        {COLUMN: IS_SET, _ESTIMATOR: other_than(SFT)},
        "only the responses of a dataset can have a column for their tokens",
        f"Set {_ESTIMATOR}={SFT}, or remove {COLUMN}.",
        has_teacher,
    )
    yield refused({COLUMN: IS_SET, DIVERGENCE: SAMPLED}, "it needs sampled tokens", f"Set {DIVERGENCE}=forward_kl.", has_teacher)
    yield refused(
        {COLUMN: IS_SET, "data.custom_cls.path": IS_SET},
        "the rows of a class have no columns",
        "Remove data.custom_cls.path, and write the rows to a file.",
        has_teacher,
    )


def _lesson() -> Iterator[Refusal]:
    yield refused(
        {PROMPT: lambda template: isinstance(template, str) and not IN_BRACES.search(template)},
        "no name stands in braces, so the teacher would read one text for all rows",
        "Write {prompt}, or the name of a column in braces.",
        has_teacher,
    )
    yield refused({_ESTIMATOR: DISTILL, COEF: 0}, "nothing would be learned", f"Remove {COEF}, or choose another {_ESTIMATOR}.")
    unrewarded = "with this estimator rewards are not learned from"
    for key, value in (
        ("algorithm.use_kl_in_reward", True),
        ("algorithm.use_pf_ppo", True),
        ("algorithm.filter_groups.enable", True),
    ):
        yield refused({key: value, _ESTIMATOR: DISTILL}, unrewarded, f"Set {key}=false.")
    yield refused(
        {"distill.top_k": IS_SET, DIVERGENCE: lambda value: value in ("jsd", SAMPLED)},
        "only the two KLs are computed over the most probable tokens",
        f"Remove distill.top_k, or set {DIVERGENCE}=forward_kl.",
        has_teacher,
    )
    whole = f"Set {DIVERGENCE}=reverse_kl, which is exact however tokens are sampled"
    for key, all_of_it in ((f"{_ROLLOUT}.top_p", 1.0), (f"{_ROLLOUT}.top_k", -1)):
        yield refused(
            {DIVERGENCE: SAMPLED, key: other_than(all_of_it, 0) if key.endswith("k") else other_than(all_of_it)},
            "the estimate needs tokens that are sampled from the whole distribution",
            f"{whole}, or {key}={all_of_it}.",
            has_teacher,
        )
    yield refused(
        {DIVERGENCE: SAMPLED, _ESTIMATOR: SFT},
        "the responses of a dataset were not sampled from the policy",
        f"{whole}.",
        has_teacher,
    )
    yield refused(
        {PROMPT: IS_SET, f"{_ROLLOUT}.multi_turn.enable": True},
        "a conversation has one prompt for each turn, and the template is for one",
        f"Remove {PROMPT}, or the tools.",
        has_teacher,
    )
    yield Refusal(
        (_ULYSSES, "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"),
        _splits_otherwise,
        "the devices of a group hold the states of the same tokens",
        f"Set {_ULYSSES} to the policy's number, or to 1.",
    )
    yield from even_shards("teacher.fsdp_config", "teacher", has_teacher)


def _unused() -> Iterator[UnusedKey]:
    owners = {"distill.beta": "jsd", "distill.discount": SAMPLED}
    for key in (key for key in leaf_types() if key.startswith(("teacher.", "distill.")) and key not in (COEF, PATH)):
        if key in owners:
            yield UnusedKey(key, partial(_has_other, owners[key]), f"it belongs to {DIVERGENCE}={owners[key]}")
        elif key.startswith("teacher.endpoint.") and key != URL:
            yield UnusedKey(key, _has_no_server, f"{COEF} is 0 or {URL} is null, so no server is asked")
        elif key in pool_keys("teacher"):
            yield UnusedKey(key, lambda settings: "teacher" not in own_pools(settings), f"{POOL} is false or there is no teacher")
        elif key == TOKENIZER:
            yield UnusedKey(key, _reads_tokens, f"{COEF} is 0, or {ALIGN} is not text")
        elif key == OF_ROW:
            yield UnusedKey(key, _has_one_teacher, f"{COEF} is 0 or {FURTHER} is empty, so all rows have the same teacher")
        elif key == WEIGHTS:
            yield UnusedKey(key, _has_another, f"{COEF} is 0, or the teacher is another model")
        elif key.startswith("distill.") or key in (URL, COLUMN, ADAPTER):
            yield UnusedKey(key, lambda settings: not has_teacher(settings), _NO_TEACHER)
        elif ".log_prob_" in key:
            yield UnusedKey(key, _asks_no_model, f"{COEF} is 0 or the teacher is no model of this run")
        else:
            yield UnusedKey(
                key, lambda settings: not has_own_teacher(settings), f"{COEF} is 0 or {PATH} is null, so no teacher is built"
            )
    yield UnusedKey(PATH, lambda settings: not has_teacher(settings), _NO_TEACHER)


def _has_wrong_names(models: Mapping[str, Any]) -> bool:
    return not all(name and isinstance(path, str) and path for name, path in models.items())


def _reads_tokens(settings: Settings) -> bool:
    return not has_teacher(settings) or settings.distill.align != "text"


def _has_one_teacher(settings: Settings) -> bool:
    return not has_own_teacher(settings) or not settings.teacher.further_models


def _has_another(settings: Settings) -> bool:
    return not has_teacher(settings) or has_own_teacher(settings) or teacher_is_elsewhere(settings)


def _has_no_server(settings: Settings) -> bool:
    return not has_teacher(settings) or settings.teacher.endpoint.url is None


def _asks_no_model(settings: Settings) -> bool:
    return not has_teacher(settings) or teacher_is_elsewhere(settings)


def _has_other(owner: str, settings: Settings) -> bool:
    return not has_teacher(settings) or settings.distill.divergence != owner


TEACHER_RULES: tuple[Refusal, ...] = (*_models(), *_adapters(), *_text(), *_elsewhere(), *_lesson())
TEACHER_UNUSED: tuple[UnusedKey, ...] = tuple(_unused())
