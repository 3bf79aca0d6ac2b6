"""Faults that only a GPU shows, put into a worker's life on purpose: the virtual GPU must find each."""

from unittest import mock

import torch

from tests.end_to_end.covering import all_off
from tests.virtual_gpu.life import live, misplaced
from verl_memopt.data.batch import token_index
from verl_memopt.memory import optimizer_offload_torch
from verl_memopt.memory.param_offload_torch import OffloadedParams
from verl_memopt.worker import policy
from verl_memopt.worker.trained_model import TrainedModel


def _scatter_on_the_host(parts, lengths):
    out = torch.empty(sum(lengths), dtype=torch.float32)
    for rows, values in parts:
        out[token_index(lengths, rows)] = values
    return out


def _reading_back(backward):
    def reads(self, *args):
        metrics = backward(self, *args)
        metrics["actor/loss"].item()
        return metrics

    return reads


def host_and_device_mixed(folder):
    with mock.patch.object(policy, "scatter_tokens", _scatter_on_the_host):
        live(all_off(), folder)


def read_back_between_micro_batches(folder):
    with mock.patch.object(TrainedModel, "backward", _reading_back(TrainedModel.backward)):
        live(all_off(), folder, whole=False)


def copy_not_waited_for(folder):
    row = all_off() | {"actor optimizer_offload": "on", "bucket": "small"}
    with mock.patch.object(optimizer_offload_torch, "wait_for", return_value=None):
        live(row, folder, whole=False)


def parameters_that_never_leave(folder):
    row = all_off() | {"actor param_offload": "on"}
    with mock.patch.object(OffloadedParams, "to_host", return_value=0):
        return misplaced(row, live(row, folder, whole=False))
