import gc
import weakref

import pytest
import torch
from torch import nn

from tests.memory import activation_cases as act
from tests.memory.activation_cases import CPU, FP32, LAYERS, RESPONSES, TOKENS, WIDTH, close
from tests.memory.activation_cases import D as HEAD_SIZE
from tests.memory.sharded import assert_equal_runs, three_steps
from tests.virtual_gpu.late_streams import late_streams
from verl_memopt.errors import ConfigError
from verl_memopt.memory.activation_offload_torch import ActivationOffload
from verl_memopt.memory.host_buffers import host_allocator, host_limits
from verl_memopt.memory.tiled_mlp import TiledMlp

INPUT = TOKENS * WIDTH * FP32
TABLES = 2 * TOKENS * HEAD_SIZE * FP32
LEAST = 4096
"""Bytes: what has one number a token or a response stays on the device."""
RECOMPUTED = {
    "plain": {},
    "full": {"recompute": True},
    "selective": {"recompute": True, "gradient_checkpointing_mode": "selective"},
    "every_n and tiled": {"recompute": True, "gradient_checkpointing_mode": "every_n", "tiled_mlp": TiledMlp(True, 4)},
    "lora": {"recompute": True, "lora_rank": 4},
}


class Chain(nn.Module):
    """Layers whose backward needs their input, their output, and views of both."""

    def __init__(self, depth=4, width=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).exp().sigmoid()
        return x


def offload_of(model, in_flight=2, least=1, chunk=2**12, stay_bytes=0):
    return ActivationOffload(model, CPU, least, in_flight, chunk, stay_bytes=stay_bytes)


def gradients(model, x, offload=None):
    model.zero_grad()
    if offload is None:
        loss = model(x).square().sum()
    else:
        with offload.forward():
            loss = model(x).square().sum()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def equal(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.fixture
def chain():
    torch.manual_seed(0)
    return Chain()


@pytest.fixture
def x():
    return torch.randn(32, 16)


# Numbers.


def test_offload_changes_no_bit_of_three_steps_with_and_without_checkpointing(untied_folder, one_rank):
    mini = act.mini_batch(response=12)
    for options in RECOMPUTED.values():
        expected = three_steps(act.build(untied_folder, one_rank, **options), mini)
        policy = act.without_traffic(act.build(untied_folder, one_rank, offload=(1, 2), **options))
        assert_equal_runs(three_steps(policy, mini), expected)
        assert policy.trained.offload.arena.held_bytes > 0
        assert policy.trained.offload.arena.used_bytes == 0


def test_tensors_that_start_together_and_differ_in_layout_stay_apart():
    base = torch.arange(24.0).view(4, 6)
    views = [base, base.t(), base[:2, :3], base[:, 0].expand(3, 4), base.view(6, 4), base.view(torch.int32), base[1:]]
    saved = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *tensors):
            ctx.save_for_backward(*tensors)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            saved.extend(ctx.saved_tensors)
            return grad, *(None for _ in views)

    offload = offload_of(nn.Identity())
    with offload.forward():
        out = Keeps.apply(torch.ones(1, requires_grad=True), *views)
    out.backward()
    assert offload.bytes_moved == base.nbytes  # one copy out for all; it is still on the device for the way back
    for found, expected in zip(saved, views, strict=True):
        assert (found.stride(), found.storage_offset(), found.dtype) == (
            expected.stride(),
            expected.storage_offset(),
            expected.dtype,
        )
        assert torch.equal(found, expected)


def test_a_storage_written_to_once_it_has_left_is_kept_twice():
    buffer, offload = torch.full((8,), 2.0), offload_of(nn.Identity(), in_flight=1)
    one, two, others = (torch.ones(8, requires_grad=True) for _ in range(3))
    with offload.forward():
        loss = (one * buffer).sum()
        loss = loss + others.exp().sum()  # its output takes the one place in flight
        buffer.mul_(5)
        loss = loss + (two * buffer).sum()
    loss.backward()
    assert (one.grad.unique().tolist(), two.grad.unique().tolist()) == ([2.0], [10.0])


def test_a_storage_written_to_while_it_leaves_is_an_error_as_it_is_to_autograd():
    buffer, offload, weight = torch.full((8,), 2.0), offload_of(nn.Identity()), torch.ones(8, requires_grad=True)
    with offload.forward():
        loss = (weight * buffer).sum()
        buffer.mul_(5)
    with pytest.raises(AssertionError, match="written to in place"):
        loss.backward()


def left(copies):
    """Gives how many of a late stream's copies have not run."""
    return copies._stream.length - copies._stream._done


