"""Write a model folder in Hugging Face format, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PretrainedConfig

from verl_memopt.config.schema import Fsdp
from verl_memopt.distributed.file_records import sync_folder, sync_tree
from verl_memopt.errors import CheckpointError, ConfigError
from verl_memopt.memory.host_buffers import host_buffer
from verl_memopt.model.families import is_mxfp4
from verl_memopt.model.packed_model import dtype_of
from verl_memopt.model.text_part import is_part, stated_dtype, whole_config, with_dtype
from verl_memopt.model.weights import WeightFolder, stored_parts, stored_tensors
from verl_memopt.observe.files import free_space
from verl_memopt.observe.own_files import MARK, MODEL_RECORD, mark, others_in_model, remove_left
from verl_memopt.records import json_of

INDEX = "model.safetensors.index.json"
WRITTEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FILE_BYTES = 2 * 2**30
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
)
PROCESSORS = "*processor_config.json"
"""Files that say how a multimodal model reads images, videos and sound."""


DAMAGED = "Repair the file, or fetch or save the model again."


Weights = Iterator[tuple[str, Tensor]]
"""(name, whole tensor) pairs."""


def export_folder(
    folder: Path,
    config: PretrainedConfig,
    tokenizer_folder: Path,
    weights: Weights | None,
    writes: bool,
    dtype: torch.dtype | None = None,
    source: WeightFolder | None = None,
) -> None:
    """Write config, generation config, tokenizer and, if given, weights.

    All ranks must consume ``weights`` in step. None = write no weights. Only ranks with ``writes`` write files. The config gets
    ``dtype``. None = the config keeps its dtype. If ``config`` describes the text part of a model, ``source`` is the folder of
    the whole model: the other parts are copied from it, and names and config are those of the whole. None = write the text part
    alone.
    """
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder, config, dtype, source is not None and is_part(config))
        _copy_tokenizer(tokenizer_folder, folder)
        if source is not None:
            for file in source.folder.glob(PROCESSORS):
                shutil.copyfile(file, folder / file.name)
        if getattr(config, "auto_map", None):
            # Copy the Python files of a model with its own code, so that the written folder can be loaded like its source.
            for file in Path(str(config.name_or_path)).glob("*.py"):
                shutil.copyfile(file, folder / file.name)
    if weights is not None:
        stores = stored_tensors(weights, config.model_type) if source is None else _whole(weights, source, writes)
        _write_weights(folder, stores, writes)


def export_stored(folder: Path, stored: Path, weights: Weights, dtype: torch.dtype, source: WeightFolder | None = None) -> None:
    """Write a model with new weights. All other files are copied from ``stored``, which :func:`export_folder` wrote.

    ``weights`` have the dtype ``dtype``, which is written into the new config. ``source`` is as in :func:`export_folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(path for path in stored.iterdir() if path.is_file()):
        if file.suffix != ".safetensors" and file.name != INDEX:
            shutil.copyfile(file, folder / file.name)
    config = json_of(stored / "config.json", dict[str, Any], DAMAGED, CheckpointError)
    _write_json(folder / "config.json", with_dtype(config, dtype_name(dtype)))
    stores = stored_tensors(weights, config.get("model_type", "")) if source is None else _whole(weights, source, True)
    _write_weights(folder, stores, writes=True)


def _whole(weights: Weights, source: WeightFolder, writes: bool) -> Weights:
    # The weights of the text part under their names in a folder, and a copy of the others, which stay in the folder's files.
    # Experts are one tensor or one by one, as the folder has them.
    for whole in weights:
        for name, tensor in [whole] if whole[0] in source.stored else stored_parts(*whole):
            yield source.stored[name], source.in_file(name, tensor)
    if writes:
        yield from source.read_apart()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stored_dtype(folder: Path, otherwise: torch.dtype) -> torch.dtype:
    config = json_of(folder / "config.json", dict[str, Any], DAMAGED, CheckpointError)
    name = stated_dtype(config)
    return next((dtype for dtype in WRITTEN_DTYPES if dtype_name(dtype) == name), otherwise)


def saved_dtype(folder: Path, fsdp: Fsdp) -> torch.dtype:
    return stored_dtype(folder, dtype_of(fsdp.model_dtype, "fsdp_config.model_dtype"))


def write_generation_config(folder: Path, source: Path, eos_token_ids: Sequence[int]) -> None:
    # Write the generation config of a model folder, with the tokens that ended an answer in the run.
    path = source / "generation_config.json"
    config = json_of(path, dict[str, Any], DAMAGED, CheckpointError) if path.is_file() else {}
    listed = config.get("eos_token_id")
    if set(listed if isinstance(listed, list) else [listed]) == set(eos_token_ids):
        shutil.copyfile(path, folder / path.name)
        return
    _write_json(folder / path.name, config | {"eos_token_id": list(eos_token_ids)})


# A model folder gets its name only when it is complete. Until then an older folder keeps the name.


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """Yield a new folder that gets the name ``final`` at the end of the body. If the body fails, nothing changes.

    Files of an older folder that a run wrote are removed. Files of the user in it are kept.

    Raises:
        CheckpointError: A file cannot be written.
        ConfigError: No run wrote a file or folder whose name is needed.
    """
    aside, old = (final.with_name(f"{final.name}{suffix}.partial") for suffix in ("", ".old"))
    if old.exists() and not final.exists():
        # A run was killed between the two renames below.
        old.rename(final)
    for left in (aside, old):
        remove_left(left)
    try:
        aside.mkdir(parents=True)
        mark(aside)
        yield aside
        _keep_others(final, aside)
        (aside / MARK).unlink()
        # Force all bytes to disk before the rename, so that the folder is complete even after a power failure.
        sync_tree(aside)
        if final.exists():
            final.rename(old)
        aside.rename(final)
        sync_folder(final.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{final}: the model could not be written: {error} ({free_space(final)}).") from error
    finally:
        for left in (aside, old) if final.exists() else (aside,):
            shutil.rmtree(left, ignore_errors=True)


def _keep_others(final: Path, aside: Path) -> None:
    for name in others_in_model(final):
        if final.is_symlink() or not final.is_dir() or (aside / name).exists():
            raise ConfigError(f"{final}: {name} is there, and no run wrote it. Move it away, or give another folder.")
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(final / name, aside / name, follow_symlinks=False)


ADAPTER = "adapter"
"""Name of the folder in a model folder with only the adapters, in the peft format."""
RECORD = MODEL_RECORD


def write_record(folder: Path, step: int, role: str, base_model: str, dtype: torch.dtype) -> None:
    # Call it last: it lists the files of the folder, which a later save may replace.
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {MARK} | {RECORD}
    record = {"step": step, "role": role, "base_model": base_model, "dtype": dtype_name(dtype)}
    _write_json(folder / RECORD, {**record, "files": sorted(files)})


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, default=str, sort_keys=True) + "\n", encoding="utf-8")


def _write_config(folder: Path, config: PretrainedConfig, dtype: torch.dtype | None, whole: bool) -> None:
    if whole:
        content = whole_config(config)
        _write_json(folder / "config.json", content if dtype is None else with_dtype(content, dtype_name(dtype)))
        return
    plain = config.to_dict()
    if dtype is not None:
        plain["dtype"] = dtype_name(dtype)
    # Training disables the KV cache, but generation with the exported model should use it.
    plain["use_cache"] = True
    # Weights are written decoded.
    if is_mxfp4(config):
        plain.pop("quantization_config")
    # Only this package knows the name of the kernel.
    plain.pop("_attn_implementation", None)
    _write_json(folder / "config.json", plain)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for pattern in (*TOKENIZER_FILES, "generation_config.json"):
        for file in source.glob(pattern):
            if file.is_file() and not file.name.endswith(".safetensors"):
                shutil.copyfile(file, folder / file.name)


def _write_weights(folder: Path, weights: Weights, writes: bool) -> None:
    files: list[SafetensorsWriter] = []
    with ExitStack() as stack:
        for name, tensor in weights:
            # The iterator gathers on all ranks, so ranks that do not write must exhaust it too.
            if not writes:
                continue
            if not files or files[-1].num_bytes + tensor.nbytes > FILE_BYTES or not files[-1].has_room(name, tensor):
                # The previous file is complete. Closing it writes its header.
                stack.pop_all().close()
                files.append(stack.enter_context(SafetensorsWriter(folder / f"part-{len(files):05d}.safetensors")))
            files[-1].add(name, tensor)
    if writes:
        _name_files(folder, [(file.path, file.names) for file in files], sum(file.num_bytes for file in files))


def _name_files(folder: Path, files: list[tuple[Path, list[str]]], total: int) -> None:
    # A single file needs no index, and gets the name that loaders look for first.
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    weight_map = {}
    for index, (path, names) in enumerate(files):
        final = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        # Rename only now, because the names contain the number of files.
        path.rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (folder / INDEX).write_text(index_text + "\n")


# Write a safetensors file tensor by tensor. The host holds only one chunk of one tensor, even for a large model.

HEADER_BYTES = 64 * 2**10
"""Bytes reserved for the header. It is first in the file but is written last. Blanks fill the rest."""

CHUNK_BYTES = 16 * 2**20
"""Most bytes of a tensor on the host at once."""

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtype -> its name in a safetensors file. Trained weights are floats. Parts that are copied may have other dtypes."""


class SafetensorsWriter:
    def __init__(self, path: Path) -> None:
        """Open a file. All methods raise OSError if the file cannot be written."""
        self.path = path
        self.num_bytes = 0
        self._header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = 0
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._file = path.open("wb")
        # Leave room for the header, which contains the offsets of all tensors and so is known last.
        self._file.write(b"\0" * (8 + HEADER_BYTES))

    @property
    def names(self) -> list[str]:
        return [name for name in self._header if name != "__metadata__"]

    def has_room(self, name: str, tensor: Tensor) -> bool:
        return self._header_bytes + len(json.dumps(self._entry(name, tensor))) < HEADER_BYTES - 2**10

    def add(self, name: str, tensor: Tensor) -> None:
        assert self.has_room(name, tensor), (self.path, name)
        entry = self._entry(name, tensor)
        self._write(tensor)
        self._header |= entry
        self._header_bytes += len(json.dumps(entry))
        self.num_bytes += tensor.nbytes

    def close(self) -> None:
        text = json.dumps(self._header).encode().ljust(HEADER_BYTES)
        assert len(text) == HEADER_BYTES, len(text)
        # The format allows blanks that pad the header to its reserved length.
        self._file.seek(0)
        self._file.write(HEADER_BYTES.to_bytes(8, "little") + text)
        self._file.close()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # An incomplete file gets no header, so that no reader accepts it.
        self.close() if kind is None else self._file.close()

    def _entry(self, name: str, tensor: Tensor) -> dict[str, object]:
        offsets = [self.num_bytes, self.num_bytes + tensor.nbytes]
        return {name: {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}}

    def _write(self, tensor: Tensor) -> None:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if not flat.numel():
            return
        size = min(CHUNK_BYTES, flat.numel())
        if self._chunk.numel() < size:
            self._chunk = host_buffer(size, flat.device, "export")
        for start in range(0, flat.numel(), CHUNK_BYTES):
            part = flat[start : start + CHUNK_BYTES]
            held = self._chunk[: part.numel()]
            # Copy piece by piece to the host, because the tensor may be on a device and the host must hold only one chunk.
            held.copy_(part)
            self._file.write(held.numpy().data)
