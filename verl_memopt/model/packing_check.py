"""Check whether a model can be used: compare random rows in a pack with the same rows among other rows, and without packing.

A layer that carries state from token to token (linear attention, convolutions, state spaces) treats a pack as one sequence, so
the log-probs of a row depend on the rows before it. This raises no error, but training goes wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PretrainedConfig

from verl_memopt.config.schema import Actor, CriticModel, Model, ModelKnobs, ScoringModel, TeacherModel
from verl_memopt.errors import ConfigError
from verl_memopt.memory import lora
from verl_memopt.memory.lora_torch import chosen_adapters
from verl_memopt.memory.shared_prompt import prompt_groups
from verl_memopt.model.attention import REGISTERED
from verl_memopt.model.block_options import class_name
from verl_memopt.model.families import (
    PACKED_LAYERS,
    POLICY_KEY,
    check_lengths,
    features,
    layer_types,
    one_line,
    refused,
    working_types,
)
from verl_memopt.model.folder import TOKENIZER_FILES, check_vocabulary, existing_tokenizer, resolve_folder
from verl_memopt.model.packed_model import PackedModel, PolicyModel
from verl_memopt.model.packing import Pack, pack_groups, pack_rows
from verl_memopt.model.value_model import CRITIC_KEY, STORED_HEADS, ValueModel, random_head, stored_head
from verl_memopt.model.weights import (
    LM_HEAD,
    TIED,
    WeightFolder,
    check_dtypes,
    check_shapes,
    check_tied_head,
    empty_model,
    is_stack,
    load_model_config,
    local_part,
    named_weights,
    rebuild_buffers,
)
from verl_memopt.records import parse_json, read_record

GROUPS = (0, 1, 1, 2)
PROMPTS = (7, 9, 9, 6)
ANSWERS = (8, 10, 12, 9)
"""Group, number of prompt tokens and number of answer tokens of each row."""

WATCHED = 2
"""The row that is compared. Before it are a row of another group and a row of its group, after it a row of a third group."""

MIXING_BOUND = 1e-5
"""Largest allowed mean difference, in nats, of one row's log-probs between two packs that differ only in other rows' tokens.

Both packs have the same shapes, so they round alike. For every tested type the difference is exactly 0, in fp32 and in bfloat16.
"""

ROUNDINGS = {torch.float32: 400, torch.bfloat16: 40, torch.float16: 40}
"""Dtype -> the bound of :func:`packing_bound` for a model of two blocks, as a multiple of the dtype's rounding error."""


def packing_bound(dtype: torch.dtype, layers: int) -> float:
    """Return the largest allowed mean difference, in nats, between a row's log-probs in a pack and outside of it.

    The two differ by rounding, because sums have another order. With random weights (standard deviations of 0.02 and 0.06) and 4
    blocks, the largest measured difference over all tested types is 2.7e-6 in fp32 and 6.5e-3 in bfloat16. With 64 blocks the
    difference of Qwen3 and Llama is 0.5 to 1.7 times the one with 2 blocks in fp32, and 1.7 to 3 times in bfloat16.

    The bound grows with the fourth root of the number of blocks: by 2.4 times from 2 to 64 blocks. For 4 blocks it is 10 times
    the measured difference in fp32 and 28 times in bfloat16, because trained models have larger rounding errors.
    """
    rounding = torch.finfo(dtype).eps / 2
    return ROUNDINGS[dtype] * rounding * (max(layers, 2) / 2) ** 0.25


@dataclass(frozen=True)
class RowDifferences:
    """Mean differences of one row's log-probs in nats.

    Attributes:
        mixing: Difference between two packs in which the other rows differ.
        packing: Difference between a pack and the row alone, with eager attention and all logits at once. In the Llama family
            :class:`verl_memopt.model.decoder.Decoder` computes the row alone, in other families transformers' own forward.
    """

    mixing: float
    packing: float


