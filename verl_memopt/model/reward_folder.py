"""The folder of a reward model: what it must hold, which is checked on the driver, and how it is built."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from verl_memopt.config.schema import Actor, CriticModel, Model, ModelKnobs, ScoringModel
from verl_memopt.errors import ConfigError
from verl_memopt.model.families import check_lengths
from verl_memopt.model.folder import TOKENIZER_FILES, check_vocabulary, existing_tokenizer, resolve_folder
from verl_memopt.model.packing_check import refuse_sliding_window
from verl_memopt.model.value_model import STORED_HEADS, stored_head
from verl_memopt.model.weights import load_model_config

REWARD_KEY = "reward_model.model"
"""The settings section of the reward model's own model."""


@dataclass(frozen=True)
class RewardFolder:
    """A reward model that was found and checked. ``tokenizer`` is its own; None where it reads the policy's ids."""

    folder: Path
    tokenizer: Any


def frozen_value_model(model: ScoringModel, policy: Model) -> CriticModel:
    """Return the settings of a value model that computes a reward model: the policy's knobs, without anything that trains."""
    knobs = {field.name: getattr(policy, field.name) for field in fields(ModelKnobs)}
    knobs |= {"enable_gradient_checkpointing": False, "lora_rank": 0, "lora_adapter_path": None}
    return CriticModel(
        path=model.path,
        trust_remote_code=model.trust_remote_code,
        external_lib=model.external_lib,
        override_config=model.override_config,
        attn_implementation=policy.attn_implementation,
        **knobs,
    )


def find_reward_model(model: ScoringModel, policy: Model, policy_tokenizer: Any, longest: int, actor: Actor) -> RewardFolder:
    """Return the reward model's folder and its own tokenizer, if it has one.

    ``longest`` counts the tokens of the longest prompt and response together.

    Raises:
        ConfigError: There is no such folder, it has no head with one output, rows cannot be packed for it, it shares ids that it
            does not know, or it lacks a tokenizer.
    """
    folder = resolve_folder(str(model.path), f"{REWARD_KEY}.path", model.trust_remote_code)
    config = load_model_config(frozen_value_model(model, policy), folder, REWARD_KEY)
    check_lengths(config, longest)
    refuse_sliding_window(config, actor)
    if stored_head(folder, REWARD_KEY)["score.weight"] is None:
        names = " or ".join(f"{name}.weight" for name in STORED_HEADS)
        raise ConfigError(
            f"{REWARD_KEY}.path={folder}: the folder is not of a reward model: it has no {names} of shape [1, hidden size]. "
            "Give a sequence or token classifier with num_labels=1."
        )
    way_out = f"Add its files, or set {REWARD_KEY}.input_tokenizer=null where the model shares the policy's tokenizer."
    reading = f"{REWARD_KEY}.path={folder}", model.trust_remote_code, way_out
    if model.input_tokenizer is not None:
        return RewardFolder(folder, existing_tokenizer(folder, *reading))
    check_vocabulary(policy_tokenizer, config.get_text_config().vocab_size, f"{REWARD_KEY}.path={folder}")
    has_own = any((folder / name).is_file() for name in TOKENIZER_FILES)
    if has_own and existing_tokenizer(folder, *reading).get_vocab() != policy_tokenizer.get_vocab():
        raise ConfigError(
            f"{REWARD_KEY}.input_tokenizer=null, {REWARD_KEY}.path={folder}: its tokenizer is not the policy's, so it would "
            f"misread the policy's ids. Set {REWARD_KEY}.input_tokenizer=policy."
        )
    return RewardFolder(folder, None)
