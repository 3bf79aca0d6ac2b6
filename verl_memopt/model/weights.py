"""Builds a causal language model without weights, and fills a sharded one from safetensors, tensor by tensor."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from verl_memopt.config.schema import CriticModel, Model
from verl_memopt.errors import ConfigError
from verl_memopt.memory.lora_torch import ADAPTERS
from verl_memopt.memory.quantized_frozen import QUANTIZED_AT_ONCE
from verl_memopt.memory.quantized_frozen_torch import Packing, quantized_layers
from verl_memopt.model.families import (
    POLICY_KEY,
    UNEVEN,
    impossible_size,
    one_line,
    refused,
    unsupported,
)
from verl_memopt.model.folder import files_of_index
from verl_memopt.model.packed_model import register_kernels
from verl_memopt.observe.byte_tracker import HOST, declare_host, mark, scope
from verl_memopt.observe.own_files import MODEL_RECORD
from verl_memopt.records import RecordError, json_of, read_json

logger = logging.getLogger(__name__)


def load_model_config(model: Model | CriticModel, folder: Path, key: str = POLICY_KEY) -> PretrainedConfig:
    """Load the model's config and merge ``override_config`` into it.

    Raises:
        ConfigError: ``external_lib`` cannot be imported. The config cannot be read, or has no such field, or refuses its value.
            Or the architecture is not supported: its log-probs would be wrong.
    """
    if model.external_lib is not None:
        try:
            importlib.import_module(model.external_lib)
        except ImportError as error:
            raise ConfigError(
                f"{key}.external_lib={model.external_lib}: {error}. Install the module, or remove the key."
            ) from error
    source = model.hf_config_path or str(folder)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # a folder's own code may raise anything
        raise ConfigError(
            f"{key}.path={source}: its config.json cannot be read: {one_line(error)}. Correct the file, or use another folder."
        ) from error
    # First of all, because a config whose layers differ raises an error when another field is read.
    if getattr(config.get_text_config(), "is_heterogeneous", False):
        raise refused(config, source, f"{UNEVEN} (per_layer_config), which is not supported", key)
    for name, value in model.override_config.items():
        if not hasattr(config, name):
            raise ConfigError(f"{key}.override_config.{name}: {type(config).__name__} has no such field. Remove it.")
        try:
            setattr(config, name, value)
        except (TypeError, ValueError, StrictDataclassError) as error:
            reason = one_line(error)
            raise ConfigError(f"{key}.override_config.{name}={value}: {reason}. Give a value the field takes.") from error
    impossible = impossible_size(config)
    if impossible is not None:
        name, what = impossible
        setting = f"override_config.{name}" if name in model.override_config else f"path={source}: {name}"
        raise ConfigError(
            f"{key}.{setting}={getattr(config, name)!r}: {what}. Correct the number in config.json or in override_config."
        )
    unfit = unsupported(config)
    if unfit is not None:
        raise refused(config, source, unfit, key)
    return config


def empty_model(
    config: PretrainedConfig, attention: str, dtype: torch.dtype, trust_remote_code: bool, key: str = POLICY_KEY
) -> PreTrainedModel:
    """Build the model without storage (on meta), or with fake storage inside a fake mode.

    The model is in evaluation mode, because its log-probs must match those of the engine, which applies no dropout. ``dtype`` is
    the dtype of the master weights.

    Raises:
        ConfigError: Transformers cannot build the model with attention over packed rows.
    """
    register_kernels()
    source = str(config.name_or_path)
    # A copy, because transformers writes into the config of a model, and the caller's config is shared by several models.
    config = type(config).from_dict(config.to_dict())
    # from_dict drops the name, and errors show it.
    config.name_or_path = source
    config._attn_implementation = attention
    # Training reads no KV cache, and building one would waste memory.
    config.use_cache = False
    storage: AbstractContextManager[Any] = torch.device("meta") if detect_fake_mode() is None else nullcontext()
    with storage:
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # the classes of transformers, or a folder's own code, may raise anything
            reason = f"cannot be built with attention over packed rows ({type(error).__name__}: {one_line(error)})"
            raise refused(config, source, reason, key) from error
    return model.eval()


def rebuild_buffers(model: nn.Module, device: torch.device, key: str = POLICY_KEY) -> None:
    """Fill buffers that no checkpoint holds (rotary frequencies) by building their module again on the CPU."""
    for name, module in model.named_modules():
        missing = [buffer for buffer in module._non_persistent_buffers_set if getattr(module, buffer) is not None]
        # Transformers also keeps non-persistent names whose buffer is None. These have nothing to compute.
        if not missing:
            continue
        if isinstance(module, nn.Embedding) and missing == ["embed_scale"]:  # Gemma's: its factor is kept as a number too
            module.embed_scale = torch.tensor(module.scalar_embed_scale, device=device)
            continue
        try:
            fresh = type(module)(module.config)
        except Exception as error:  # the constructor of a module may raise anything
            config: Any = getattr(model, "lm", model).config
            where = f"{', '.join(missing)} of {name.removeprefix('lm.')} ({type(module).__name__})"
            raise refused(
                config, config.name_or_path, f"have buffers that cannot be computed from the config: {where}", key
            ) from error
        for buffer in missing:
            setattr(module, buffer, getattr(fresh, buffer).to(device))


INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights, as the header of a safetensors file names them."""


