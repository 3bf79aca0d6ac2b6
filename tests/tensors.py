"""Tensors of models that may be sharded or plain, and of flat rows."""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


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
