"""The student of RLT: which of the policy's settings build it, and what its folder must hold, which is checked on the driver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_memopt.config.schema import Actor, Model, ScoringModel
from verl_memopt.errors import ConfigError
from verl_memopt.models.build import load_model_config
from verl_memopt.models.folder import check_vocabulary, resolve_folder
from verl_memopt.models.reward_folder import REWARD_KEY
from verl_memopt.models.trial_build import check_architecture

_WITHOUT_EFFECT = frozenset(
    (
        *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type", "initializer_range"),
        *("max_position_embeddings", "attention_dropout"),
    )
)
"""Entries of a model's config that change nothing in its forward at a given position."""


def student_model(student: ScoringModel, policy: Model) -> Model:
    """Return the settings of the student's model: the policy's knobs, without anything that trains.

    Args:
        student: The ``reward_model.model`` section of the settings.
        policy: The policy's ``model`` section.
    """
    without_training = {"enable_gradient_checkpointing": False, "lora_rank": 0, "lora_adapter_path": None}
    own = {name: getattr(student, name) for name in ("trust_remote_code", "external_lib", "override_config")}
    changes: dict[str, Any] = {"path": str(student.path), "hf_config_path": None, **own, **without_training}
    return replace(policy, **changes)


def find_student(student: ScoringModel, policy: Model, policy_tokenizer: Any, longest: int, actor: Actor) -> Path:
    """Return the folder of the student's model.

    Args:
        student: The ``reward_model.model`` section of the settings.
        policy: The policy's ``model`` section.
        policy_tokenizer: The policy's tokenizer, whose ids the student reads.
        longest: Tokens of the longest student sequence, as far as it is known.
        actor: The ``actor`` section of the settings, which says how rows are packed.

    Raises:
        ConfigError: There is no such folder, it does not hold a causal LM that can be computed here, or its embedding is smaller
            than the tokenizer.
    """
    folder = resolve_folder(str(student.path), f"{REWARD_KEY}.path", student.trust_remote_code)
    checked = check_architecture(student_model(student, policy), folder, longest, actor)
    check_vocabulary(policy_tokenizer, checked.embedding_rows, f"{REWARD_KEY}.path={folder}")
    return folder


def check_same_shape(student: ScoringModel, folder: Path, policy: Model, reference: Path) -> None:
    """Check that the reference's module computes the student once it holds the student's weights.

    Args:
        student: The ``reward_model.model`` section of the settings.
        folder: Folder of the student's model.
        policy: The policy's ``model`` section, with which the reference is built.
        reference: Folder of the reference's model.

    Raises:
        ConfigError: The configs of the models differ. The message names each entry that does.
    """
    one = load_model_config(student_model(student, policy), folder, REWARD_KEY).to_dict()
    other = load_model_config(policy, reference).to_dict()
    names = sorted((one.keys() | other.keys()) - _WITHOUT_EFFECT)
    different = [f"{name} ({one.get(name)} and {other.get(name)})" for name in names if one.get(name) != other.get(name)]
    if different:
        raise ConfigError(
            f"reward_model.residency=swap: the student {folder} cannot take the device memory of the reference {reference}: "
            f"they differ in {', '.join(different)}. Set reward_model.residency=separate, or choose a student of the "
            "reference's shape."
        )
