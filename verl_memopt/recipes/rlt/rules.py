"""Combinations of RLT's settings that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from verl_memopt.algorithms.records import WITH_GREEDY_RESPONSES
from verl_memopt.config.reward_rules import ENABLE, MANAGER, RESIDENCY, RLT
from verl_memopt.config.schema import Settings
from verl_memopt.memory.knob import Refusal
from verl_memopt.memory.ranges import KL, needs_reference
from verl_memopt.recipes.rlt.settings import RltReward

_AR, _MODEL, _RLT = "actor_rollout_ref", "reward_model.model", "reward_model.rlt"
_FSDP, _PATH, _QUANTIZATION = f"{_MODEL}.fsdp_config", f"{_MODEL}.path", f"{_MODEL}.quantization"
_REF_OFFLOAD, _RANK = f"{_AR}.ref.fsdp_config.param_offload", f"{_AR}.model.lora_rank"
_TEACHER = f"{_RLT}.kl_teacher"

_Lists = Callable[[RltReward], tuple[Sequence[float], Sequence[str]]]
"""Gives the weights and the reductions of one sum of the reward."""


def _is_rlt(settings: Settings) -> bool:
    return settings.reward_model.reward_manager == RLT


def _with_student(settings: Settings) -> bool:
    return settings.reward_model.enable and _is_rlt(settings)


def _shares_reference(settings: Settings) -> bool:
    """Return whether no student is named, so that the reference is the student."""
    return _with_student(settings) and settings.reward_model.model.path is None


def _swaps(settings: Settings) -> bool:
    return _with_student(settings) and settings.reward_model.residency == "swap"


def _weighted(weights: str, reductions: str, lists: _Lists) -> Iterator[Refusal]:
    """Yield the rules of one sum of the reward."""

    def counts(settings: Settings) -> tuple[int, int]:
        values, names = lists(settings.reward_model.rlt)
        return len(values), len(names)

    def has_twice(settings: Settings) -> bool:
        names = lists(settings.reward_model.rlt)[1]
        return len(set(names)) < len(names)

    yield Refusal(
        (f"{_RLT}.{weights}", f"{_RLT}.{reductions}"),
        lambda settings: len(set(counts(settings))) > 1,
        "weights and reductions differ in number",
        "Give one weight for each reduction.",
        lambda settings: "there are {} weights for {} reductions".format(*counts(settings)),
    )
    yield Refusal((f"{_RLT}.{reductions}",), has_twice, "a reduction appears twice", "Name it once, with the sum of its weights.")


def _formula() -> Iterator[Refusal]:
    """Yield the rules of weights, reductions and temperatures."""
    yield from _weighted(
        "answer_log_prob_coeff", "reduction_log_prob_fn", lambda rlt: (rlt.answer_log_prob_coeff, rlt.reduction_log_prob_fn)
    )
    yield from _weighted(
        "kl_penalty_reward_coeff", "reduction_kl_fn", lambda rlt: (rlt.kl_penalty_reward_coeff, rlt.reduction_kl_fn)
    )

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
    """Yield the rules of the student's model and of where it lies."""
    kl_in_loss = f"{_AR}.actor.use_kl_loss"
    yield Refusal(
        (MANAGER, ENABLE),
        lambda settings: _is_rlt(settings) and not settings.reward_model.enable,
        "the manager rlt scores with a student, and no model scores",
        f"Set {ENABLE}=true.",
    )
    yield Refusal(
        (_PATH, RESIDENCY),
        lambda settings: _shares_reference(settings) and settings.reward_model.residency not in ("auto", "alias_ref"),
        "no student is named, so the reference is the student",
        f"Set {_PATH}, or {RESIDENCY}=auto.",
    )
    yield Refusal(
        (_PATH, RESIDENCY),
        lambda settings: (
            _with_student(settings)
            and settings.reward_model.model.path is not None
            and settings.reward_model.residency == "alias_ref"
        ),
        "the reference is the student, and another one is named",
        f"Remove {_PATH}, or set {RESIDENCY}=separate.",
    )
    yield Refusal(
        (_PATH, *KL),
        lambda settings: _shares_reference(settings) and not needs_reference(settings),
        "the reference is the student, and without a KL there is no reference",
        f"Set {_PATH} to the student's folder, or {kl_in_loss}=true.",
    )
    yield Refusal(
        (_TEACHER, *KL),
        lambda settings: (
            _with_student(settings) and settings.reward_model.rlt.kl_teacher == "reference" and not needs_reference(settings)
        ),
        "without a KL there is no reference",
        f"Set {_TEACHER}=policy, or {kl_in_loss}=true.",
    )
    yield Refusal(
        (_QUANTIZATION, _PATH),
        lambda settings: _shares_reference(settings) and settings.reward_model.model.quantization != "none",
        "the reference is the student",
        f"Set {_AR}.ref.quantization={{int8,nf4}} to store the reference in fewer bits, or {_PATH} to the student's folder.",
    )


