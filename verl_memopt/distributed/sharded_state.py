"""Training state on disk in torch's distributed checkpoint format. The number of ranks may change before it is read."""

from __future__ import annotations

import inspect
import io
import math
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.serialization import get_crc32_options, set_crc32_options

from verl_memopt.distributed.device import device_rng_state, set_device_rng_state
from verl_memopt.distributed.file_records import HashedFile, Records, hashed_file
from verl_memopt.errors import CheckpointError
from verl_memopt.records import is_inside

WRITE_ERRORS = (OSError, RuntimeError, CheckpointException)
MODEL = "model."
"""Prefix of the keys of the model's tensors."""
READ_ERRORS = (
    *WRITE_ERRORS,
    *(ValueError, LookupError, TypeError, AttributeError, AssertionError, ImportError, EOFError, OverflowError, MemoryError),
    pickle.PickleError,
)
"""Errors that torch and pickle raise for a damaged file."""


class Masters(Protocol):
    """Fp32 master weights that are not the model's parameters."""

    def master(self, parameter: torch.Tensor, on_host: bool = False) -> torch.Tensor:
        """Return the fp32 master weights of a parameter. With ``on_host`` they may be on the host."""

    def set_master(self, parameter: torch.Tensor, values: torch.Tensor, first: int = 0) -> None: ...


def save_training_state(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LambdaLR,
    device: torch.device,
    contents: Sequence[str],
    masters: Masters | None = None,
) -> Records:
    """Write the chosen parts into ``folder``: dcp/ (model, optimizer) and extra_rank_N.pt (schedule, random generators).

    Each shard is written from the device on which it rests. Every file is forced to disk. Returns the record of each file that
    this rank wrote, with paths relative to ``folder``. ``contents`` are any of ``model``, ``optimizer`` and ``extra``. If
    ``masters`` are given, they are written instead of the parameters, one parameter at a time.

    Raises:
        CheckpointError: A file cannot be written. The message names the folder and the error of the disk.
    """
    records: Records = {}
    with _refused(folder, "checkpoint could not be written", WRITE_ERRORS), _one_checksum():
        state = _state(model, optimizer, contents)
        if state:
            held = _held_apart(state, model, masters)
            records |= _save(folder, state, _SavedMasters(held, masters))
        if "extra" in contents:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"extra_rank_{dist.get_rank()}.pt"
            with hashed_file(folder / name, records, name) as file:
                torch.save(_extra(schedule, device), cast("IO[bytes]", file))
    return records


def load_training_state(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LambdaLR,
    device: torch.device,
    contents: Sequence[str],
    masters: Masters | None = None,
) -> None:
    """Read the chosen parts back, in place.

    Schedule and random generators are read from this rank's file, or from rank 0's file if the number of ranks has grown.
    ``contents`` and ``masters`` are as in :func:`save_training_state`.

    Raises:
        CheckpointError: A file is missing or damaged. The message names the folder and the error.
    """
    with _refused(folder, "checkpoint could not be read", READ_ERRORS):
        state = _state(model, optimizer, contents)
        if state:
            held = _held_apart(state, model, masters)
            dcp.load(state, storage_reader=PlainReader(folder / "dcp"), planner=_LoadedMasters(held, masters))
        if "optimizer" in state:
            with _own_arguments(optimizer):
                set_optimizer_state_dict(model, optimizer, state["optimizer"])
        if "extra" in contents:
            own = folder / f"extra_rank_{dist.get_rank()}.pt"
            source = own if own.is_file() else folder / "extra_rank_0.pt"
            _restore_extra(torch.load(source, weights_only=True), schedule, device)


def save_weights(folder: Path, model: nn.Module) -> Records:
    with _refused(folder, "weights could not be written", WRITE_ERRORS), _one_checksum():
        return _save(folder, {"model": _weights(model)})


