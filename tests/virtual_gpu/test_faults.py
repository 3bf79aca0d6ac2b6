"""Faults that only a GPU shows, put into a worker's life on purpose, are found where there is no GPU."""

from unittest import mock

import pytest
import torch

from tests.end_to_end.covering import all_off
from tests.virtual_gpu.clocks import RaceError
from tests.virtual_gpu.life import live, misplaced
from verl_memopt.data.batch import token_index
from verl_memopt.memory import activation_offload_torch, optimizer_offload_torch, residency
from verl_memopt.memory.residency import OffloadedParams
from verl_memopt.worker import policy


def _scatter_on_the_host(parts, lengths):
    out = torch.empty(sum(lengths), dtype=torch.float32)
    for rows, values in parts:
        out[token_index(lengths, rows)] = values
    return out


def host_and_device_mixed(folder):
    with mock.patch.object(policy, "scatter_tokens", _scatter_on_the_host):
        live(all_off(), folder, whole=False)


def read_back_between_micro_batches(folder):
    loss = policy.Objective.loss

    def reads(self, *args):
        value, metrics = loss(self, *args)
        metrics["actor/loss"].item()
        return value, metrics

    with mock.patch.object(policy.Objective, "loss", reads):
        live(all_off(), folder, whole=False)


def copy_not_waited_for(folder):
    row = all_off() | {"actor optimizer_offload": "on", "bucket": "small"}
    with mock.patch.object(optimizer_offload_torch, "wait_for", return_value=None):
        live(row, folder, whole=False)


def activation_freed_while_it_leaves(folder):
    with mock.patch.object(activation_offload_torch._Stored, "_wait", return_value=None):
        live(all_off() | {"activation offload": "on"}, folder, whole=False)


def shard_gathered_before_it_is_there(folder):
    """FSDP2 reads shards on a stream of its own, which waits for the computation at the start of a forward only."""
    with mock.patch.object(residency, "gather_stream", return_value=None):
        live(all_off() | {"actor param_offload": "on"}, folder, world_size=2, whole=False)


def parameters_that_never_leave(folder):
    row = all_off() | {"actor param_offload": "on"}
    with mock.patch.object(OffloadedParams, "to_host_by_unit", return_value=()):
        return misplaced(row, live(row, folder, whole=False))


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (host_and_device_mixed, RuntimeError, r"Mismatching aten\.index_put_\.default device"),
        (read_back_between_micro_batches, AssertionError, r"between micro-batches: aten\._local_scalar_dense"),
        (copy_not_waited_for, RaceError, "has not waited for it"),
        (activation_freed_while_it_leaves, RaceError, "has not waited for it"),
        (shard_gathered_before_it_is_there, RaceError, "has not waited for it"),
    ],
)
def test_a_fault_is_an_error(fault, error, says, on_virtual_gpu, folder):
    with pytest.raises(error, match=says):
        on_virtual_gpu(fault, folder)


def test_parameters_that_stay_on_the_device_are_told(on_virtual_gpu, folder):
    found = on_virtual_gpu(parameters_that_never_leave, folder)
    assert any(line.startswith("policy after released") for line in found), found