def row_differences(packed_model: PackedModel, device: torch.device, prompt_groups: Sequence[int]) -> RowDifferences:
    """Measure how much packing changes one row, by three forwards of fewer than a hundred random tokens.

    A value model gets a random head, because a head of zeros would hide every difference. All ranks must call this in step. Rows
    with the same number in ``prompt_groups`` share the computation of their prompt.
    """
    # All ranks draw the same rows, because they compute the forwards in step.
    generator = torch.Generator().manual_seed(0)
    prompts, answers = _random_rows(packed_model, generator)
    others = _random_rows(packed_model, generator)
    # Rows of the watched row's group keep their prompt, because they share it with the watched row.
    kept = {row for row in range(len(GROUPS)) if GROUPS[row] == GROUPS[WATCHED]}
    changed_prompts = [prompts[row] if row in kept else others[0][row] for row in range(len(GROUPS))]
    changed_answers = [answers[row] if row == WATCHED else others[1][row] for row in range(len(GROUPS))]
    alone = pack_rows(prompts[WATCHED], PROMPTS[WATCHED : WATCHED + 1], answers[WATCHED], ANSWERS[WATCHED : WATCHED + 1])
    # Without TF32, which rounds fp32 to 10 bits: the bound expects full fp32.
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with random_head(packed_model, device) if isinstance(packed_model, ValueModel) else _uncompiled(packed_model.head):
            packed = _watched(_outputs(packed_model, _pack(prompts, answers, prompt_groups).to(device)))
            beside_others = _watched(_outputs(packed_model, _pack(changed_prompts, changed_answers, prompt_groups).to(device)))
            by_itself = _outputs(packed_model, alone.to(device), unpacked=True)
    finally:
        torch.set_float32_matmul_precision(precision)
        packed_model.end_pass()
    return RowDifferences(float((packed - beside_others).abs().mean()), float((packed - by_itself).abs().mean()))


@contextmanager
def _uncompiled(head: Any) -> Iterator[None]:
    # Do not compile the LM head inside the body: kernels should be compiled for the sizes of training, not for a few rows.
    compiled, head.compiled = head.compiled, False
    try:
        yield
    finally:
        head.compiled = compiled


def check_packing(
    packed_model: PackedModel, device: torch.device, dtype: torch.dtype, actor: Actor, source: str, key: str = POLICY_KEY
) -> None:
    """Refuse a model if a row's log-probs or values depend on how rows are packed.

    All ranks must call this in step. Fake and meta tensors have no values, so nothing is compared.

    Args:
        packed_model: The model, filled with its weights.
        device: The device on which it computes.
        dtype: Dtype of compute, on which the allowed rounding error depends.
        actor: Settings that say whether rows share their prompt.
        source: Folder of the model, for error messages.
        key: Section of the settings for the model, for error messages.

    Raises:
        ConfigError: Packing changes log-probs. The message names the model type and the layers that mix rows.
    """
    config = packed_model.lm.config
    if any(isinstance(local_part(parameter), FakeTensor) or parameter.is_meta for parameter in packed_model.parameters()):
        return
    try:
        differences = row_differences(packed_model, device, prompt_groups(GROUPS, actor))
    except (AssertionError, AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        reason = f"cannot compute packed rows ({type(error).__name__}: {one_line(error)})"
        raise refused(config, source, reason, key) from error
    # A broken download is the likely cause of values that are not finite, so check the weights before blaming packing.
    if not math.isfinite(differences.mixing):
        name = _not_finite(packed_model, device)
        if name is not None:
            raise ConfigError(f"{key}.path={source}: the weight {name} is not finite everywhere. Give a whole copy of the model.")
    what, unit = ("values", "") if isinstance(packed_model, ValueModel) else ("log-probs", " nats")
    # "not <=" and not ">", so that NaN is refused too.
    if not differences.mixing <= MIXING_BOUND:
        reason = (
            f"mix the tokens of different rows in {_mixing_layers(packed_model)}: other rows in a pack change a row's {what} by "
            f"{differences.mixing:.2g}{unit} on average"
        )
        raise refused(config, source, reason, key)
    bound = packing_bound(dtype, config.num_hidden_layers)
    if not differences.packing <= bound:
        reason = (
            f"give a row in a pack {what} that are {differences.packing:.2g}{unit} on average from those of the row alone; "
            f"rounding in {str(dtype).removeprefix('torch.')} explains {bound:.2g}. They compute {_mixing_layers(packed_model)}"
        )
        raise refused(config, source, reason, key)


def _not_finite(packed_model: PackedModel, device: torch.device) -> str | None:
    weights = dict(packed_model.named_parameters())
    # Each rank has only its own shards, so combine the answers of all ranks.
    finite = torch.stack([local_part(parameter).isfinite().all().to(device) for parameter in weights.values()]).int()
    if dist.is_initialized():
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return next((name for name, is_finite in zip(weights, finite.tolist(), strict=True) if not is_finite), None)


def _refuse_auxiliary_loss(config: PretrainedConfig, key: str) -> None:
    # It depends on all tokens of a micro-batch together. So a loss that is the same for any packing cannot have it.
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0.0):
        raise ConfigError(
            f"{key}.path: its config asks for an auxiliary loss that balances experts (output_router_logits=true), and updates "
            f"here have none. Set {key}.override_config.output_router_logits=false to train without it."
        )


