"""Parameters that leave and return beside the computation: what waits for what, and that each wait is needed."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import nn

from tests.virtual_gpu.clocks import RaceError
from tests.virtual_gpu.device import VirtualGpu
from verl_memopt.distributed.device import CopyStream, mark_done, on_stream
from verl_memopt.memory import residency
from verl_memopt.memory.bucketed_adamw import SLOTS
from verl_memopt.memory.optimizer_offload_torch import StateLanes
from verl_memopt.memory.residency import CRITIC, POLICY, OffloadedParams, Residency

GPU = torch.device("cuda", 0)
LAYERS = 4
EACH = 2
"""Copies of a layer: its weight, and its bias."""


class Moved:
    """A model of some layers, and its place on the host."""

    def __init__(self, gpu, name=POLICY):
        self.gpu = gpu
        self.model = nn.Sequential(*(nn.Linear(64, 64, device=GPU) for _ in range(LAYERS)))
        self.home = OffloadedParams(name, self.model.parameters(), GPU, units=[self.model, *self.model])
        self.x = torch.empty(8, 64, device=GPU)

    def compute(self):
        with torch.no_grad():
            self.model(self.x)

    def waited(self, copies):
        """How many copies of a stream the computation has waited for so far."""
        return self.gpu.clocks.snapshot(self.gpu.streams[0].name).get(copies._stream.name, 0)


def waits_of_a_return():
    """Return how many copies each layer has waited for, and what the computation has when the model has left and is back."""
    with VirtualGpu() as gpu, gpu.never_waits("a move"):
        moved, seen = Moved(gpu), []
        for layer in moved.model:
            layer.register_forward_hook(lambda *_: seen.append(moved.waited(moved.home._arriving)))
        moved.home.to_host()
        moved.home.to_device()
        before = moved.waited(moved.home._arriving)
        moved.compute()
        return before, seen


def test_each_layer_waits_for_its_own_parameters_alone_and_the_host_for_none(on_virtual_gpu):
    assert on_virtual_gpu(waits_of_a_return) == (0, [EACH * layer for layer in range(1, LAYERS + 1)])


def waits_of_a_copy_out():
    """Return the copies out that the computation has waited for: while they run beside it, and when their memory is freed."""
    with VirtualGpu() as gpu, gpu.never_waits("a move"):
        moved, found = Moved(gpu), []
        moved.home.copy_to_host()
        moved.compute()
        found.append(moved.waited(moved.home._leaving))
        moved.home.to_host()
        found.append(moved.waited(moved.home._leaving))
        moved.home.to_device()
        moved.compute()
        moved.home.to_host()  # nothing has changed
        return [*found, gpu.clocks.snapshot(moved.home._leaving._stream.name)[moved.home._leaving._stream.name]]


def test_what_only_reads_runs_beside_the_copies_out_and_what_has_not_changed_is_not_copied(on_virtual_gpu):
    assert on_virtual_gpu(waits_of_a_copy_out) == [0, EACH * LAYERS, EACH * LAYERS]


def exchange():
    """Return what each layer that comes has waited for of those that leave, and the bytes held at most and at first."""
    with VirtualGpu() as gpu, gpu.never_waits("a move"):
        policy, critic, table = Moved(gpu), Moved(gpu, CRITIC), Residency(GPU)
        for each in (policy, critic):
            table.add(each.home)
        policy.home.to_host()
        with table.phase("update_critic"):
            critic.compute()
        at_first = gpu.peak = gpu.allocated
        arriving, leaving = policy.home._arriving._stream.name, critic.home._leaving._stream.name
        waited, copy = [], CopyStream.copy

        def noting(self, *copies):
            done = copy(self, *copies)
            if self is policy.home._arriving:
                waited.append(gpu.clocks.snapshot(arriving).get(leaving, 0))
            return done

        with mock.patch.object(CopyStream, "copy", noting), table.phase("update_actor"):
            at_most = gpu.peak
            policy.compute()
        return waited, (at_first, at_most)


def test_a_model_comes_while_another_leaves_and_each_layer_takes_the_room_of_one_that_has_left(on_virtual_gpu):
    waited, (at_first, at_most) = on_virtual_gpu(exchange)
    assert waited == [EACH * layer for layer in range(1, LAYERS + 1)]
    assert at_first == at_most


def buckets_of_a_step():
    """Return how many buckets have left for certain when the computation gets each one."""
    with VirtualGpu() as gpu, gpu.never_waits("a step"):
        lanes, resting, seen = StateLanes(GPU), {"moment": torch.zeros(5 * 64).pin_memory()}, []
        buckets = [{"moment": slice(64 * number, 64 * number + 64)} for number in range(5)]
        for views in lanes.passing(resting, buckets):
            seen.append(gpu.clocks.snapshot(gpu.streams[0].name).get(lanes._leaving.name, 0))
            views["moment"].add_(1)
        return seen


def test_a_bucket_arrives_beside_those_that_leave_and_waits_only_for_the_one_whose_place_it_takes(on_virtual_gpu):
    assert on_virtual_gpu(buckets_of_a_step) == [max(0, number - SLOTS + 1) for number in range(5)]


def _copy_at_once(self, targets, sources):
    with on_stream(self._stream):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
    return mark_done(self._stream)


def _nothing(*_):
    return None


def leaves_and_returns(moved):
    moved.home.to_host()
    moved.home.to_device()
    moved.compute()


def returns_and_is_read(moved):
    moved.home.to_host()
    moved.home.to_device()
    moved.home.arrive()
    moved.model[0].weight.sum()


def rests_and_is_read(moved):
    moved.home.to_host()
    with moved.home.readable():
        moved.model[0].weight.data.clone()


def changes_after_it_was_copied(moved):
    moved.home.copy_to_host()
    moved.home.changed()
    with torch.no_grad():
        moved.model[0].weight.add_(1)


def leaves_while_it_returns(moved):
    leaves_and_returns(moved)
    moved.home.to_host()
    moved.home.to_device()
    moved.home.to_host()
    torch.empty(2**16, device=GPU).zero_()


FAULTS = {
    "a layer computes before it is there": (leaves_and_returns, residency, "_enter", _nothing),
    "memory is taken before it has left": (leaves_and_returns, CopyStream, "wait", _nothing),
    "it returns before it has left": (leaves_and_returns, CopyStream, "copy", _copy_at_once),
    "it is read before it is there": (returns_and_is_read, OffloadedParams, "arrive", _nothing),
    "the host reads it before it has left": (rests_and_is_read, residency, "wait_on_host", _nothing),
    "it changes while it leaves": (changes_after_it_was_copied, CopyStream, "wait", _nothing),
    "its memory is freed before it is there": (leaves_while_it_returns, OffloadedParams, "arrive", _nothing),
}


def act(name, with_fault):
    action, owner, attribute, fault = FAULTS[name]
    with ExitStack() as stack:
        if with_fault:
            stack.enter_context(mock.patch.object(owner, attribute, fault))
        action(Moved(stack.enter_context(VirtualGpu())))


@pytest.mark.parametrize("name", FAULTS)
def test_every_wait_of_a_move_is_needed(name, on_virtual_gpu):
    on_virtual_gpu(act, name, False)
    with pytest.raises(RaceError):
        on_virtual_gpu(act, name, True)
