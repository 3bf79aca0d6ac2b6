"""The tracker against hand counts and against PyTorch's own allocator events."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl_memopt.observe.byte_tracker import HOST, ByteTracker, active_tracker, mark, scope


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_bytes_rise_with_a_new_storage_and_fall_when_it_dies():
    with ByteTracker() as tracker:
        a = torch.empty(100)
        b = a.view(10, 10)
        assert tracker.total() == 400
        del a
        assert tracker.total() == 400, "a view keeps its storage"
        del b
        assert tracker.total() == 0
        assert tracker.peaks["device"].bytes == 400


def test_a_gradient_step_peaks_at_the_sum_a_hand_count_gives():
    weight = torch.zeros(1000, requires_grad=True)
    with ByteTracker() as tracker:
        tracker.mark("params", [weight])
        squared = weight * weight  # saves nothing new: 4000 bytes of result
        loss = squared.sum()  # 4 bytes
        loss.backward()
        # loss gradient 4; expanded view 0; two products 4000 each, summed into a third of 4000 while both live
        assert tracker.peaks["device"].bytes == 4000 + 4000 + 4 + 4 + 3 * 4000
        assert tracker.kinds() == {"params": 4000, "activations": 4000 + 4 + 4000}


def test_resizing_is_counted_though_no_op_runs():
    with ByteTracker() as tracker:
        a = torch.empty(100)
        a.untyped_storage().resize_(0)
        assert tracker.total() == 0
        a.untyped_storage().resize_(800)
        assert (tracker.total(), tracker.peaks["device"].bytes, tracker.peaks["device"].op) == (800, 800, "storage.resize_")
        b = torch.empty(10)
        b.resize_(50)
        assert tracker.total() == 800 + 200


def test_marking_names_state_that_exists_before_tracking():
    weight = torch.zeros(10)
    with ByteTracker() as tracker:
        tracker.mark("params", [weight])
        view = weight.view(2, 5)
        assert tracker.kinds() == {"params": 40}
        tracker.mark("inputs", [view])
        assert tracker.kinds() == {"inputs": 40}


def test_the_innermost_scope_names_what_is_born_inside():
    with ByteTracker(default_kind="other") as tracker:
        with scope(kind="logits"):
            a = torch.empty(1)
            with scope(kind="scratch"):
                b = torch.empty(2)
            c = torch.empty(4)
        d = torch.empty(8)
        assert tracker.kinds() == {"logits": 20, "scratch": 8, "other": 32}
    del a, b, c, d


def test_a_scope_opened_in_backward_names_its_gradients():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with scope(kind="logits"):
                return x * 2

        @staticmethod
        def backward(ctx, grad):
            with scope(kind="logits"):
                return grad * 2

    x = torch.zeros(10, requires_grad=True)
    with ByteTracker() as tracker:
        tracker.mark("params", [x])
        result = Double.apply(x)
        result.sum().backward()
        assert tracker.kinds()["logits"] == 40 + 40
    del result


def test_host_scope_keeps_bytes_off_the_device_tier():
    with ByteTracker() as tracker:
        with scope(tier=HOST):
            buffer = torch.empty(100)
        buffer.copy_(torch.ones(100))
        assert (tracker.total(HOST), tracker.total()) == (400, 0)
        assert tracker.peaks[HOST].bytes == 400


def test_entering_a_phase_forgets_the_peak_but_keeps_the_kinds_of_the_moment():
    with ByteTracker() as tracker:
        with scope(kind="params"):
            kept = torch.empty(10)
        dropped = torch.empty(1000)
        del dropped
        tracker.enter("update")
        assert tracker.peaks["device"].bytes == 40
        del kept
        assert tracker.peaks["device"].kinds == {"params": 40}, "a phase that only shrinks still has a breakdown"
        assert tracker.total() == 0


def test_the_peak_carries_its_kinds_and_op():
    with ByteTracker() as tracker:
        with scope(kind="params"):
            a = torch.ones(10)
        b = a + 1
        del b
        peak = tracker.peaks["device"]
        assert (peak.bytes, peak.kinds, peak.op) == (80, {"params": 40, "activations": 40}, "aten.add.Tensor")


def test_blocks_round_each_storage_up():
    with ByteTracker(block_bytes=512) as tracker:
        a, b = torch.empty(1), torch.empty(129)
        assert tracker.total() == 512 + 1024
        del a, b


def test_a_tracker_leaves_nothing_behind_when_its_body_raises_and_its_figures_stay_still():
    with ByteTracker() as tracker:
        a = torch.empty(10)
    del a
    assert tracker.total() == 40
    original = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), ByteTracker():
        raise ZeroDivisionError
    assert active_tracker() is None
    assert torch.UntypedStorage.resize_ is original
    with scope(kind="logits"):
        mark("params", [torch.zeros(1)])
    assert active_tracker() is None


@pytest.mark.parametrize("fake", [False, True])
def test_a_sharded_tensor_counts_its_local_part_and_a_gathered_one_once(mesh, fake):
    with FakeTensorMode() if fake else torch.no_grad():
        sharded = DTensor.from_local(torch.zeros(4, 16), mesh, [Shard(0)])
        sharded * 2  # an op's first use propagates shapes with tensors of full size
        with ByteTracker() as tracker:
            tracker.mark("params", [sharded])
            doubled = sharded * 2
            assert tracker.kinds() == {"params": 256, "activations": 256}
            whole = doubled.full_tensor()
            assert tracker.kinds() == {"params": 256, "activations": 256 + 1024}
            del whole, doubled
            assert tracker.kinds() == {"params": 256}


def test_shape_propagation_of_a_sharded_op_is_not_counted(mesh):
    sharded = distribute_tensor(torch.zeros(16, 16), mesh, [Shard(0)])
    with ByteTracker() as tracker:
        tracker.mark("params", [sharded])
        tangents = torch.tan(sharded)
        assert tracker.peaks["device"].bytes == 512
    del tangents


def _allocator_peak(step):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    current = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return peak


def _second_step(checkpointing):
    """A training step of two micro-batches whose optimizer state exists, and every tensor that lives before it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 2048, (2, 4, 128))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        for micro in ids:
            model(input_ids=micro, labels=micro).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return step, [*model.parameters(), *model.buffers(), ids, *state]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["full-logits", "checkpointing"])
def test_the_peak_of_a_training_step_agrees_with_allocator_events_within_a_thousandth(checkpointing):
    step, alive = _second_step(checkpointing)
    expected = _allocator_peak(step)
    with ByteTracker() as tracker:
        tracker.mark("params", alive)
        before = tracker.total()
        tracker.enter("update")
        step()
        measured = tracker.peaks["device"].bytes - before
    assert measured == pytest.approx(expected, rel=1e-3)
