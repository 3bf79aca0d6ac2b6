"""Combinations of RLT's settings that are refused, and which of our keys each setting name of RLT's publication sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from verl_memopt.algorithms.records import WITH_GREEDY_RESPONSES
from verl_memopt.config.aliases import MINI_BATCH, PROMPTS
from verl_memopt.config.keys import IS_SET, above, other_than, refused, value_at
from verl_memopt.config.reward_rules import ENABLE, MANAGER, RESIDENCY, RLT
from verl_memopt.config.schema import Settings
from verl_memopt.config.spelling import (
    NotConvertibleError,
    Spelling,
    TrlSettings,
    Values,
    copied,
    effective,
    same,
    unless_none,
    words,
)
from verl_memopt.config.trl_names import SAMPLES, RecipeNames
from verl_memopt.config.unused_keys import ANY, NoEffect
from verl_memopt.memory.knob import KL, Refusal
from verl_memopt.memory.param_offload import STREAM
from verl_memopt.recipes.rlt.settings import RltReward

_AR, _MODEL, _RLT = "actor_rollout_ref", "reward_model.model", "reward_model.rlt"
_PATH, _QUANTIZATION = f"{_MODEL}.path", f"{_MODEL}.quantization"
_REF_OFFLOAD, _RANK = f"{_AR}.ref.fsdp_config.param_offload", f"{_AR}.model.lora_rank"
_TEACHER = f"{_RLT}.kl_teacher"
_NO_KL = dict.fromkeys(KL, False)
"""Settings without which a run has no reference."""


def _with_student(settings: Settings) -> bool:
    return settings.reward_model.enable and settings.reward_model.reward_manager == RLT


def _weighted(weights: str, reductions: str) -> Iterator[Refusal]:
    def counts(settings: Settings) -> tuple[int, int]:
        return len(value_at(settings, weights)), len(value_at(settings, reductions))

    yield Refusal(
        (weights, reductions),
        lambda settings: len(set(counts(settings))) > 1,
        "weights and reductions differ in number",
        "Give one weight for each reduction.",
        lambda settings: "there are {} weights for {} reductions".format(*counts(settings)),
    )
    twice = {reductions: lambda names: len(set(names)) < len(names)}
    yield refused(twice, "a reduction appears twice", "Name it once, with the sum of its weights.")


def _formula() -> Iterator[Refusal]:
    yield from _weighted(f"{_RLT}.answer_log_prob_coeff", f"{_RLT}.reduction_log_prob_fn")
    yield from _weighted(f"{_RLT}.kl_penalty_reward_coeff", f"{_RLT}.reduction_kl_fn")

    def differs(settings: Settings) -> bool:
        student, rollout = settings.reward_model.rlt.unbias_student_log_probs_temp, settings.actor_rollout_ref.rollout
        return student is not None and student != (rollout.temperature if rollout.do_sample else 1.0)

    yield Refusal(
        (f"{_RLT}.unbias_student_log_probs_temp", f"{_AR}.rollout.temperature"),
        differs,
        "both sides of the KL would belong to different distributions",
        "Leave it out: the student follows the rollouts.",
    )


def _student() -> Iterator[Refusal]:
    kl_in_loss, no_reference = f"{_AR}.actor.use_kl_loss", "without a KL there is no reference"
    unscored = "the manager rlt scores with a student, and no model scores"
    yield refused({MANAGER: RLT, ENABLE: False}, unscored, f"Set {ENABLE}=true.")
    yield refused(
        {_PATH: None, RESIDENCY: other_than("auto", "alias_ref")},
        "no student is named, so the reference is the student",
        f"Set {_PATH}, or {RESIDENCY}=auto.",
        _with_student,
    )
    yield refused(
        {_PATH: IS_SET, RESIDENCY: "alias_ref"},
        "the reference is the student, and another one is named",
        f"Remove {_PATH}, or set {RESIDENCY}=separate.",
        _with_student,
    )
    way_out = f"Set {_PATH} to the student's folder, or {kl_in_loss}=true."
    yield refused({_PATH: None, **_NO_KL}, f"the reference is the student, and {no_reference}", way_out, _with_student)
    compared = {_TEACHER: "reference", **_NO_KL}
    yield refused(compared, no_reference, f"Set {_TEACHER}=policy, or {kl_in_loss}=true.", _with_student)
    yield refused(
        {_QUANTIZATION: other_than("none"), _PATH: None},
        "the reference is the student",
        f"Set {_AR}.ref.quantization={{int8,nf4}} to store the reference in fewer bits, or {_PATH} to the student's folder.",
        _with_student,
    )


def _swap() -> Iterator[Refusal]:
    separate = f"Set {RESIDENCY}=separate."
    alone = "without a KL there is no reference to take turns with"
    yield refused({RESIDENCY: "swap", **_NO_KL}, alone, separate, _with_student)
    own_base = "with LoRA the reference is the policy's own base, and has no place of its own on the device"
    stays, quantized = "a reference that stays on the device leaves its place to nothing", "quantized weights have another shape"
    for key, fault, because, way_out in (
        (_RANK, above(0), own_base, separate),
        (_REF_OFFLOAD, False, stays, f"Set {_REF_OFFLOAD}=true, or {RESIDENCY}=separate."),
        (_REF_OFFLOAD, STREAM, "a reference that streams has no place", f"Set {_REF_OFFLOAD}=true, or {RESIDENCY}=separate."),
        *(
            (key, other_than("none"), quantized, f"Set {key}=none, or {RESIDENCY}=separate.")
            for key in (_QUANTIZATION, f"{_AR}.ref.quantization")
        ),
    ):
        yield refused({RESIDENCY: "swap", key: fault}, because, way_out, _with_student)


_FILTER, _BYPASS = "algorithm.filter_groups.enable", "algorithm.rollout_correction.bypass_mode"
_STEP: tuple[tuple[str, Any, str, str], ...] = (
    (_FILTER, True, "explanations are scored after the rollout is complete", f"Set {_FILTER}=false."),
    (_BYPASS, True, "the KL of the reward needs the trainer's own log-probs of the explanations", f"Set {_BYPASS}=false."),
    ("custom_reward_function.path", IS_SET, "the student's score is the reward", "Set custom_reward_function.path=null."),
    ("data.custom_cls.path", IS_SET, "the rows of RLT have columns of their own", "Set data.custom_cls.path=null."),
    (
        "algorithm.adv_estimator",
        WITH_GREEDY_RESPONSES.__contains__,
        "its greedy responses would need log-probs and scores of their own",
        "Use grpo or rloo.",
    ),
    (
        "data.truncation",
        other_than("error"),
        "a teacher's prompt ends with the solution and a tag, and cannot be cut",
        "Set data.truncation=error, and data.filter_overlong_prompts=true to drop long prompts.",
    ),
)
"""Settings that RLT refuses, as (key, refused value, reason, way out)."""


RLT_RULES: tuple[Refusal, ...] = (
    *_formula(), *_student(), *_swap(),
    *(refused({key: fault, MANAGER: RLT}, because, way_out) for key, fault, because, way_out in _STEP),
)  # fmt: skip
"""All rules of this file, for :mod:`verl_memopt.config.checks`."""


# The setting names of RLT's publication. A run of RLT accepts them as well as TRL's. Some differ in meaning from TRL's name:
# ``train_batch_size`` is the number of responses per step, on all devices together.

_ROLLOUT = f"{_AR}.rollout"
SAMPLES_NAME, BATCH = "num_generations", "train_batch_size"
OFFLOADED = (f"{_AR}.ref.fsdp_config.param_offload", f"{_MODEL}.fsdp_config.param_offload")
OWN = (
    *("align", "empty_think_kl", "include_forced_prefix", "kl_teacher", "logits_chunk_tokens", "max_student_len"),
    *("max_tokens_per_micro_batch", "overlong", "tag_format"),
)
"""Fields of ``reward_model.rlt`` that RLT's publication does not have."""
DUMPS, FOLDER = "trainer.rollout_data_dir", "trainer.default_local_dir"