@pytest.mark.parametrize("in_flight", [1, 2, 5, 1000])
def test_any_number_in_flight_changes_no_gradient_and_copies_may_run_as_late_as_they_are_waited_for(chain, x, in_flight):
    expected = gradients(chain, x)
    assert equal(gradients(chain, x, offload_of(chain, in_flight)), expected)
    with late_streams() as streams:
        offload = offload_of(chain, in_flight)
        for _ in range(2):
            assert equal(gradients(chain, x, offload), expected)
        with offload.forward():
            abandoned = chain(x).sum()
        del abandoned
        assert equal(gradients(chain, x, offload), expected)
    assert streams.copies > 0


def test_a_backward_waits_for_its_own_copies_and_not_for_those_that_still_go_the_other_way(chain, x):
    with late_streams():
        offload, losses = offload_of(chain), []
        for _ in range(2):
            with offload.forward():
                losses.append(chain(x).square().sum())
        under_way = left(offload.leaving)
        assert under_way > 0  # what the second forward has saved last
        losses.pop(0).backward()
        assert (left(offload.leaving), left(offload.arriving)) == (under_way, 0)


def test_what_has_not_left_yet_is_read_without_a_wait_and_freed_after_its_copy(x):
    read = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            (saved,) = ctx.saved_tensors
            read.append((torch.equal(saved, x), offload.leaving._stream._done))
            return 2 * grad

    with late_streams():
        offload = offload_of(nn.Identity(), in_flight=1)
        with offload.forward():
            loss = Doubled.apply(x.requires_grad_()).sum()
        loss.backward()
        assert (read, left(offload.leaving), offload.arriving._stream.length) == ([(True, 0)], 0, 0)


# Traffic.


def test_a_tensor_saved_twice_is_copied_once_each_way():
    x, offload = torch.randn(64, requires_grad=True), offload_of(nn.Identity(), in_flight=1)
    with offload.forward():
        y = x.exp()  # keeps its output
        loss = (y * y).sum() + y.square().sum()  # keep it four times more
        other = torch.ones(64, requires_grad=True).exp().sum()
    (loss + other).backward()
    # y goes and comes back; the other exp's output is saved last and never leaves the device.
    assert offload.take_bytes_moved() == 3 * 64 * FP32
    assert offload.take_bytes_moved() == 0


def test_weights_their_views_and_what_only_shares_their_storage_are_never_moved(x):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))
            self.table = nn.Buffer(torch.randn(32, 16))

        def forward(self, x):
            seen_by_autograd = x @ self.weight.t() @ self.weight[:8].t().contiguous().t().t()
            return (seen_by_autograd @ self.weight.data.t()[:8] + x @ self.weight.detach()) * self.table

    model = Views()
    offload = offload_of(model)
    moved = noting_moves(offload)
    gradients(model, x.requires_grad_(), offload)
    assert moved
    assert not {storage(model.weight), storage(model.table)} & set(moved)


@pytest.mark.parametrize("world_size", [1, 4])
def test_gathered_weights_and_the_head_are_never_moved(untied_folder, world_size):
    with act.fake_ranks(world_size) as mesh:
        policy = act.build(untied_folder, mesh, world_size, offload=(1, 2))
        mini, weights = act.mini_batch(response=12), set()
        # The first pass makes the gathered weights' storages, which then last: no other storage takes their keys.
        policy.accumulate(act.micros(mini), mini.counts, 0.9)
        moved = noting_moves(policy.trained.offload)
        for module in policy.model.modules():
            module.register_forward_pre_hook(lambda module, _: weights.update(map(storage, gathered(module))))
        policy.accumulate(act.micros(mini), mini.counts, 0.9)
        parameters = len(list(policy.model.parameters()))
    assert len(weights) == parameters
    assert moved
    assert not weights & set(moved)


def gathered(module):
    return [parameter for parameter in module.parameters() if type(parameter) is nn.Parameter]


def storage(tensor):
    return tensor.untyped_storage()._cdata


def noting_moves(offload):
    """Gives the list that the storages moved from now on are noted in."""
    send, moved = offload.send, []
    offload.send = lambda tensor: moved.append(storage(tensor)) or send(tensor)
    return moved


def test_bytes_moved_are_reported_once_an_update(untied_folder, one_rank):
    policy, mini = act.build(untied_folder, one_rank, offload=(LEAST, 2), recompute=True), act.mini_batch()
    found = [policy.update([mini, mini], 0.9)["memory/activation_offload/bytes_moved"] for _ in range(2)]
    # Of each of two mini-batches' two forwards: two blocks' inputs, the tables, the final norm's input and normed value go
    # and come; the head's hidden states only go.
    each = TOKENS * FP32 * (2 * (2 + 2) * 64 + 2 * 2 * 32) + RESPONSES * 64 * FP32
    assert found == [4.0 * each] * 2


