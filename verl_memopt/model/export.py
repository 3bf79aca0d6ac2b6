"""Write a model folder in Hugging Face format, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from transformers import PretrainedConfig

from verl_memopt.memory.host_buffers import host_buffer

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


def export_folder(
    folder: Path, config: PretrainedConfig, tokenizer_folder: Path, weights: Iterator[tuple[str, Tensor]] | None, writes: bool
) -> None:
    """Write config, generation config, tokenizer and, where given, weights.

    ``weights`` are (name, whole tensor) pairs, which every rank consumes in step; None for no weights. Only a rank that
    ``writes`` does so.
    """
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder, config)
        _copy_tokenizer(tokenizer_folder, folder)
        if getattr(config, "auto_map", None):
            # A model with code of its own brings its Python files, so that the written folder loads as its source does.
            for file in Path(str(config.name_or_path)).glob("*.py"):
                shutil.copyfile(file, folder / file.name)
    if weights is not None:
        _write_weights(folder, weights, writes)


def _write_config(folder: Path, config: PretrainedConfig) -> None:
    plain = config.to_dict()
    # Training switches the cache off, and a model that others load should generate with one.
    plain["use_cache"] = True
    # The name of the kernel exists in this package only.
    plain.pop("_attn_implementation", None)
    (folder / "config.json").write_text(json.dumps(plain, indent=2, default=str, sort_keys=True) + "\n")


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for pattern in (*TOKENIZER_FILES, "generation_config.json"):
        for file in source.glob(pattern):
            if file.is_file() and not file.name.endswith(".safetensors"):
                shutil.copyfile(file, folder / file.name)


def _write_weights(folder: Path, weights: Iterator[tuple[str, Tensor]], writes: bool) -> None:
    files: list[SafetensorsWriter] = []
    with ExitStack() as stack:
        for name, tensor in weights:
            if not writes:
                continue
            if not files or files[-1].num_bytes + tensor.nbytes > FILE_BYTES or not files[-1].has_room(name, tensor):
                # The file before is complete, and closing it writes its header.
                stack.pop_all().close()
                files.append(stack.enter_context(SafetensorsWriter(folder / f"part-{len(files):05d}.safetensors")))
            files[-1].add(name, tensor)
    if writes:
        _name_files(folder, [(file.path, file.names) for file in files], sum(file.num_bytes for file in files))


def _name_files(folder: Path, files: list[tuple[Path, list[str]]], total: int) -> None:
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    weight_map = {}
    for index, (path, names) in enumerate(files):
        final = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        # The names hold the number of files, which is known only now.
        path.rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (folder / "model.safetensors.index.json").write_text(index_text + "\n")


# Write a safetensors file tensor by tensor. The host holds one chunk of one tensor, whatever the size of the model.

HEADER_BYTES = 64 * 2**10
"""Room for the header. It comes first in the file but is known last; blanks fill the rest."""

CHUNK_BYTES = 16 * 2**20
"""Most bytes of a tensor on the host at once."""

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


class SafetensorsWriter:
    """One open file. Tensors are added in order; :meth:`close` writes the header that names them."""

    def __init__(self, path: Path) -> None:
        """Open a file. This and every other method raise OSError where the disk refuses."""
        self.path = path
        self.num_bytes = 0
        self._header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = 0
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._file = path.open("wb")
        # The header comes first in the file but needs the places of all tensors, so its room is kept free.
        self._file.write(b"\0" * (8 + HEADER_BYTES))

    @property
    def names(self) -> list[str]:
        """The tensors written so far."""
        return [name for name in self._header if name != "__metadata__"]

    def has_room(self, name: str, tensor: Tensor) -> bool:
        """Return whether the header has room for the name of one more tensor."""
        return self._header_bytes + len(json.dumps(self._entry(name, tensor))) < HEADER_BYTES - 2**10

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor, from any device."""
        assert self.has_room(name, tensor), (self.path, name)
        entry = self._entry(name, tensor)
        self._write(tensor)
        self._header |= entry
        self._header_bytes += len(json.dumps(entry))
        self.num_bytes += tensor.nbytes

    def close(self) -> None:
        """Write the header and close the file."""
        text = json.dumps(self._header).encode().ljust(HEADER_BYTES)
        assert len(text) == HEADER_BYTES, len(text)
        self._file.seek(0)
        self._file.write(HEADER_BYTES.to_bytes(8, "little") + text)
        self._file.close()

    def __enter__(self) -> SafetensorsWriter:
        """Return the writer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the file, with its header if the body succeeded."""
        # An incomplete file gets no header, so that nothing takes it for a complete one.
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
            # Copied before it is written: the tensor may lie on a device, and the chunk limits what the host holds of it.
            held.copy_(part)
            self._file.write(held.numpy().data)
