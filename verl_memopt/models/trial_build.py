"""Build a model without its weights on the driver, so that an unsupported one is refused before any worker starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from verl_memopt.config.schema import Actor, CriticModel, Model
from verl_memopt.models.architecture import POLICY_KEY, TESTED, check_lengths, refused
from verl_memopt.models.attention import REGISTERED, AttentionChoice
from verl_memopt.models.build import (
    LM_HEAD,
    TIED,
    WeightFolder,
    check_tied_head,
    empty_model,
    load_model_config,
    named_weights,
    rebuild_buffers,
)
from verl_memopt.models.packed_model import PackedModel
from verl_memopt.models.packing_check import refuse_sliding_window
from verl_memopt.models.policy_model import PolicyModel
from verl_memopt.models.value_model import CRITIC_KEY, ValueModel, stored_head

ANY_ATTENTION = AttentionChoice("sdpa", REGISTERED["sdpa"], "nothing is computed")
"""Nothing is computed. Transformers checks more of a model for this kernel than for the others."""


class Checked(NamedTuple):
    """What the files of a model say.

    Attributes:
        weights: name -> shape of each weight, without adapters.
        embedding_rows: Rows of the token embedding.
    """

    weights: dict[str, tuple[int, ...]]
    embedding_rows: int


def check_architecture(model: Model | CriticModel, folder: Path, longest: int, actor: Actor) -> Checked:
    """Refuse a model that cannot be trained, as far as its files say without loading the weights, and return what they say.

    Args:
        model: The settings of the policy's model, with which a reference is read too, or of the critic's. A critic's folder may
            have a value head, and need not have a language model's.
        folder: Folder of the model.
        longest: Tokens of the longest prompt and response together.
        actor: The ``actor`` section of the settings. It says how rows are packed.

    Raises:
        ConfigError: The model cannot be trained. The message names the model type, what is not supported and the types that are
            tested. Or it names what the folder lacks, or a head of its own that the config ties to the embedding.
    """
    packed_model, stored = _empty(model, folder)
    config = packed_model.lm.config
    check_lengths(config, longest)
    refuse_sliding_window(config, actor)
    rebuild_buffers(packed_model, torch.device("cpu"), _key(model))
    shapes = {name: tuple(parameter.shape) for name, parameter in named_weights(packed_model)}
    weights = WeightFolder(folder, _key(model))
    read = {there for name in shapes if (there := stored.get(name, name)) is not None}
    missing = sorted(read - weights.names.keys())
    left_over = sorted(weights.names.keys() - read - (LM_HEAD if stored else TIED))
    if config.model_type not in TESTED and (missing or left_over):
        one, has, other = (missing[0], "model", "checkpoint") if missing else (left_over[0], "checkpoint", "model")
        raise refused(
            config,
            str(folder),
            f"name their weights in a checkpoint otherwise than in the model (the {has} has {one}, the {other} not)",
            _key(model),
        )
    embedding = packed_model.embedding_weight
    if packed_model.tied:
        name = next(name for name, parameter in named_weights(packed_model) if parameter is embedding)
        check_tied_head(weights, name, folder)
    return Checked(shapes, int(embedding.shape[0]))


def _key(model: Model | CriticModel) -> str:
    return CRITIC_KEY if isinstance(model, CriticModel) else POLICY_KEY


def _empty(model: Model | CriticModel, folder: Path) -> tuple[PackedModel, Mapping[str, str | None]]:
    """Return the model without weights, and the names in the folder of those that have another name there."""
    key = _key(model)
    config = load_model_config(model, folder, key)
    lm = empty_model(config, ANY_ATTENTION, torch.float32, bool(model.trust_remote_code), key)
    if isinstance(model, CriticModel):
        return ValueModel(lm, key=key), stored_head(folder, key)
    return PolicyModel(lm, 0, False), {}