def _random_rows(packed_model: PackedModel, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    vocabulary = packed_model.embedding_weight.shape[0]

    def tokens(size: int) -> Tensor:
        return torch.randint(vocabulary, (size,), generator=generator)

    by_group = {group: tokens(size) for group, size in dict(zip(GROUPS, PROMPTS, strict=True)).items()}
    return [by_group[group] for group in GROUPS], [tokens(size) for size in ANSWERS]


def _pack(prompts: list[Tensor], answers: list[Tensor], prompt_groups: Sequence[int]) -> Pack:
    return pack_groups(torch.cat(prompts), PROMPTS, torch.cat(answers), ANSWERS, prompt_groups)


def _watched(outputs: Tensor) -> Tensor:
    return outputs.split(ANSWERS)[WATCHED]


def _outputs(packed_model: PackedModel, pack: Pack, unpacked: bool = False) -> Tensor:
    with torch.no_grad():
        outputs = packed_model(pack, unpacked=unpacked)
    return outputs if isinstance(packed_model, ValueModel) else outputs[0]


def _mixing_layers(packed_model: PackedModel) -> str:
    # Layer types in the config that are not attention. If there are none, the classes of the modules inside the blocks.
    kinds = sorted(set(layer_types(packed_model.lm.config)) - set(PACKED_LAYERS))
    if kinds:
        return "layers of type " + ", ".join(kinds)
    parts = {class_name(module) for block in packed_model.blocks() for module in block.children() if any(module.children())}
    return "blocks of " + ", ".join(sorted(parts) or sorted({class_name(block) for block in packed_model.blocks()}))


# Build a model without weights on the driver, so that an unsupported model is refused before any worker starts.


class Checked(NamedTuple):
    """Facts from a model's files: the shape of each weight without adapters, the number of rows of the embedding, and more."""

    weights: dict[str, tuple[int, ...]]
    embedding_rows: int
    features: tuple[str, ...] = ()
    """Result of :func:`verl_memopt.model.families.features`."""
    has_more: bool = False
    """The folder has weights beside those of the text model, or other names for these, or has all experts of a block in one."""
    apart: tuple[str, ...] = ()
    """Names of the weights beside those of the text model."""


def check_architecture(model: Model | CriticModel, folder: Path, longest: int, key: str | None = None) -> Checked:
    """Refuse a model if its files show that it cannot be trained. Loads no weights. Return facts from the files.

    A reference is checked with the policy's settings too. A critic's folder may have a value head, and needs no LM head.
    ``longest`` is the number of tokens of the longest prompt and response together. ``key`` is the section of the settings, for
    error messages. None = the section of the policy or the critic.

    Raises:
        ConfigError: The model type is not supported. The message has the reason and the tested types. Or files or weights of the
            folder are missing, or the config ties the LM head to the embedding but the files have another head.
    """
    key = key or (CRITIC_KEY if isinstance(model, CriticModel) else POLICY_KEY)
    config = load_model_config(model, folder, key)
    # The kernel computes nothing here. With this one transformers checks more of a model than with others.
    lm = empty_model(config, REGISTERED["sdpa"], torch.float32, bool(model.trust_remote_code), key)
    packed_model = ValueModel(lm, key=key) if isinstance(model, CriticModel) else PolicyModel(lm, 0, False)
    # Weights whose name in the folder differs: name in the model -> name in the folder.
    stored = stored_head(folder, key) if isinstance(model, CriticModel) else {}
    if model.lora_rank > 0:
        targets = model.target_modules, model.exclude_modules, model.target_parameters
        chosen_adapters(lm, targets, packed_model.computes_experts, key)
    check_lengths(config, longest)
    if key in (POLICY_KEY, CRITIC_KEY):
        _refuse_auxiliary_loss(config, key)
    shapes = {name: tuple(parameter.shape) for name, parameter in named_weights(packed_model)}
    weights = WeightFolder(folder, key)
    check_dtypes(folder, f"{key}.path={folder}")
    read = {stored_name: shape for name, shape in shapes.items() if (stored_name := stored.get(name, name)) is not None}
    # Check shapes before computing anything, because a wrong size in the config could need any amount of memory.
    check_shapes(weights, read, key)
    rebuild_buffers(packed_model, torch.device("cpu"), key)
    missing = sorted(read.keys() - weights.names.keys())
    left_over = sorted(weights.names.keys() - read.keys() - (LM_HEAD if stored else TIED))
    if config.model_type not in working_types() and (missing or left_over):
        example, has = (missing[0], "model") if missing else (left_over[0], "checkpoint")
        reason = f"use other names for their weights in a checkpoint than in the model (only the {has} has {example})"
        raise refused(config, str(folder), reason, key)
    embedding = packed_model.embedding_weight
    if packed_model.tied:
        name = next(name for name, parameter in named_weights(packed_model) if parameter is embedding)
        check_tied_head(weights, name, folder)
    renamed = any(name != stored_name for name, stored_name in weights.stored.items())
    whole_experts = any(map(is_stack, weights.stored))
    has_more = bool(weights.apart) or renamed or whole_experts
    return Checked(shapes, int(embedding.shape[0]), features(config), has_more, tuple(weights.apart))


# The folder of a reward model. The driver checks its contents here.


REWARD_KEY = "reward_model.model"
"""Section of the settings for the model of the reward model."""


@dataclass(frozen=True)
class RewardFolder:
    """The folder of a checked reward model. ``tokenizer`` is its own tokenizer. None = it reads the policy's token ids."""

    folder: Path
    tokenizer: Any


TEACHER_KEY = "teacher"
"""Section of the settings for the teacher."""


def frozen_causal_model(own: ScoringModel | TeacherModel, policy: Model) -> Model:
    """Return the settings of a frozen causal LM: the policy's knobs without those that need training."""
    without_training = {"enable_gradient_checkpointing": False, "lora_rank": 0, "lora_adapter_path": None}
    kept = {name: getattr(own, name) for name in ("trust_remote_code", "external_lib", "override_config")}
    changes: dict[str, Any] = {"path": str(own.path), "hf_config_path": None, **kept, **without_training}
    if isinstance(own, TeacherModel) and own.lora_adapter_path is not None:
        changes |= {"lora_adapter_path": own.lora_adapter_path, **adapter_shape(own.lora_adapter_path)}
    return replace(policy, **changes)


def adapter_shape(folder: str) -> dict[str, Any]:
    """Return the settings of a teacher's adapters by their names in :class:`Model`.

    Raises:
        ConfigError: The folder has no adapters, or adapters that are not supported.
    """
    key = f"{TEACHER_KEY}.model.lora_adapter_path={folder}"
    path = Path(folder).expanduser() / "adapter_config.json"
    if not path.is_file():
        raise ConfigError(f"{key}: it has no adapter_config.json. Give a folder in the peft format.")
    try:
        config = parse_json(read_record(path, follow=True), dict[str, Any])
        reasons = lora.not_here(config)
    except (OSError, ValueError, AttributeError) as problem:
        raise ConfigError(f"{key}: its adapter_config.json is no JSON object. Give a folder in the peft format.") from problem
    if reasons or not config.get("r"):
        raise ConfigError(f"{key}: its adapter_config.json has {'; '.join(reasons) or 'no rank r'}. Give adapters without them.")
    return lora.settings_in(config)


def frozen_value_model(model: ScoringModel, policy: Model) -> CriticModel:
    knobs = {field.name: getattr(policy, field.name) for field in fields(ModelKnobs)}
    # A frozen model has no backward and no adapters.
    knobs |= {"enable_gradient_checkpointing": False, "lora_rank": 0, "lora_adapter_path": None}
    return CriticModel(
        path=model.path,
        trust_remote_code=model.trust_remote_code,
        external_lib=model.external_lib,
        override_config=model.override_config,
        attn_implementation=policy.attn_implementation,
        **knobs,
    )


def find_reward_model(model: ScoringModel, policy: Model, policy_tokenizer: Any, longest: int) -> RewardFolder:
    """Return the reward model's folder and its own tokenizer, if it has one.

    ``longest`` is the number of tokens of the longest prompt and response together.

    Raises:
        ConfigError: The folder does not exist, has no head with one output or no tokenizer. Or its rows cannot be packed, or it
            must read token ids of the policy that it does not have.
    """
    folder = resolve_folder(str(model.path), f"{REWARD_KEY}.path", model.trust_remote_code)
    config = load_model_config(frozen_value_model(model, policy), folder, REWARD_KEY)
    check_lengths(config, longest)
    if stored_head(folder, REWARD_KEY)["score.weight"] is None:
        names = " or ".join(f"{name}.weight" for name in STORED_HEADS)
        raise ConfigError(
            f"{REWARD_KEY}.path={folder}: the folder is not of a reward model: it has no {names} of shape [1, hidden size]. "
            "Give a sequence or token classifier with num_labels=1."
        )
    way_out = f"Add its files, or set {REWARD_KEY}.input_tokenizer=null if the model has the policy's tokenizer."
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
