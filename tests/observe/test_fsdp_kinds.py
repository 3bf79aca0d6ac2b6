from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from verl_memopt.observe.byte_tracker import ByteTracker
from verl_memopt.observe.device_ledger import PATCHED, fsdp_kinds, gradient_kinds, optimizer_scope

WORLD = 4


@pytest.fixture
def process_group():
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def sharded(process_group):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def test_torch_still_has_the_functions_and_they_are_put_back():
    missing = [name for owner, name in PATCHED if not callable(getattr(owner, name, None))]
    assert missing == [], "the kinds of FSDP2 need another place to look"
    before = [getattr(owner, name) for owner, name in PATCHED]
    with fsdp_kinds():
        assert all(getattr(owner, name) is not old for (owner, name), old in zip(PATCHED, before, strict=True))
    assert [getattr(owner, name) for owner, name in PATCHED] == before


def test_parameters_gradients_and_optimizer_state_rest_at_a_shard_each(sharded):
    layer = 64 * 64
    optimizer = torch.optim.AdamW(sharded.parameters())
    inputs = torch.ones(8, 64)
    with ByteTracker() as tracker, fsdp_kinds():
        tracker.mark("params", sharded.parameters())
        tracker.mark("inputs", [inputs])
        sharded(inputs).sum().backward()
        held = tracker.kinds()
        assert held["params"] == held["grads"] == 2 * layer * 4 // WORLD
        assert "gathered parameters" not in held, "every layer is freed after its backward"
        with optimizer_scope(optimizer):
            optimizer.step()
        assert tracker.kinds()["optimizer"] == 2 * (2 * layer * 4 // WORLD) + 2 * 4  # two moments, and a step count each
        assert "optimizer scratch" not in tracker.kinds()


def test_a_forward_gathers_parameters_in_compute_precision(sharded):
    layer = 64 * 64
    with ByteTracker() as tracker, fsdp_kinds(), torch.no_grad():
        tracker.mark("params", sharded.parameters())
        sharded(torch.ones(1, 64))
        peak = tracker.peaks["device"].kinds
        assert peak["gathered parameters"] in (layer * 2, 2 * layer * 2)
        assert peak["collective buffers"] >= layer * 2


def _step_figures(fake):
    """Peaks and resting kinds of two steps of two micro-batches each."""
    mesh = init_device_mesh("cpu", (WORLD,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with FakeTensorMode() if fake else nullcontext():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        for module in (*model, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        optimizer, inputs, figures = torch.optim.AdamW(model.parameters()), torch.ones(8, 64), []
        with ByteTracker() as tracker, fsdp_kinds():
            tracker.mark("params", model.parameters())
            tracker.mark("inputs", [inputs])
            for step in range(2):
                tracker.enter(str(step))
                for _ in range(2):
                    model(inputs).sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                with optimizer_scope(optimizer):
                    optimizer.step()
                optimizer.zero_grad()
                figures.append((tracker.peaks["device"], tracker.kinds()))
    return figures


def test_fake_tensors_give_the_bytes_kinds_and_peak_op_of_real_ones(process_group):
    real, fake = _step_figures(fake=False), _step_figures(fake=True)
    assert real[1] == fake[1]
    assert real[1][0].bytes > real[0][0].bytes, "the first step has no optimizer state to start from"


def test_gradients_of_an_unsharded_module_are_labelled_as_they_accumulate_until_the_hooks_are_removed():
    layer = torch.nn.Linear(10, 10, bias=False)
    inputs = torch.ones(1, 10)
    with ByteTracker() as tracker:
        tracker.mark("params", layer.parameters())
        tracker.mark("inputs", [inputs])
        with gradient_kinds(layer.parameters()):
            layer(inputs).sum().backward()
            assert tracker.kinds() == {"params": 400, "inputs": 40, "grads": 400}
        layer.zero_grad()
        layer(inputs).sum().backward()
        assert "grads" not in tracker.kinds()


def test_optimizer_state_is_told_apart_from_the_scratch_of_its_step():
    weight = torch.zeros(1000, requires_grad=True)
    weight.grad = torch.ones(1000)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True)
    with ByteTracker() as tracker:
        tracker.mark("params", [weight])
        tracker.mark("grads", [weight.grad])
        with optimizer_scope(optimizer):
            optimizer.step()
        assert tracker.kinds() == {"params": 4000, "grads": 4000, "optimizer": 4000}
        assert tracker.peaks["device"].kinds["optimizer scratch"] >= 4000