class WeightFolder:
    """The safetensors files of a model folder, read slice by slice; only the requested slice is in memory."""

    def __init__(self, folder: Path, key: str = POLICY_KEY) -> None:
        self.folder = folder
        index = folder / INDEX
        files = files_of_index(index) if index.is_file() else {"model.safetensors"}
        missing = [name for name in sorted(files) if not (folder / name).is_file()]
        if missing:
            raise ConfigError(
                f"{key}.path={folder}: {missing[0]} is missing. "
                "Weights must be in safetensors format; save the model again with save_pretrained."
            )
        # Opened once: files are mapped, and a slice is read where it is asked for.
        self._files = {name: self._open(folder / name) for name in sorted(files)}
        # A safetensors file lists its keys and cannot be iterated itself.
        self.names = {tensor: name for name, file in self._files.items() for tensor in file.keys()}  # noqa: SIM118

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: not a whole safetensors file ({error}). Fetch or save it again.") from error

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self.names[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        stated: str = self._files[self.names[name]].get_slice(name).get_dtype()
        return stated

    def read(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """Return a region of one tensor in the file's dtype, as a view of the mapped file on the host.

        ``region`` has a slice for each dimension, and is empty for the whole tensor.

        Raises:
            ConfigError: The file's header says that the tensor holds whole numbers, or another dtype that no weight has.
        """
        with mapping():
            part = self._files[self.names[name]].get_slice(name)
            if part.get_dtype() not in FLOATS:
                raise ConfigError(
                    f"{self.folder / self.names[name]}: {name} has the dtype {part.get_dtype()}, and weights have "
                    f"{', '.join(FLOATS)}. The file is damaged, or the model is quantized. Fetch or save it again."
                )
            return part[region] if region else self._files[self.names[name]].get_tensor(name)


SWAPPED = {"bfloat16": "F16", "float16": "BF16"}
"""Dtype of a config -> the other one of two bytes, as which the same bytes would be other numbers."""


class _Stated(TypedDict):
    dtype: NotRequired[str | None]
    torch_dtype: NotRequired[str | None]


def check_dtypes(folder: Path, address: str) -> None:
    """Compare the dtype that the headers of the weights state with the one of config.json.

    Weights are read as their header says, and then cast, so any float dtype is right: a config may ask for another. But a header
    that says F16 over the bytes of BF16 turns each number into another one, and nothing in the file shows it. Where the record
    of a run (:data:`MODEL_RECORD`) and the config beside it agree on the one, the other cannot have been written. Elsewhere a
    warning is all that can be said: some published models differ from their config.

    Raises:
        ConfigError: A run wrote the folder, and a header has been changed since.
    """
    config = json_of(folder / "config.json", _Stated, "Fetch or save the model again.", ConfigError)
    stated = config.get("dtype") or config.get("torch_dtype") or ""
    if stated not in SWAPPED or (not (folder / "model.safetensors").is_file() and not (folder / INDEX).is_file()):
        return
    weights = WeightFolder(folder)
    odd = next((name for name in weights.names if weights.dtype(name) == SWAPPED[stated]), None)
    if odd is None:
        return
    file = folder / weights.names[odd]
    try:
        by_run = read_json(folder / MODEL_RECORD, _Stated).get("dtype")
    except (OSError, RecordError):
        by_run = None
    if by_run == stated:
        raise ConfigError(
            f"{address}: {file}: its header says that {odd} is {SWAPPED[stated]}, and the run that wrote it wrote {stated}. The "
            "file is damaged. Export the checkpoint again (verl-memopt export)."
        )
    logger.warning(
        "%s: its header says %s, and config.json says %s. The weights are read as the header says. If the answers are gibberish, "
        "the header is wrong: fetch the model again", file, SWAPPED[stated], stated,
    )  # fmt: skip


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    # Without the prefix they are the names of a Hugging Face checkpoint.
    for name, parameter in model.named_parameters():
        yield name.removeprefix("lm."), parameter


def base_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in named_weights(model) if name.rsplit(".", 1)[-1] not in ADAPTERS)


def fill_from_folder(
    model: nn.Module, folder: Path, key: str = POLICY_KEY, stored: Mapping[str, str | None] | None = None
) -> None:
    """Copy each parameter's own shard from safetensors into a model, one tensor at a time.

    ``stored`` maps parameters to other names in the folder; None = not there, start with zeros.

    Raises:
        ConfigError: A tensor is missing, left over, or of another shape. The message lists them all.
    """
    weights, renamed = WeightFolder(folder, key), stored or {}
    named = dict(base_weights(model))
    for name in (name for name, new_name in renamed.items() if new_name is None):
        # The parameters are leaves that may require gradients, which autograd lets nobody write to in place.
        with torch.no_grad():
            named.pop(name).zero_()
    parameters = {renamed.get(name) or name: parameter for name, parameter in named.items()}
    layers = {f"{name}.qweight": layer for name, layer in quantized_layers(model).items()}
    ignored = TIED if stored is None else LM_HEAD
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items() if name not in layers}
    shapes |= {_stored(name): (layer.out_features, layer.in_features) for name, layer in layers.items()}
    _check_names(weights, shapes, folder, key, ignored)
    for name, parameter in parameters.items():
        # Each rank reads its own rows, so no rank ever holds a whole tensor.
        local, region = local_part(parameter.detach()), local_region(parameter)
        # A rank may hold no row of a small tensor, where the file has nothing to read.
        if not local.numel():
            continue
        if name in layers:
            _quantize_into(local, weights, _stored(name), region[0].start, layers[name].packing)
        else:
            local.copy_(weights.read(name, region))


