"""Transformers' own code in fp64, also where it says float32, so that it gives exact results to compare with."""

from contextlib import contextmanager
from unittest import mock

import torch
from transformers.models.qwen3_5 import modeling_qwen3_5


class _Double:
    """The module torch, whose float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextmanager
def in_double(module=modeling_qwen3_5):
    with mock.patch.object(module, "torch", _Double()), mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield
