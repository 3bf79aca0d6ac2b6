import gc
import weakref

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tests.memory.optimizers import counting, policy_with, whole_share
from tests.memory.sharded import assert_equal_runs, fake_ranks, local, share, three_steps
from tests.ranks import run_ranks
from verl_memopt.distributed.device import training_mesh
from verl_memopt.errors import ConfigError
from verl_memopt.memory.bucketed_adamw_torch import BucketedAdamW
from verl_memopt.memory.grad_offload_torch import StepInBackward
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.observe.device_ledger import fsdp_kinds

OPTIONS = {
    "fp32": {},
    "host": {"fsdp": {"optimizer_offload": True}},
    "bfloat16": {"state_dtype": "bfloat16"},
    "int8 on the host": {"state_dtype": "int8", "fsdp": {"optimizer_offload": True}},
}


def policy(wide, mesh, in_backward=True, world_size=1, clip_grad=None, **options):
    return policy_with(wide, mesh, world_size, clip_grad=clip_grad, in_backward=in_backward, **options)


@pytest.mark.parametrize("kind", ["fp32", "host"])
def test_updating_in_backward_changes_no_weight(wide, one_rank, kind):
    found = three_steps(policy(wide, one_rank, **OPTIONS[kind]), whole_share())
    expected = three_steps(policy(wide, one_rank, in_backward=False), whole_share())
    norms = [[metrics.pop("actor/grad_norm") for _, metrics in run[0]] for run in (found, expected)]
    assert_equal_runs(found, expected)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize(("kind", "limit"), [("fp32", 0.01), ("fp32", 1e9), ("host", 0.01)])
def test_clipping_changes_no_bit(wide, one_rank, kind, limit):
    found = three_steps(policy(wide, one_rank, clip_grad=limit, **OPTIONS[kind]), whole_share())
    expected = three_steps(policy(wide, one_rank, in_backward=False, clip_grad=limit), whole_share())
    assert_equal_runs(found, expected)


def two_rank_steps(rank, folder):
    mesh = training_mesh("cpu", 2, -1)
    found, expected = (
        three_steps(policy(folder, mesh, in_backward, world_size=2, clip_grad=0.01), whole_share(rank, 2))
        for in_backward in (True, False)
    )
    assert_equal_runs(found, expected)
    return len(found[0])


def test_two_ranks_clip_alike(wide):
    assert run_ranks(two_rank_steps, 2, wide) == [3, 3]


@pytest.mark.parametrize("kind", ["bfloat16", "int8 on the host"])
def test_it_takes_every_format_of_the_moments(wide, one_rank, kind):
    # Rounding depends on where a bucket starts, so weights are close, not equal: Adam moves each by the learning rate a step.
    options = OPTIONS[kind]
    found = three_steps(policy(wide, one_rank, **options), whole_share())[1]
    expected = three_steps(policy(wide, one_rank, in_backward=False), whole_share())[1]
    start = dict(policy(wide, one_rank).model.named_parameters())
    off = sum((found[name] - weight).square().sum() for name, weight in expected.items()).sqrt()
    moved = sum((local(start[name]) - weight).square().sum() for name, weight in expected.items()).sqrt()
    assert off <= 0.02 * moved


DEPTH, WIDTH = 8, 256


def stack_peak(in_backward, world_size):
    """Gives the device peak of the second update of a stack whose parameters outweigh its activations by far, and the bytes
    left between backward and step."""
    with fake_ranks(world_size) as mesh:
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        optimizer = BucketedAdamW(model.parameters(), lr=1e-3)
        stepping = StepInBackward(optimizer) if in_backward else None
        x = torch.randn(2, WIDTH)
        with counting(model, optimizer) as tracker, fsdp_kinds():
            tracker.mark("inputs", [x])
            for name in ("first", "second"):
                start = tracker.total()
                tracker.enter(name)
                model(x).square().sum().backward()
                left = tracker.total() - start
                if stepping is not None:
                    stepping.norm()
                optimizer.step()
                optimizer.zero_grad()
        return tracker.peaks["device"].bytes, left


@pytest.mark.parametrize(("world_size", "others"), [(1, DEPTH - 1), (4, DEPTH - 2)])
def test_no_gradient_but_one_units_is_ever_there(world_size, others):
    (plain, plain_left), (peak, left) = (stack_peak(flag, world_size) for flag in (False, True))
    unit = 4 * WIDTH * WIDTH // world_size
    # Between backward and step: all gradients; one norm of 4 bytes a parameter in their place.
    assert plain_left == DEPTH * unit
    assert left == 4 * DEPTH
    # At the worst moment one unit is reduced beside the gradients of the others or none. That is the last unit; where a
    # gathered unit is larger than a sharded gradient, the last but one, beside which the last is gathered already.
    assert plain - peak == pytest.approx(others * unit, rel=0.05)


def test_two_micro_batches_are_refused_before_anything_is_updated(wide, one_rank):
    one = policy(wide, one_rank)
    before = [local(parameter).clone() for parameter in one.model.parameters()]
    with pytest.raises(
        ConfigError, match=r"in_backward=true: an optimizer step has \d+ micro-batches.*Raise .*in_backward=false"
    ):
        one.update([share()], 0.9)
    assert all(torch.equal(a, local(b)) for a, b in zip(before, one.model.parameters(), strict=True))


def test_a_second_gradient_is_refused_where_nobody_counted():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = BucketedAdamW([weight], lr=1e-2)
    stepping = StepInBackward(optimizer)
    weight.sum().backward()
    assert weight.grad is None
    with pytest.raises(ConfigError, match="an optimizer step has 2 micro-batches"):
        weight.sum().backward()
    weight.grad = None
    assert stepping.norm() == pytest.approx(3**0.5)
    (2 * weight.sum()).backward()
    assert stepping.norm() == pytest.approx(12**0.5)


def test_a_policy_that_is_let_go_leaves_nothing_behind(wide, one_rank):
    gc.collect()  # what earlier tests have left
    held = host_allocator().held_bytes
    updating = policy(wide, one_rank, **OPTIONS["host"])
    three_steps(updating, whole_share())
    optimizer = weakref.ref(updating.trained.optimizer)
    assert host_allocator().held_bytes > held
    del updating
    gc.collect()
    assert optimizer() is None
    assert host_allocator().held_bytes == held
