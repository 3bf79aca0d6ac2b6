"""Faults that only a GPU shows, put into a worker's life on purpose: the virtual GPU must find each."""

from unittest import mock

import torch

from tests.end_to_end.covering import REF, all_off
from tests.virtual_gpu.life import live, misplaced
from verl_memopt.data.batch import token_index
from verl_memopt.distributed.device import current_stream
from verl_memopt.memory import optimizer_offload_torch, streamed_params_torch
from verl_memopt.memory.param_offload_torch import OffloadedParams
from verl_memopt.worker import policy
from verl_memopt.worker.trained_model import TrainedModel

GPU = torch.device("cuda", 0)
STREAMS = {f"{REF}.fsdp_config.param_offload": "stream"}
"""Settings with which the reference streams."""


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


def _of_copies_alone(mark_done):
    def marks(stream):
        return None if stream is current_stream(GPU) else mark_done(stream)

    return marks


def copy_not_waited_for(folder):
    row = all_off() | {"actor optimizer_offload": "on", "bucket": "small"}
    with mock.patch.object(optimizer_offload_torch, "wait_for", return_value=None):
        live(row, folder, whole=False)


def block_overwritten_in_use(folder):
    """Streams a reference whose copies do not wait for what computes with the block that was there."""
    with mock.patch.object(streamed_params_torch, "mark_done", _of_copies_alone(streamed_params_torch.mark_done)):
        live(all_off(), folder, whole=False, more=STREAMS)


def parameters_that_never_leave(folder):
    row = all_off() | {"actor param_offload": "on"}
    with mock.patch.object(OffloadedParams, "to_host", return_value=0):
        return misplaced(row, live(row, folder, whole=False))
