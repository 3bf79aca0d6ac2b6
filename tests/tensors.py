"""Tensors of models that may be sharded or plain, and of flat rows."""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole_of(tensor):
    """Gives the whole of a sharded tensor, and a plain one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_of(tensor):
    """Gives this rank's part of a sharded tensor, and a plain one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(parameter, values):
    """Gives whole values placed as a parameter is."""
    return distribute_tensor(values, parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else values


def row_of_each_token(lengths, total):
    """Returns int64 [total]: the row of each flat token. lengths: int64 [rows], which sums to ``total``."""
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths, output_size=total)
