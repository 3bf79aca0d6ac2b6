"""Build a causal language model without weights, and fill a sharded model from safetensors files, tensor by tensor."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
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
from verl_memopt.memory.quantized_frozen import MXFP4, QUANTIZED_AT_ONCE
from verl_memopt.memory.quantized_frozen_torch import (
    PACKED,
    PackedExperts,
    Packing,
    mxfp4_decoded,
    packed_experts,
    quantized_layers,
)
from verl_memopt.model.attention import REGISTERED
from verl_memopt.model.families import (
    CORRECTION,
    POLICY_KEY,
    UNEVEN,
    family_of,
    impossible_size,
    is_uneven,
    one_line,
    refused,
    unsupported,
)
from verl_memopt.model.folder import files_of_index
from verl_memopt.model.packed_model import register_kernels
from verl_memopt.model.text_part import split_names, stated_dtype, text_config, turned_hidden
from verl_memopt.observe.byte_tracker import HOST, declare_host, mark, scope
from verl_memopt.observe.own_files import MODEL_RECORD
from verl_memopt.records import RecordError, json_of, read_json

logger = logging.getLogger(__name__)


def load_model_config(model: Model | CriticModel, folder: Path, key: str = POLICY_KEY) -> PretrainedConfig:
    """Load the model's config and merge ``override_config`` into it. Of a model that reads more than text, it is the text part's.

    Raises:
        ConfigError: ``external_lib`` cannot be imported, or the config cannot be read. ``override_config`` has an unknown field
            or a wrong value. The architecture is not supported, because its log-probs would be wrong.
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
    # Check this first: reading some fields of a config whose layers differ raises an error.
    if is_uneven(config.get_text_config()):
        raise refused(config, source, f"{UNEVEN} (per_layer_config), which is not supported", key)
    if not Path(source).is_dir() and family_of(config.model_type).text is not None:
        raise ConfigError(
            f"{key}.hf_config_path={source}: a config of more than text must be in a folder here. Fetch the repository, and "
            "give its folder."
        )
    config = text_config(config)
    for name, value in model.override_config.items():
        if name in (config.per_layer_attributes or ()):
            raise ConfigError(
                f"{key}.override_config.{name}: this field differs from layer to layer (per_layer_config in config.json). Change "
                "it in the model's config.json."
            )
        if not hasattr(config, name):
            raise ConfigError(f"{key}.override_config.{name}: {type(config).__name__} has no such field. Remove it.")
        try:
            setattr(config, name, value)
        except (TypeError, ValueError, StrictDataclassError) as error:
            reason = one_line(error)
            raise ConfigError(f"{key}.override_config.{name}={value}: {reason}. Give a value that the field accepts.") from error
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
    """Build the model without storage (on the meta device), or with fake storage inside a fake tensor mode.

    The model is in evaluation mode, because its log-probs must match those of the engine, which applies no dropout. ``dtype`` is
    the dtype of the parameters.

    Raises:
        ConfigError: Transformers cannot build the model with attention over packed rows.
    """
    register_kernels()
    source = str(config.name_or_path)
    # Use a copy, because transformers changes the config of a model, and several models share the caller's config.
    config = type(config).from_dict(config.to_dict())
    # from_dict drops the name, which error messages need.
    config.name_or_path = source
    config._attn_implementation = attention
    # Training does not use a KV cache, and building it would waste memory.
    config.use_cache = False
    # Transformers looks for "sdpa" in the name of an attention, and refuses it for models whose attention has sinks. It may build
    # them with the name of another of our kernels: these read sinks.
    named = REGISTERED["eager"] if family_of(config.model_type).sinks else attention
    storage: AbstractContextManager[Any] = torch.device("meta") if detect_fake_mode() is None else nullcontext()
    with storage:
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=named, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # classes of transformers or code in a folder may raise anything
            reason = f"cannot be built with attention over packed rows ({type(error).__name__}: {one_line(error)})"
            raise refused(config, source, reason, key) from error
    model.config._attn_implementation = attention
    store_scalars(model)
    return model.eval()


SCALARS = ("layer_scalar",)
"""Names of factors that checkpoints have and that transformers keeps as buffers."""
BUFFERS = (*SCALARS, CORRECTION)
"""Names of all weights of checkpoints that transformers keeps as buffers."""


