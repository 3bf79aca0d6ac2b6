"""How weights come from their files: streamed shard by shard, or left in the mapped file until the device needs them.

Bytes saved: in both modes no rank holds more of a model than its shard. The host holds no copy, because each file is mapped, and
each tensor's part of it is copied straight to its place. ``mmap`` also saves the host buffer in which a reference with
``param_offload`` would rest, b_w x N / W bytes. The file takes its place, and the system may drop its pages when memory is short.
A rank's slice of a mapped tensor reserves the addresses of the whole tensor, but no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from verl_memopt.observe.byte_tracker import HOST, declare_host, mark, scope

KIND = "mapped file"


@contextmanager
def mapping() -> Iterator[None]:
    """Label tensors created inside as parts of a mapped file, which are of the host and no memory of the process."""
    with scope(KIND, HOST):
        yield


def mapped(part: Tensor) -> Tensor:
    """Label a tensor that stays as a part of a mapped file, and return it."""
    declare_host(part.untyped_storage())
    mark(KIND, [part], HOST)
    return part