def sequences(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    """Compute the number of prompts per step from the number of responses. One optimizer step uses all of them.

    Raises:
        NotConvertibleError: The responses do not divide into groups.
    """
    responses, samples = trl[name], trl.get(SAMPLES_NAME, effective(SAMPLES, values))
    if not all(isinstance(number, int) and number > 0 for number in (responses, samples)):
        raise NotConvertibleError("expected a whole number above 0", "Correct it.")
    if responses % samples:
        raise NotConvertibleError(f"{responses} responses do not divide into groups of {samples}", f"Set {PROMPTS}, in prompts.")
    return {PROMPTS: responses // samples, MINI_BATCH: responses // samples}


def sleep_level(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # Only on or off is read: what the engine must keep decides which of vLLM's two sleep levels is used.
    return {f"{_ROLLOUT}.free_cache_engine": trl[name] not in (0, None)}


def kl_teacher(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    return {"reward_model.rlt.kl_teacher": "reference" if trl[name] else "policy"}


def debug_mode(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    return {"debug.mode": "memory"} if trl[name] else {}


def dumps(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    folder = effective(FOLDER, values)
    if folder is None:
        folder = "/".join(["checkpoints", *(effective(f"trainer.{part}_name", values) for part in ("project", "experiment"))])
    return {DUMPS: f"{folder}/rollouts" if trl[name] else None}


RLT_SPELLINGS: tuple[Spelling, ...] = (
    Spelling((BATCH,), (PROMPTS, MINI_BATCH), sequences, "RLT counts responses, we count prompts"),
    same("student_model", f"{_MODEL}.path", note="null = the reference is the student"),
    Spelling(
        ("offload_untrained_models",), OFFLOADED, copied(*OFFLOADED),
        "reference and student move once for each phase, not for each forward",
    ),
    same("enable_prefix_caching", f"{_ROLLOUT}.enable_prefix_caching", note="each weight sync clears the cache"),
    same("enforce_eager", f"{_ROLLOUT}.enforce_eager"),
    Spelling(("vllm_max_model_len",), (f"{_ROLLOUT}.max_model_len",), unless_none(f"{_ROLLOUT}.max_model_len")),
    Spelling(("vllm_sleep_level",), (f"{_ROLLOUT}.free_cache_engine",), sleep_level, "the level follows from what must be kept"),
    Spelling(
        ("use_ray",), ("trainer.worker_group",), words("trainer.worker_group", {"true": "ray", "false": "local"}),
        "false = the worker lives in this process",
    ),
    Spelling(("use_reference_teacher_model",), ("reward_model.rlt.kl_teacher",), kl_teacher),
    *(
        same(field.name, f"reward_model.rlt.{field.name}")
        for field in fields(RltReward)
        if field.name not in OWN
    ),
    Spelling(("activate_debugging_logs",), ("debug.mode",), debug_mode),
    Spelling(
        ("save_completions_probability",), (DUMPS,), dumps, "any number above 0 writes all rows",
    ),
)  # fmt: skip
"""In the order in which they are read. They are read before TRL's names, because TRL's numbers of steps depend on the batch."""

RLT_NO_EQUAL: dict[str, NoEffect] = {
    "generation_aggregation_steps": NoEffect(ANY, "a whole step is generated at once. Remove the key"),
    "use_vllm_server": NoEffect((False,), f"the engine lives in the worker's process. Set {_ROLLOUT}.name=vllm alone"),
}
"""Names that no key of ours equals -> the values without effect, the reason, and the way out."""

PER_FORWARD: dict[str, NoEffect] = {
    name: NoEffect(ANY, f"forwards are cut by tokens. Use {_AR}.actor.ppo_max_token_len_per_gpu")
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
}
"""Names of TRL that are redundant if ``train_batch_size`` is given."""

NAMES = RecipeNames(RLT_SPELLINGS, RLT_NO_EQUAL, {BATCH: PER_FORWARD})
"""All names of this file, for :mod:`verl_memopt.config.trl_names`."""
