"""Tensors of models that may be sharded or plain, tensors of flat rows, and what torch does with tensors."""

from collections import Counter

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode


def whole_of(tensor):
    """Return the whole of a sharded tensor; a plain one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_of(tensor):
    """Return this rank's part of a sharded tensor; a plain one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(parameter, values):
    """Place whole values as a parameter is placed."""
    return distribute_tensor(values, parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else values


def row_of_each_token(lengths, total):
    """Return the row of each flat token, int64 [total]. ``lengths``, int64 [rows], sum to ``total``."""
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths, output_size=total)


class Operations(TorchDispatchMode):
    """Calls ``look(func, args, kwargs)`` before each operation that torch runs in the body."""

    def __init__(self, look):
        super().__init__()
        self._look = look

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._look(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def operations_named(names):
    """Return a context, and the counts of the operations with these names that torch runs in it."""
    counts = Counter()
    return Operations(lambda func, *_: counts.update({func.__name__.partition(".")[0]} & set(names))), counts