def load_weights(folder: Path, model: nn.Module) -> None:
    """Read the weights that :func:`save_weights` wrote, in place. The number of ranks may have changed.

    Raises:
        CheckpointError: A file is missing or damaged. The message names the folder and the error.
    """
    with _refused(folder, "weights could not be read", READ_ERRORS):
        dcp.load({"model": _weights(model)}, storage_reader=PlainReader(folder / "dcp"), planner=PlainPlanner())


METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath",),
}
"""Module -> names in it that the index of a checkpoint may use, besides dtypes. They only hold values, and run no code."""


class MetadataUnpickler(pickle.Unpickler):
    """Reads the index of a checkpoint. It calls only :data:`METADATA_CLASSES`, because a plain pickle could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in METADATA_CLASSES.get(module, ()):
            # Refuse the name before looking it up, because even an import may run code.
            raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class PlainReader(dcp.FileSystemReader):
    """Torch's checkpoint reader, but it runs no code from the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index, as torch's reader does.

        Raises:
            UnpicklingError: The index contains more than an index needs.
            ValueError: The listed parts do not make up a tensor, or the index names a file outside of the folder.
        """
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = MetadataUnpickler(file).load()
        check_index(metadata)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return cast(Metadata, metadata)


def check_index(metadata: Metadata) -> None:
    """Check that the parts of each tensor cover it exactly once, and that their files are in the checkpoint's folder.

    Torch reads only the listed parts, and does not report that the rest of a tensor keeps its old values.

    Raises:
        ValueError: The index is wrong. The message names the tensor.
    """
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise ValueError(".metadata is not the index of a checkpoint")
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata) and not _is_covered(stored):
            raise ValueError(f".metadata lists parts of {key} that do not make up the tensor")
    for index, place in dict(metadata.storage_data or {}).items():
        if not is_inside(place.relative_path):
            raise ValueError(f".metadata names the file {place.relative_path!r:.100} for {index.fqn}")


def _is_covered(stored: TensorStorageMetadata) -> bool:
    size = tuple(stored.size)
    boxes = [tuple(zip(part.offsets, part.sizes, strict=True)) for part in stored.chunks]
    if any(len(box) != len(size) for box in boxes):
        return False
    if any(at < 0 or n < 0 or at + n > most for box in boxes for (at, n), most in zip(box, size, strict=True)):
        return False
    filled = [box for box in boxes if all(n for _, n in box)]
    apart = all(
        any(a + n <= b or b + m <= a for (a, n), (b, m) in zip(one, other, strict=True)) for one, other in combinations(filled, 2)
    )
    return apart and sum(math.prod(n for _, n in box) for box in filled) == math.prod(size)


class PlainPlanner(dcp.DefaultLoadPlanner):
    """Torch's planner, but it runs no code from entries that are not tensors (such as a learning rate)."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # Read it as plain data first. An entry with anything else raises an UnpicklingError here.
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


Held = Mapping[str, torch.Tensor]
"""Key in a checkpoint -> the parameter whose master weights are stored under this key."""


def _held_apart(state: dict[str, Any], model: nn.Module, masters: Masters | None) -> Held:
    # Returns the parameters that have separate master weights, and replaces them in `state` by fp32 tensors of their shape.
    if masters is None or "model" not in state:
        return {}
    # With both names of a tied head.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    held = {name: parameters[name] for name in state["model"] if name in parameters}
    state["model"] |= {name: _stand_in(parameter) for name, parameter in held.items()}
    return {f"{MODEL}{name}": weight for name, weight in held.items()}


def _stand_in(parameter: torch.Tensor) -> torch.Tensor:
    # An fp32 tensor with one element in memory, shaped and sharded like a parameter. It is not on the meta device, because
    # torch's planner would allocate such a tensor.
    if not isinstance(parameter, DTensor):
        return torch.empty((), dtype=torch.float32).expand(parameter.shape)
    own, mesh, shape = parameter._local_tensor, parameter.device_mesh, parameter.shape
    element = torch.empty((), dtype=torch.float32, device=own.device).expand(own.shape)
    return DTensor.from_local(element, mesh, parameter.placements, run_check=False, shape=shape, stride=parameter.stride())


