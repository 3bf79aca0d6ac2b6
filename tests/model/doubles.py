"""Transformers' own code in fp64, also where it says float32, so that it gives exact results to compare with."""

import sys
from contextlib import contextmanager
from unittest import mock

import torch


class _Double:
    """The module torch, whose float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextmanager
def in_double(model):
    """Inside the body, compute a model of transformers in fp64, which its parameters must have."""
    module = sys.modules[type(model).__module__]
    with mock.patch.object(module, "torch", _Double()), mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield
