"""Combinations of RLT's settings that are refused."""

from __future__ import annotations

from collections.abc import Iterator

from verl_memopt.algorithms.records import WITH_GREEDY_RESPONSES
from verl_memopt.config.reward_rules import ENABLE, MANAGER, RESIDENCY, RLT
from verl_memopt.knobs.conditions import KL, needs_reference
from verl_memopt.knobs.knob import Refusal

_AR, _MODEL, _RLT = "actor_rollout_ref", "reward_model.model", "reward_model.rlt"
_FSDP, _PATH, _QUANTIZATION = f"{_MODEL}.fsdp_config", f"{_MODEL}.path", f"{_MODEL}.quantization"
_REF_OFFLOAD, _RANK = f"{_AR}.ref.fsdp_config.param_offload", f"{_AR}.model.lora_rank"
_TEACHER = f"{_RLT}.kl_teacher"


def _formula() -> Iterator[Refusal]:
    """Yield the rules of weights, reductions and temperatures."""
    for weights, reductions in (
        ("answer_log_prob_coeff", "reduction_log_prob_fn"),
        ("kl_penalty_reward_coeff", "reduction_kl_fn"),
    ):
        yield Refusal(
            (f"{_RLT}.{weights}", f"{_RLT}.{reductions}"),
            lambda values, names: len(values) != len(names),
            "weights and reductions differ in number",
            "Give one weight for each reduction.",
            lambda values, names: f"there are {len(values)} weights for {len(names)} reductions",
        )
        yield Refusal(
            (f"{_RLT}.{reductions}",),
            lambda names: len(set(names)) < len(names),
            "a reduction appears twice",
            "Name it once, with the sum of its weights.",
        )
    yield Refusal(
        (f"{_RLT}.unbias_student_log_probs_temp", f"{_AR}.rollout.temperature"),
        lambda student, heat, samples: student is not None and student != (heat if samples else 1.0),
        "both sides of the KL would belong to different distributions",
        "Leave it out: the student follows the rollouts.",
        about=(f"{_AR}.rollout.do_sample",),
    )


def _student() -> Iterator[Refusal]:
    """Yield the rules of the student's model and of where it lies."""
    reference = (_AR + ".actor.use_kl_loss", "algorithm.use_kl_in_reward")
    yield Refusal(
        (MANAGER, ENABLE),
        lambda manager, enabled: manager == RLT and not enabled,
        "the manager rlt scores with a student, and no model scores",
        f"Set {ENABLE}=true.",
    )
    yield Refusal(
        (_PATH, RESIDENCY),
        lambda folder, where, enabled, manager: (
            enabled and manager == RLT and folder is None and where not in ("auto", "alias_ref")
        ),
        "no student is named, so the reference is the student",
        f"Set {_PATH}, or {RESIDENCY}=auto.",
        about=(ENABLE, MANAGER),
    )
    yield Refusal(
        (_PATH, RESIDENCY),
        lambda folder, where, enabled, manager: enabled and manager == RLT and folder is not None and where == "alias_ref",
        "the reference is the student, and another one is named",
        f"Remove {_PATH}, or set {RESIDENCY}=separate.",
        about=(ENABLE, MANAGER),
    )
    yield Refusal(
        (_PATH, *KL),
        lambda folder, in_reward, in_loss, enabled, manager: (
            enabled and manager == RLT and folder is None and not needs_reference(in_reward, in_loss)
        ),
        "the reference is the student, and without a KL there is no reference",
        f"Set {_PATH} to the student's folder, or {reference[0]}=true.",
        about=(ENABLE, MANAGER),
    )
    yield Refusal(
        (_TEACHER, *KL),
        lambda teacher, in_reward, in_loss, enabled, manager: (
            enabled and manager == RLT and teacher == "reference" and not needs_reference(in_reward, in_loss)
        ),
        "without a KL there is no reference",
        f"Set {_TEACHER}=policy, or {reference[0]}=true.",
        about=(ENABLE, MANAGER),
    )
    yield Refusal(
        (_QUANTIZATION, _PATH),
        lambda width, folder, enabled, manager: enabled and manager == RLT and folder is None and width != "none",
        "the reference is the student",
        f"Set {_AR}.ref.quantization={{int8,nf4}} to store the reference in fewer bits, or {_PATH} to the student's folder.",
        about=(ENABLE, MANAGER),
    )


def _swap() -> Iterator[Refusal]:
    """Yield the rules of a student that takes turns with the reference."""

    def swaps(where: str, enabled: bool, manager: str) -> bool:
        return enabled and manager == RLT and where == "swap"

    yield Refusal(
        (RESIDENCY, *KL),
        lambda where, in_reward, in_loss, enabled, manager: (
            swaps(where, enabled, manager) and not needs_reference(in_reward, in_loss)
        ),
        "without a KL there is no reference to take turns with",
        f"Set {RESIDENCY}=separate.",
        about=(ENABLE, MANAGER),
    )
    yield Refusal(
        (RESIDENCY, _RANK),
        lambda where, rank, enabled, manager: swaps(where, enabled, manager) and rank > 0,
        "with LoRA the reference is the policy's own base, and has no place of its own on the device",
        f"Set {RESIDENCY}=separate.",
        about=(ENABLE, MANAGER),
    )
    yield Refusal(
        (RESIDENCY, _REF_OFFLOAD),
        lambda where, offloaded, enabled, manager: swaps(where, enabled, manager) and not offloaded,
        "a reference that stays on the device leaves its place to nothing",
        f"Set {_REF_OFFLOAD}=true, or {RESIDENCY}=separate.",
        about=(ENABLE, MANAGER),
    )
    for key, why in (
        (_QUANTIZATION, "quantized weights have another shape"),
        (f"{_AR}.ref.quantization", "quantized weights have another shape"),
    ):
        yield Refusal(
            (RESIDENCY, key),
            lambda where, width, enabled, manager: swaps(where, enabled, manager) and width != "none",
            why,
            f"Set {key}=none, or {RESIDENCY}=separate.",
            about=(ENABLE, MANAGER),
        )


def _step() -> Iterator[Refusal]:
    """Yield what a step of RLT cannot do. The student scores after the log-probs of the whole rollout."""
    for key, wanted, why in (
        ("algorithm.filter_groups.enable", False, "explanations are scored after the rollout is complete"),
        (
            "algorithm.rollout_correction.bypass_mode",
            False,
            "the KL of the reward needs the trainer's own log-probs of the explanations",
        ),
        ("custom_reward_function.path", None, "the student's score is the reward"),
        ("data.custom_cls.path", None, "the rows of RLT have columns of their own"),
    ):
        yield Refusal(
            (key, MANAGER),
            lambda value, manager, wanted=wanted: manager == RLT and value != wanted,
            why,
            f"Set {key}={'null' if wanted is None else 'false'}.",
        )
    yield Refusal(
        ("algorithm.adv_estimator", MANAGER),
        lambda estimator, manager: manager == RLT and estimator in WITH_GREEDY_RESPONSES,
        "its greedy responses would need log-probs and scores of their own",
        "Use grpo or rloo.",
    )
    yield Refusal(
        ("data.truncation", MANAGER),
        lambda truncation, manager: manager == RLT and truncation != "error",
        "a teacher's prompt ends with the solution and a tag, and cannot be cut",
        "Set data.truncation=error, and data.filter_overlong_prompts=true to drop long prompts.",
    )


RLT_RULES: tuple[Refusal, ...] = (*_formula(), *_student(), *_swap(), *_step())
"""All rules of this file, for :mod:`verl_memopt.config.checks`."""