def _swap() -> Iterator[Refusal]:
    """Yield the rules of a student that takes turns with the reference."""
    yield Refusal(
        (RESIDENCY, *KL),
        lambda settings: _swaps(settings) and not needs_reference(settings),
        "without a KL there is no reference to take turns with",
        f"Set {RESIDENCY}=separate.",
    )
    yield Refusal(
        (RESIDENCY, _RANK),
        lambda settings: _swaps(settings) and settings.actor_rollout_ref.model.lora_rank > 0,
        "with LoRA the reference is the policy's own base, and has no place of its own on the device",
        f"Set {RESIDENCY}=separate.",
    )
    yield Refusal(
        (RESIDENCY, _REF_OFFLOAD),
        lambda settings: _swaps(settings) and not settings.actor_rollout_ref.ref.fsdp_config.param_offload,
        "a reference that stays on the device leaves its place to nothing",
        f"Set {_REF_OFFLOAD}=true, or {RESIDENCY}=separate.",
    )
    quantized = "quantized weights have another shape"
    yield Refusal(
        (RESIDENCY, _QUANTIZATION),
        lambda settings: _swaps(settings) and settings.reward_model.model.quantization != "none",
        quantized,
        f"Set {_QUANTIZATION}=none, or {RESIDENCY}=separate.",
    )
    yield Refusal(
        (RESIDENCY, f"{_AR}.ref.quantization"),
        lambda settings: _swaps(settings) and settings.actor_rollout_ref.ref.quantization != "none",
        quantized,
        f"Set {_AR}.ref.quantization=none, or {RESIDENCY}=separate.",
    )


def _step() -> Iterator[Refusal]:
    """Yield what a step of RLT cannot do. The student scores after the log-probs of the whole rollout."""
    yield Refusal(
        ("algorithm.filter_groups.enable", MANAGER),
        lambda settings: _is_rlt(settings) and settings.algorithm.filter_groups.enable,
        "explanations are scored after the rollout is complete",
        "Set algorithm.filter_groups.enable=false.",
    )
    yield Refusal(
        ("algorithm.rollout_correction.bypass_mode", MANAGER),
        lambda settings: _is_rlt(settings) and settings.algorithm.rollout_correction.bypass_mode,
        "the KL of the reward needs the trainer's own log-probs of the explanations",
        "Set algorithm.rollout_correction.bypass_mode=false.",
    )
    yield Refusal(
        ("custom_reward_function.path", MANAGER),
        lambda settings: _is_rlt(settings) and settings.custom_reward_function.path is not None,
        "the student's score is the reward",
        "Set custom_reward_function.path=null.",
    )
    yield Refusal(
        ("data.custom_cls.path", MANAGER),
        lambda settings: _is_rlt(settings) and settings.data.custom_cls.path is not None,
        "the rows of RLT have columns of their own",
        "Set data.custom_cls.path=null.",
    )
    yield Refusal(
        ("algorithm.adv_estimator", MANAGER),
        lambda settings: _is_rlt(settings) and settings.algorithm.adv_estimator in WITH_GREEDY_RESPONSES,
        "its greedy responses would need log-probs and scores of their own",
        "Use grpo or rloo.",
    )
    yield Refusal(
        ("data.truncation", MANAGER),
        lambda settings: _is_rlt(settings) and settings.data.truncation != "error",
        "a teacher's prompt ends with the solution and a tag, and cannot be cut",
        "Set data.truncation=error, and data.filter_overlong_prompts=true to drop long prompts.",
    )


RLT_RULES: tuple[Refusal, ...] = (*_formula(), *_student(), *_swap(), *_step())
"""All rules of this file, for :mod:`verl_memopt.config.checks`."""
