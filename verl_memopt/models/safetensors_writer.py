"""Write a safetensors file tensor by tensor. The host holds one chunk of one tensor, whatever the size of the model."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from verl_memopt.memory.host.host_buffers import host_buffer

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
