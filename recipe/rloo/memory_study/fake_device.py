"""A GPU without memory: ``cuda`` tensors have shapes and dtypes but no values, and a simulated allocator counts their bytes.

What it counts is exact where the program decides it: the order in which tensors are made and dropped. Memory inside a kernel,
such as the workspace of a matrix product, is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from recipe.rloo.memory_study.allocator import CachingAllocator, NoRoom

DEVICE = torch.device("cuda", 0)


class NoRoomForTensor(Exception):  # noqa: N818 - an event, which the meter turns into an error with its phase
    """The simulated device has no room for a tensor.

    Args:
        cause: The refusal of the allocator.
        shape: Shape and dtype of the tensor, for example ``[8, 3115, 151669] float32``.
    """

    def __init__(self, cause: NoRoom, shape: str) -> None:
        """Keep the figures."""
        super().__init__(f"{shape}: {cause}")
        self.requested_bytes, self.held_bytes, self.shape = cause.requested_bytes, cause.held_bytes, shape


class FakeDevice(TorchDispatchMode):
    """Sends each storage that is made on the fake device through the simulated allocator, until the storage dies.

    Enter it with :func:`fake_device`.

    Args:
        allocator: Counts the bytes.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        """Know no storage yet."""
        super().__init__()
        self.allocator = allocator
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an op, and count the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == DEVICE.type:
                self._count(tensor)
        return result

    def _count(self, tensor: FakeTensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._deaths or not size:
            return
        try:
            self.allocator.allocate(key, size)
        except NoRoom as refusal:
            shape = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            raise NoRoomForTensor(refusal, shape) from None
        self._deaths[key] = weakref.ref(storage, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        if self._deaths.pop(key, None) is not None:
            self.allocator.free(key)


@contextmanager
def described_efficient_backward() -> Iterator[None]:
    """Tell torch inside the body what the backward of memory-efficient attention over several sequences returns.

    Torch's own description of it (2.11 and 2.13) leaves out the argument ``out``, and fails where a scale is given.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_efficient_attention_backward", _efficient_backward, "Meta", allow_override=True)
        yield


def _efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    gradients = (torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (q, k, v))
    return *gradients, torch.empty((), device=q.device)


@contextmanager
def fake_device(limit_bytes: int | None = None) -> Iterator[CachingAllocator]:
    """Run the body with a fake GPU, and yield its allocator. Tensors must be made on ``cuda`` and must not be read.

    Args:
        limit_bytes: Largest number of reserved bytes. None = no limit.
    """
    allocator = CachingAllocator(limit_bytes)
    # Without this, autograd would run the backward in a thread of the device, which knows no dispatch mode.
    with (
        torch.autograd.set_multithreading_enabled(False),
        described_efficient_backward(),
        FakeTensorMode(allow_non_fake_inputs=True),
        FakeDevice(allocator),
    ):
        yield allocator