def store_scalars(model: nn.Module, names: tuple[str, ...] = SCALARS) -> None:
    """Turn such buffers into parameters that are not trained, under their names. They are then loaded and saved as weights.

    A trained model keeps :data:`CORRECTION` as a buffer, because FSDP2 and casts of units would round a parameter.
    """
    for module in model.modules():
        for name in [name for name in names if name in module._buffers]:
            factor = module._buffers.pop(name)
            assert factor is not None, name
            setattr(module, name, nn.Parameter(factor, requires_grad=False))


def rebuild_buffers(model: nn.Module, device: torch.device, key: str = POLICY_KEY) -> None:
    """Fill buffers that no checkpoint contains (rotary frequencies) by building their module again on the CPU."""
    for name, module in model.named_modules():
        missing = [buffer for buffer in module._non_persistent_buffers_set if getattr(module, buffer) is not None]
        # Transformers also keeps names of non-persistent buffers that are None. They need no values.
        if not missing:
            continue
        if isinstance(module, nn.Embedding) and missing == ["embed_scale"]:  # Gemma also keeps the value as a number
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
"""Dtypes that weights may have, by their names in the header of a safetensors file."""


class WeightFolder:
    """Reads the safetensors files of a model folder slice by slice. Only the requested slice is in memory.

    Files of most types store the experts of a block one by one, and models hold them as one tensor. Here they have the names and
    shapes of the model: ``experts.gate_up_proj`` [E, 2 x I, h], gate before up, and ``experts.down_proj`` [E, h, I]. Experts that
    are stored in MXFP4 are decoded when they are read.

    Attributes:
        folder: The folder.
        names: Name of each weight of the text model -> the file that has it, or that has its first part.
        stored: Name of each weight or part of the text model -> its name in that file.
        apart: Names of the other weights, which are not trained.
        mxfp4: Names of the experts that are stored in MXFP4.
    """

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
        # Open each file once. Files are memory-mapped, and bytes are read only when a slice is used.
        self._files = {name: self._open(folder / name) for name in sorted(files)}
        # A safetensors file has keys() but cannot be iterated.
        self._places = {tensor: name for name, file in self._files.items() for tensor in file.keys()}  # noqa: SIM118
        self.stored, self.apart = split_names(folder, self._places)
        self._stacks = _stacks(self.stored, f"{key}.path={folder}")
        inside = {part for parts in self._stacks.values() for expert in parts for part in expert}
        self.mxfp4 = frozenset(name.removesuffix(BLOCKS) for name in self.stored if name.endswith(f"_proj{BLOCKS}"))
        inside |= {name + part for name in self.mxfp4 for part in (BLOCKS, SCALES)}
        lost = next((name + SCALES for name in sorted(self.mxfp4) if name + SCALES not in self.stored), None)
        if lost is not None:
            raise ConfigError(f"{key}.path={folder}: {lost} is missing. Fetch the model again.")
        firsts = {name: name for name in self.stored if name not in inside}
        firsts |= {name: parts[0][0] for name, parts in self._stacks.items()} | {name: name + BLOCKS for name in self.mxfp4}
        self.names = {name: self._places[self.stored[first]] for name, first in firsts.items()}
        self._turned = self._turned_names()

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: not a whole safetensors file ({error}). Fetch or save it again.") from error

    def _turned_names(self) -> frozenset[str]:
        # Experts whose rows are columns in the file. As in transformers the shape decides.
        hidden = turned_hidden(self.folder)
        if hidden is None:
            return frozenset()
        whole = [name for name in self.stored if is_stack(name)]
        sides = {name: 1 if name.endswith("down_proj") else 2 for name in whole}
        return frozenset(name for name in whole if self._slice(name).get_shape()[sides[name]] != hidden)

    def in_file(self, name: str, tensor: Tensor) -> Tensor:
        """Return a whole tensor of the model as the files of the folder have it. It may be a view."""
        return tensor.transpose(1, 2) if name in self._turned else tensor

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.mxfp4:
            count, outputs, groups, size = self._slice(name + BLOCKS).get_shape()
            return count, groups * size * 2, outputs
        if name not in self._stacks:
            shape = tuple(self._slice(name).get_shape())
            return (shape[0], shape[2], shape[1]) if name in self._turned else shape
        parts = self._stacks[name]
        first = self._slice(parts[0][0]).get_shape()
        for part in (part for expert in parts for part in expert):
            if self._slice(part).get_shape() != first:
                raise ConfigError(f"{self.folder}: {part} has another shape than {parts[0][0]}. Fetch or save the model again.")
        return len(parts), first[0] * len(parts[0]), first[1]

    def dtype(self, name: str) -> str:
        if name in self.mxfp4:
            return "BF16"
        stated: str = self._slice(self._stacks[name][0][0] if name in self._stacks else name).get_dtype()
        return stated

    def is_stacked(self, name: str) -> bool:
        """Whether a tensor is put together from several in the files, or turned, so that no part of a file is the tensor."""
        return name in self._stacks or name in self._turned

    def read(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """Return a region of one tensor in the file's dtype, as a view of the mapped file on the host.

        ``region`` has a slice per dimension. An empty tuple means the whole tensor. The region of a tensor that is stacked is a
        copy. :meth:`copy_into` makes none. A turned tensor is a view with other strides.

        Raises:
            ConfigError: By the file's header the tensor has integers, or another dtype that weights cannot have.
        """
        if name in self._turned:
            experts, rows, columns = region or (slice(None),) * 3
            return self._read(name, (experts, columns, rows)).transpose(1, 2)
        if name not in self._stacks and name not in self.mxfp4:
            return self._read(name, region)
        region = region or tuple(slice(0, size) for size in self.shape(name))
        first = (slice(0, 0), slice(0, 0))
        dtype = torch.bfloat16 if name in self.mxfp4 else self._read(self._stacks[name][0][0], first).dtype
        out = torch.empty([part.stop - part.start for part in region], dtype=dtype)
        self.copy_into(out, name, region)
        return out

    def copy_into(self, out: Tensor, name: str, region: tuple[slice, ...]) -> None:
        """Copy a region of a tensor into ``out``, on any device and in any dtype. Errors are those of :meth:`read`."""
        if name in self.mxfp4:
            experts, rows, columns = region
            for place, expert in enumerate(range(experts.start, experts.stop)):
                codes, scales = (part.to(out.device) for part in self._codes(name, (slice(expert, expert + 1), columns)))
                out[place].copy_(mxfp4_decoded(codes[0], scales[0], torch.bfloat16)[:, rows].t())
            return
        if name not in self._stacks:
            out.copy_(self.read(name, region))
            return
        experts, rows, columns = region
        height = self._slice(self._stacks[name][0][0]).get_shape()[0]
        for place, parts in enumerate(self._stacks[name][experts]):
            for number, part in enumerate(parts):
                low, high = max(rows.start, number * height), min(rows.stop, (number + 1) * height)
                if low < high:
                    inside = slice(low - number * height, high - number * height)
                    out[place, low - rows.start : high - rows.start].copy_(self._read(part, (inside, columns)))

    def copy_packed_into(self, out: Tensor, name: str, first: int = 0) -> None:
        """Copy the bytes of experts that are stored in MXFP4, from the ``first`` on, into ``out``, uint8 [e, m, row bytes]."""
        for expert, own in enumerate(out, first):
            codes, scales = self._codes(name, (slice(expert, expert + 1), slice(0, out.shape[1])))
            own[:, : codes.shape[2]].copy_(codes[0])
            own[:, codes.shape[2] :].copy_(scales[0])

    def _codes(self, name: str, region: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
        # Of some experts and outputs the codes, uint8 [e, m, n / 2], and the scales, uint8 [e, m, n / 32].
        with mapping():
            return self._slice(name + BLOCKS)[region].flatten(2), self._slice(name + SCALES)[region]

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(self.stored[name])

    def _file(self, name: str) -> Any:
        return self._files[self._places[self.stored[name]]]

    def _read(self, name: str, region: tuple[slice, ...]) -> Tensor:
        with mapping():
            part = self._slice(name)
            if part.get_dtype() not in FLOATS:
                raise ConfigError(
                    f"{self.folder / self._places[self.stored[name]]}: {name} has the dtype {part.get_dtype()}, and weights have "
                    f"{', '.join(FLOATS)}. The file is damaged, or the model is quantized. Fetch or save it again."
                )
            return part[region] if region else self._file(name).get_tensor(self.stored[name])

    def read_apart(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of :attr:`apart` under their names in the folder, as views of the mapped files."""
        for name in self.apart:
            with mapping():
                tensor = self._files[self._places[name]].get_tensor(name)
            yield name, tensor

    @property
    def apart_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.read_apart())


# Files store the experts of a block one by one, as `experts.7.gate_proj.weight`. A model holds them as one tensor.

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
BLOCKS, SCALES = "_blocks", "_scales"
"""Behind the name of experts that are stored in MXFP4: codes, uint8 [E, m, n / 32, 16], and scales, uint8 [E, m, n / 32]."""
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Name of a tensor of all experts -> the tensors of one expert of which it consists, one above the other."""


def _stacks(stored: Iterable[str], where: str) -> dict[str, list[list[str]]]:
    # Name in the model -> for each expert the names of its parts in the files.
    counts: dict[str, int] = {}
    for found in filter(None, map(EXPERT.fullmatch, stored)):
        counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
    stacks = {
        f"{experts}.{name}": [[f"{experts}.{number}.{part}.weight" for part in parts] for number in range(count)]
        for experts, count in counts.items()
        for name, parts in STACKS.items()
    }
    present = set(stored)
    missing = [part for parts in stacks.values() for expert in parts for part in expert if part not in present]
    if missing:
        raise ConfigError(f"{where}: {len(missing)} tensors of experts are missing, such as {missing[0]}. Fetch the model again.")
    return stacks


def refuse_stacked(weights: WeightFolder) -> None:
    """Refuse weights that are no part of a file, for a model that computes from its mapped files.

    Raises:
        ConfigError: The files store experts one by one, turned, or in MXFP4.
    """
    if weights.mxfp4:
        raise ConfigError(
            f"actor_rollout_ref.model.load_mode=mmap: the files in {weights.folder} store experts in MXFP4, which must be "
            "decoded. Set load_mode=stream."
        )
    stacked = next(filter(weights.is_stacked, weights.names), None)
    if stacked is not None:
        raise ConfigError(
            f"actor_rollout_ref.model.load_mode=mmap: the files in {weights.folder} store experts in another form than the "
            f"model, in which {stacked} holds all of a block. So it is no part of a file. Set load_mode=stream."
        )


def stored_tensors(weights: Iterable[tuple[str, Tensor]], model_type: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) pairs as files of a type store them: of most types experts one by one, as views of the whole."""
    whole = family_of(model_type).whole_experts
    for name, tensor in weights:
        yield from ((name, tensor),) if whole else stored_parts(name, tensor)


def stored_parts(name: str, tensor: Tensor, first: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Do the same for one tensor, of which ``tensor`` may be some rows. ``first`` is the number of the first row."""
    if not is_stack(name):
        yield name, tensor
        return
    experts, _, kind = name.rpartition(".")
    for number, expert in enumerate(tensor, first):
        names = (f"{experts}.{number}.{part}.weight" for part in STACKS[kind])
        yield from zip(names, expert.chunk(len(STACKS[kind])), strict=True)


def is_stack(name: str) -> bool:
    experts, _, kind = name.rpartition(".")
    return kind in STACKS and experts.endswith(".experts")


SWAPPED = {"bfloat16": "F16", "float16": "BF16"}
"""Dtype in a config -> the other dtype of two bytes, in which the same bytes are other numbers."""


class _Stated(TypedDict):
    dtype: NotRequired[str | None]
    torch_dtype: NotRequired[str | None]
    text_config: NotRequired[dict[str, Any] | None]


def check_dtypes(folder: Path, address: str) -> None:
    """Compare the dtype in the headers of the weight files with the dtype in config.json.

    Weights are read in the dtype of their header and then cast, so header and config may differ. But if a header says F16 and the
    bytes are BF16, all numbers are wrong, and nothing in the file shows this. If a run wrote the folder, its record
    (:data:`MODEL_RECORD`) has the dtype that was written, so another dtype in the header is an error. For other folders there is
    only a warning, because some published models have another dtype than their config.

    Raises:
        ConfigError: A run wrote the folder, and a header has changed since.
    """
    config = json_of(folder / "config.json", _Stated, "Fetch or save the model again.", ConfigError)
    stated = stated_dtype(config) or ""
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
            f"{address}: {file}: its header says that {odd} is {SWAPPED[stated]}, and the run that saved it wrote {stated}. The "
            "file is damaged. Export the checkpoint again (verl-memopt export)."
        )
    logger.warning(
        "%s: its header says %s, and config.json says %s. The weights are read as the header says. If the answers are gibberish, "
        "the header is wrong: fetch the model again", file, SWAPPED[stated], stated,
    )  # fmt: skip


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name in a Hugging Face checkpoint and the tensor of each weight: the parameters, then :data:`CORRECTION`."""
    corrections = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(f".{CORRECTION}"))
    # Without this prefix the names are those of a Hugging Face checkpoint.
    for name, weight in (*model.named_parameters(), *corrections):
        yield name.removeprefix("lm."), weight


def base_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter) for name, parameter in named_weights(model) if name.rsplit(".", 1)[-1] not in ADAPTERS)


def fill_from_folder(
    model: nn.Module, folder: Path, key: str = POLICY_KEY, stored: Mapping[str, str | None] | None = None
) -> None:
    """Copy this rank's shard of each parameter from safetensors files into a model, one tensor at a time.

    ``stored`` maps the names of parameters to their names in the folder. A parameter that is mapped to None starts with zeros.

    Raises:
        ConfigError: A tensor is missing, unexpected, or has another shape. The message lists the problems.
    """
    weights, renamed = WeightFolder(folder, key), stored or {}
    named = dict(base_weights(model))
    for name in (name for name, new_name in renamed.items() if new_name is None):
        # Outside of autograd, which forbids in-place writes to leaves that require gradients.
        with torch.no_grad():
            named.pop(name).zero_()
    parameters = {renamed.get(name) or name: parameter for name, parameter in named.items()}
    layers = {f"{name}.qweight": layer for name, layer in quantized_layers(model).items()}
    experts = packed_experts(model)
    ignored = TIED if stored is None else LM_HEAD
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items() if name not in layers}
    shapes |= {_stored(name): (layer.out_features, layer.in_features) for name, layer in layers.items()}
    for name, packed in experts.items():
        shapes[name] = shapes.pop(name + PACKED)[0], *packed.sides
    _tell_mxfp4(weights, {name for name, packed in experts.items() if packed.packing.kind == MXFP4}, parameters, key)
    _check_names(weights, shapes, folder, key, ignored)
    for name, parameter in parameters.items():
        # Each rank reads only its own rows, so no rank holds a whole tensor.
        local, region = local_part(parameter.detach()), local_region(parameter)
        # A rank may have no row of a small tensor, so it has nothing to read.
        if not local.numel():
            continue
        if name.endswith(PACKED):
            _fill_experts(local, weights, name.removesuffix(PACKED), region[0].start, experts[name.removesuffix(PACKED)])
        elif name in layers:
            _quantize_layer(local, weights, _stored(name), region[0].start, layers[name].packing)
        else:
            weights.copy_into(local, name, region)


def _tell_mxfp4(weights: WeightFolder, packed: set[str], parameters: Mapping[str, Tensor], key: str) -> None:
    # ``packed`` are the names of the model's experts that rest in MXFP4.
    if packed - weights.mxfp4:
        raise ConfigError(
            f"{key}.path={weights.folder}: its config says that experts are stored in MXFP4 (quantization_config), and its files "
            f"have {min(packed - weights.mxfp4)} otherwise. Remove quantization_config from config.json."
        )
    if weights.mxfp4 - packed:
        dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
        logger.info(
            "%s.path=%s: experts are stored in MXFP4, and decoded to %s. They stay as they are in a model that is quantised, and "
            "in the frozen base of adapters, on one device, if trainer and engine have weights of their own",
            key, weights.folder, dtype,
        )  # fmt: skip


def _quantize_layer(local: Tensor, weights: WeightFolder, name: str, first: int, packing: Packing) -> None:
    # Quantise the rows of a tensor in a file from row `first` on.
    inputs = slice(0, packing.in_features)
    _quantize_into(local, packing, lambda low, high: weights.read(name, (slice(first + low, first + high), inputs)))


def _fill_experts(local: Tensor, weights: WeightFolder, name: str, first: int, packed: PackedExperts) -> None:
    # Fill the bytes of experts, uint8 [e, m, row bytes], from expert `first` on.
    if packed.packing.kind == MXFP4:
        weights.copy_packed_into(local, name, first)
        return
    inputs = slice(0, packed.packing.in_features)

    def rows(expert: slice, low: int, high: int) -> Tensor:
        if packed.turned:
            return weights.read(name, (expert, inputs, slice(low, high)))[0].t()
        return weights.read(name, (expert, slice(low, high), inputs))[0]

    for number, one in enumerate(local, first):
        _quantize_into(one, packed.packing, partial(rows, slice(number, number + 1)))


def _quantize_into(local: Tensor, packing: Packing, read: Callable[[int, int], Tensor]) -> None:
    # Quantise rows piece by piece on the target device. ``read`` returns the rows from one number up to another.
    start, step = 0, max(QUANTIZED_AT_ONCE // packing.in_features, 1)
    for piece in local.split(step):
        piece.copy_(packing.quantize(read(start, start + len(piece)).to(piece.device)))
        start += len(piece)


def _stored(name: str) -> str:
    return name.removesuffix("qweight") + "weight"


TIED = frozenset({"lm_head.weight"})
"""Weights that a folder may contain although the model does not have them: a head that is tied to the embedding."""
REFERENCE_DTYPE = "actor_rollout_ref.ref.fsdp_config.model_dtype"
LM_HEAD = frozenset({"lm_head.weight", "lm_head.bias"})
"""Weights that a folder may contain in addition if the model has another head."""
TIED_ROWS = 4096
"""Number of rows of an embedding that are compared at once."""


def check_tied_head(weights: WeightFolder, embedding: str, folder: Path) -> None:
    """Refuse a folder whose config ties the LM head to the embedding although its files have a different head.

    This head would be ignored. Many folders contain an equal head, which is allowed.

    Raises:
        ConfigError: The weights differ.
    """
    head = "lm_head.weight"
    if head not in weights.names or embedding not in weights.names:
        return
    rows, same = weights.shape(head)[0], weights.shape(head) == weights.shape(embedding)
    # If the shapes differ, the first round raises the error.
    for start in range(0, rows if same else 1, TIED_ROWS):
        part = (slice(start, min(start + TIED_ROWS, rows)),)
        if not same or not torch.equal(weights.read(head, part).float(), weights.read(embedding, part).float()):
            raise ConfigError(
                f"actor_rollout_ref.model.path={folder}: its config ties the LM head to the embedding "
                f"(tie_word_embeddings=true), and its files hold a {head} that differs from {embedding}. Set "
                "actor_rollout_ref.model.override_config.tie_word_embeddings=false to use that head, or remove it from the files."
            )


def mapped_weights(model: nn.Module, folder: Path, dtype_key: str = REFERENCE_DTYPE) -> list[Tensor]:
    """Return this rank's shard of each parameter as a view of the mapped file. This reads only the values of buffers.

    ``dtype_key`` is the setting of the model's dtype, for error messages.

    Raises:
        ConfigError: As in :func:`fill_from_folder`, or the dtype in a file is not the dtype of the model.
    """
    weights, parameters = WeightFolder(folder), dict(named_weights(model))
    _check_names(weights, {name: tuple(parameter.shape) for name, parameter in parameters.items()}, folder, POLICY_KEY, TIED)
    refuse_stacked(weights)
    shards = []
    for name, parameter in parameters.items():
        if not isinstance(parameter, nn.Parameter):
            weights.copy_into(parameter, name, local_region(parameter))
            continue
        part = mapped(weights.read(name, local_region(parameter)))
        if part.dtype != parameter.dtype:
            raise ConfigError(
                f"actor_rollout_ref.model.load_mode=mmap: {name} is {part.dtype} in {folder}, but {parameter.dtype} in the "
                f"model. Set {dtype_key} to the dtype in the file, or set load_mode=stream."
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


# Two load modes: ``stream`` copies weights from their files shard by shard, and ``mmap`` leaves them in the mapped files until
# the device needs them.
#
# Bytes saved: in both modes a rank holds only its shard of a model. The host holds no copy, because the files are mapped, and
# each part is copied from the file straight to its place. ``mmap`` also saves the host buffer in which a reference with
# ``param_offload`` would rest. It has b_w x N / W bytes, for N parameters of b_w bytes each over W ranks. The file replaces this
# buffer, and the system may drop pages of the file when memory is short. A slice of a mapped tensor reserves the addresses of
# the whole tensor, but no memory.

KIND = "mapped file"


@contextmanager
def mapping() -> Iterator[None]:
    """Count tensors that are created inside the body as mapped file: they are on the host, but are not memory of the process."""
    with scope(KIND, HOST):
        yield


def mapped(part: Tensor) -> Tensor:
    declare_host(part.untyped_storage())
    mark(KIND, [part], HOST)
    return part