@pytest.mark.parametrize("stay", [1, 3])
def test_what_stays_on_the_device_is_not_moved_and_holds_no_byte_of_the_host(chain, x, stay):
    expected, numbers = gradients(chain, x), []
    for stay_bytes in (0, stay * x.nbytes, 2**30):
        offload = offload_of(chain, stay_bytes=stay_bytes)
        assert equal(gradients(chain, x, offload), expected)
        with offload.forward():
            loss = chain(x).square().sum()
        numbers.append((offload.bytes_moved, offload.arena.used_bytes))
        loss.backward()
    # All of the chain's tensors have the bytes of x. Of two forwards and one backward, each that stays saves three copies.
    (moved, rested), (less_moved, less_rested), none = numbers
    assert (moved - less_moved, rested - less_rested) == (3 * stay * x.nbytes, stay * x.nbytes)
    assert none == (0, 0)


# What is left behind.


def test_a_forward_that_raises_leaves_no_buffer_no_hook_and_no_tensor(chain, x):
    offload, held = offload_of(chain), host_allocator().held_bytes
    hooks = [len(module._forward_pre_hooks) for module in chain.modules()]
    kept = []

    def failing():
        with offload.forward():
            kept.append(chain(x))  # its graph lives on
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert (offload.arena.used_bytes, offload.arena.held_bytes) == (0, 0)
    assert host_allocator().held_bytes == held
    assert [len(module._forward_pre_hooks) for module in chain.modules()] == hooks
    with pytest.raises(AssertionError, match="has failed"):
        kept[0].sum().backward()
    kept.clear()
    assert equal(gradients(chain, x, offload), gradients(chain, x))


def test_no_host_memory_is_an_error_that_names_the_limit_and_leaves_nothing(chain, x):
    offload, held = offload_of(chain), host_allocator().held_bytes
    with host_limits(held + 2**12, None), pytest.raises(ConfigError, match="host_limit_gb"):
        gradients(chain, x, offload)
    assert (offload.arena.used_bytes, host_allocator().held_bytes) == (0, held)


def test_two_forwards_before_a_backward_work_in_either_order(chain, x):
    expected = [torch.autograd.grad(chain(x + shift).square().sum(), list(chain.parameters())) for shift in range(2)]
    for order in ((0, 1), (1, 0)):
        offload, losses = offload_of(chain), []
        for shift in range(2):
            with offload.forward():
                losses.append(chain(x + shift).square().sum())
        for one in order:
            assert equal(torch.autograd.grad(losses[one], list(chain.parameters())), expected[one])
        del losses
        assert offload.arena.used_bytes == 0


def test_an_abandoned_forward_gives_its_buffers_back_and_closing_the_host_its_memory(chain, x):
    offload, before = offload_of(chain), host_allocator().held_bytes
    with offload.forward():
        loss = chain(x).square().sum()
    assert offload.arena.used_bytes > 0
    del loss
    assert offload.arena.used_bytes == 0
    held = offload.arena.held_bytes
    gradients(chain, x, offload)
    assert offload.arena.held_bytes == held
    assert host_allocator().held_bytes > before
    offload.close()
    assert host_allocator().held_bytes == before


def test_a_backward_may_be_run_twice(chain, x):
    offload = offload_of(chain)
    with offload.forward():
        loss = chain(x).square().sum()
    once = torch.autograd.grad(loss, list(chain.parameters()), retain_graph=True)
    assert equal(torch.autograd.grad(loss, list(chain.parameters())), once)


def test_twenty_steps_hold_no_more_than_one(untied_folder, one_rank):
    policy = act.build(untied_folder, one_rank, offload=(1, 2), recompute=True)
    minis = [act.mini_batch(response=response, micro_batches=1) for response in (9, 12, 5)]
    policy.update(minis, 0.9)
    held, objects = policy.trained.offload.arena.held_bytes, len(gc.get_objects())
    for step in range(20):
        policy.update([minis[step % 3]], 0.9)
        assert (policy.trained.offload.arena.held_bytes, policy.trained.offload.arena.used_bytes) == (held, 0)
    gc.collect()
    assert len(gc.get_objects()) < objects + 200


def test_an_output_that_stays_on_the_device_does_not_keep_its_own_node(chain, x):
    offload = offload_of(chain, least=10**9)
    with offload.forward():
        saved_by_its_own_node = x.requires_grad_().exp()
    died = weakref.ref(saved_by_its_own_node.untyped_storage())
    gc.disable()
    try:
        del saved_by_its_own_node
        assert died() is None
    finally:
        gc.enable()


# Bytes.


@pytest.mark.parametrize("in_flight", [1, 2])
def test_with_checkpointing_the_peak_falls_by_all_inputs_but_those_in_use(deep_folder, in_flight):
    with act.fake_ranks(2) as mesh:
        without, _ = act.step_peaks(deep_folder, mesh, recompute=True)
        device, host = act.step_peaks(deep_folder, mesh, offload=(LEAST, in_flight), recompute=True)
    assert close(without - device, (LAYERS - 1 - in_flight) * INPUT)
    assert close(host, (LAYERS + 3) * INPUT + TABLES)