class _MastersApart:
    def __init__(self, held: Held, masters: Masters | None) -> None:
        super().__init__()
        self._held, self._masters = held, masters


class _SavedMasters(_MastersApart, dcp.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn not in self._held:
            return super().lookup_object(index)
        assert self._masters is not None
        # Compute master weights only when they are written, so that only those of one parameter exist at a time.
        master = self._masters.master(self._held[index.fqn], on_host=True)
        return master._local_tensor if isinstance(master, DTensor) else master


class _LoadedMasters(_MastersApart, PlainPlanner):
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        if read_item.dest_index.fqn not in self._held:
            return super().resolve_tensor(read_item)
        return torch.empty(read_item.lengths, dtype=torch.float32)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        weight = self._held.get(read_item.dest_index.fqn)
        if weight is None:
            super().commit_tensor(read_item, tensor)
            return
        assert self._masters is not None
        # Shards consist of whole rows, so the read part is one contiguous range of elements.
        first = read_item.dest_offsets[0] * weight.shape[1:].numel() if weight.ndim else 0
        self._masters.set_master(weight, tensor, first)


class StoredTensors(PlainReader):
    """Reads the model's tensors from a checkpoint of any number of ranks, in one process and one tensor at a time.

    Attributes:
        names: Name of a tensor in the model -> its key in the files.
    """

    def __init__(self, folder: Path) -> None:
        """Read the index. ``folder`` is the folder of a role in a checkpoint.

        Raises:
            CheckpointError: The files cannot be read. The message names the folder and the error.
        """
        super().__init__(folder / "dcp")
        self._folder = folder
        with self._refusals():
            self._metadata = super().read_metadata()
            stored = self._metadata.state_dict_metadata
        self._stored = {key: value for key, value in stored.items() if isinstance(value, TensorStorageMetadata)}
        self.names = {key.removeprefix(MODEL): key for key in self._stored if key.startswith(MODEL)}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the host, in the dtype in which it was saved.

        Raises:
            CheckpointError: As in the constructor.
        """
        key = self.names[name]
        stored = self._stored[key]
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        with self._refusals(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({key: tensor}, storage_reader=self, planner=PlainPlanner(), no_dist=True)
        return tensor

    def _refusals(self) -> AbstractContextManager[None]:
        return _refused(self._folder, "model could not be read", READ_ERRORS)


def detached(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter without autograd, on the device on which its shard rests.

    ``DTensor.detach`` raises an error if the shard of a device parameter rests on the host.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    return DTensor(parameter._local_tensor.detach(), parameter._spec, requires_grad=False)


@contextmanager
def _refused(folder: Path, what: str, errors: tuple[type[BaseException], ...]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        for cause in _causes(error):
            # These errors do not come from the disk. Torch wraps everything that ends a save, even an interrupt.
            if isinstance(cause, torch.OutOfMemoryError) or not isinstance(cause, Exception):
                raise cause from None
        raise CheckpointError(f"{folder}: the {what}: {_root(error)}.") from error


def _save(folder: Path, state: dict[str, Any], planner: dcp.SavePlanner | None = None) -> Records:
    writer, storage = _Writer(folder / "dcp"), HashingFileSystem(folder)
    writer.fs = storage
    dcp.save(state, storage_writer=writer, planner=planner)
    return storage.records


class _Writer(dcp.FileSystemWriter):
    """Torch's writer, but it frees each tensor once it is written.

    Torch keeps all tensors of a file until the file is complete. Joined master weights and copies of slices would then need host
    memory for the whole state.
    """

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as file:
            results = [_write_item(cast(HashedFile, file), name, item, planner) for item in plan.items]
            os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _write_item(file: HashedFile, name: str, item: WriteItem, planner: dcp.SavePlanner) -> WriteResult:
    first, data = file.tell(), planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
    else:
        data = data.detach().cpu()
        # Copy a slice, because torch.save writes the whole storage of a tensor.
        whole = data.untyped_storage().nbytes() == data.nbytes
        torch.save(data if whole else data.clone(), cast("IO[bytes]", file))
    length = file.tell() - first
    return WriteResult(item.index, length, _StorageInfo(name, first, length))


def _state(model: nn.Module, optimizer: Optimizer, contents: Sequence[str]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if "model" in contents:
        # Frozen parameters are not saved, because they can be read from the model's folder again.
        state["model"] = _weights(model, StateDictOptions(ignore_frozen_params=True))
    if "optimizer" in contents:
        state["optimizer"] = _optimizer_state(model, optimizer)
    return state


def _weights(model: nn.Module, options: StateDictOptions | None = None) -> dict[str, Any]:
    """Return the weights by name, on the devices on which their shards rest.

    Device parameters whose shards rest on the host are temporarily replaced by DTensors on the host. The optimizer identifies
    parameters by object, so the original parameters are restored before its state is read.
    """
    kept: list[tuple[nn.Module, str, nn.Parameter]] = []
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor) and parameter.device != parameter._local_tensor.device:
                if parameter not in stand_ins:
                    stand_ins[parameter] = nn.Parameter(detached(parameter), parameter.requires_grad)
                kept.append((module, name, parameter))
    try:
        for module, name, parameter in kept:
            module._parameters[name] = stand_ins[parameter]
        return get_model_state_dict(model, options=options)
    finally:
        for module, name, parameter in kept:
            module._parameters[name] = parameter


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    has_stepped = bool(optimizer.state)
    state = get_optimizer_state_dict(model, optimizer)
    # Torch creates a missing state by a step with gradients and a learning rate of 0. Do not count this step.
    for values in () if has_stepped else optimizer.state.values():
        if isinstance(values.get("step"), torch.Tensor):
            values["step"].zero_()
    return state


@contextmanager
def _one_checksum() -> Iterator[None]:
    # Disable torch's CRC-32 checksum of each tensor. It costs more than blake3, and torch never checks it on loading.
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


@contextmanager
def _own_arguments(optimizer: Optimizer) -> Iterator[None]:
    # Keep weight decay, betas and so on from the settings. Torch would silently replace them by the checkpoint's values.
    arguments = inspect.signature(type(optimizer)).parameters
    own = [{name: value for name, value in group.items() if name in arguments} for group in optimizer.param_groups]
    yield
    for group, options in zip(optimizer.param_groups, own, strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})


class HashingFileSystem(FileSystem):
    def __init__(self, root: Path) -> None:
        self.root = root
        self.records: Records = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with HashedFile(Path(path).open("wb")) as file:
            yield file
        self.records[self._name(path)] = file.record

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[self._name(new_path)] = self.records.pop(self._name(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        super().rm_file(path)
        self.records.pop(self._name(path), None)

    def _name(self, path: str | os.PathLike[str]) -> str:
        return Path(path).relative_to(self.root).as_posix()


def _extra(schedule: LambdaLR, device: torch.device) -> dict[str, Any]:
    extra = {"schedule_steps": schedule.last_epoch, "rng": torch.get_rng_state()}
    device_rng = device_rng_state(device)
    return extra if device_rng is None else {**extra, "device_rng": device_rng}


def _restore_extra(extra: dict[str, Any], schedule: LambdaLR, device: torch.device) -> None:
    # Torch's own load would also restore the saved base rates, and so ignore a changed learning rate in the settings.
    schedule.last_epoch = extra["schedule_steps"]
    rates = [base * factor(schedule.last_epoch) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates
    torch.set_rng_state(extra["rng"])
    if "device_rng" in extra:
        set_device_rng_state(device, extra["device_rng"])


def _root(error: BaseException) -> str:
    # Returns the cause in one line. A collective save wraps the errors of all ranks.
    return "; ".join(sorted({f"{type(cause).__name__}: {cause}" for cause in _causes(error)}))


def _causes(error: BaseException) -> list[BaseException]:
    return [failure for failure, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