def _quantize_into(local: Tensor, weights: WeightFolder, name: str, first: int, packing: Packing) -> None:
    # Quantise rows of a file's tensor, from `first` on, piece by piece on the target device.
    start, step = 0, max(QUANTIZED_AT_ONCE // packing.in_features, 1)
    for piece in local.split(step):
        rows = weights.read(name, (slice(first + start, first + start + piece.shape[0]), slice(0, packing.in_features)))
        piece.copy_(packing.quantize(rows.to(piece.device)))
        start += piece.shape[0]


def _stored(name: str) -> str:
    return name.removesuffix("qweight") + "weight"


TIED = frozenset({"lm_head.weight"})
"""Weights that a folder may hold beside those of the model: a head that is tied to the embedding."""
REFERENCE_DTYPE = "actor_rollout_ref.ref.fsdp_config.model_dtype"
LM_HEAD = frozenset({"lm_head.weight", "lm_head.bias"})
"""The same for a model that has another head."""
TIED_ROWS = 4096
"""Rows of an embedding that are compared at a time."""


def check_tied_head(weights: WeightFolder, embedding: str, folder: Path) -> None:
    """Refuse a folder whose config ties the LM head to the embedding while its files hold a head that differs.

    Such a head would be ignored. Many folders hold one that is equal.

    Raises:
        ConfigError: The weights differ. The message names the first rows that do.
    """
    head = "lm_head.weight"
    if head not in weights.names or embedding not in weights.names:
        return
    rows, same = weights.shape(head)[0], weights.shape(head) == weights.shape(embedding)
    # If the shapes differ, one round is enough to raise the error.
    for start in range(0, rows if same else 1, TIED_ROWS):
        part = (slice(start, min(start + TIED_ROWS, rows)),)
        if not same or not torch.equal(weights.read(head, part).float(), weights.read(embedding, part).float()):
            raise ConfigError(
                f"actor_rollout_ref.model.path={folder}: its config ties the LM head to the embedding "
                f"(tie_word_embeddings=true), and its files hold a {head} that differs from {embedding}. Set "
                "actor_rollout_ref.model.override_config.tie_word_embeddings=false to use that head, or remove it from the files."
            )


def mapped_weights(model: nn.Module, folder: Path, dtype_key: str = REFERENCE_DTYPE) -> list[Tensor]:
    """Return each parameter's shard as a view of the mapped file. Nothing is read yet.

    ``dtype_key``: the setting of the model's dtype, for errors.

    Raises:
        ConfigError: As in :func:`fill_from_folder`, or a file has another dtype than the model.
    """
    weights, parameters = WeightFolder(folder), dict(named_weights(model))
    _check_names(weights, {name: tuple(parameter.shape) for name, parameter in parameters.items()}, folder, POLICY_KEY, TIED)
    shards = []
    for name, parameter in parameters.items():
        part = mapped(weights.read(name, local_region(parameter)))
        if part.dtype != parameter.dtype:
            raise ConfigError(
                f"actor_rollout_ref.model.load_mode=mmap: {name} is {part.dtype} in {folder}, and the model rests as "
                f"{parameter.dtype}. Set {dtype_key} to the file's, or load_mode=stream."
            )
        shards.append(part)
    return shards


def local_part(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_region(parameter: Tensor) -> tuple[slice, ...]:
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def check_shapes(weights: WeightFolder, shapes: Mapping[str, tuple[int, ...]], key: str) -> None:
    stored = {name: shape for name, shape in shapes.items() if name in weights.names}
    _check_names(weights, stored, weights.folder, key, frozenset(weights.names))


def _check_names(
    weights: WeightFolder, shapes: dict[str, tuple[int, ...]], folder: Path, key: str, ignored: frozenset[str]
) -> None:
    problems = [f"missing {name}" for name in shapes if name not in weights.names]
    problems += [f"unexpected {name}" for name in weights.names if name not in shapes and name not in ignored]
    for name in shapes.keys() & weights.names.keys():
        if weights.shape(name) != shapes[name]:
            problems.append(f"{name} has shape {weights.shape(name)}, the config says {shapes[name]}")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ConfigError(f"{key}.path={folder}: weights and config disagree: {'; '.join(problems[:8])}{more}.")


# How weights come from their files: streamed shard by shard, or left in the mapped file until the device needs them.
#
# Bytes saved: in both modes no rank holds more of a model than its shard. The host holds no copy, because each file is mapped,
# and each tensor's part of it is copied straight to its place. ``mmap`` also saves the host buffer in which a reference with
# ``param_offload`` would rest, b_w x N / W bytes. The file takes its place, and the system may drop its pages when memory is
# short. A rank's slice of a mapped tensor reserves the addresses of the whole tensor, but no memory.

KIND = "mapped file"


@contextmanager
def mapping() -> Iterator[None]:
    """Inside the body, new tensors count as parts of a mapped file: on the host, but not memory of the process."""
    with scope(KIND, HOST):
        yield


def mapped(part: Tensor) -> Tensor:
    declare_host(part.untyped_storage())
    mark(KIND, [part], HOST)
    return part
