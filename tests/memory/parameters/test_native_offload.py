import gc
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.memory.page_locking import install
from tests.memory.sharded import WHOLE, assert_equal_runs, fake_ranks, load, local, policy_of, save, share, three_steps
from tests.ranks import run_ranks
from tests.tensors import local_of
from verl_memopt.distributed.device import training_mesh
from verl_memopt.errors import ConfigError
from verl_memopt.memory.host_buffers import host_allocator, host_limits
from verl_memopt.memory.streamed_params_torch import allocate_on_host, native_offload
from verl_memopt.memory.weight_buckets_torch import full_weights
from verl_memopt.model.weights import named_weights
from verl_memopt.observe.byte_tracker import DEVICE, HOST, ByteTracker

NATIVE = {"offload_policy": True}


def test_offloading_by_fsdp_changes_no_bit_of_three_steps(untied_folder, one_rank):
    # With a second micro-batch a plain model adds to the gradient of the first, and FSDP2 sums the two: another order.
    native, plain = (three_steps(policy_of(untied_folder, one_rank, fsdp), share(budget=WHOLE)) for fsdp in (NATIVE, None))
    assert_equal_runs(native, plain)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shards_lie_in_one_host_buffer_and_cost_the_device_nothing(untied_folder, world_size):
    with fake_ranks(world_size) as mesh, ByteTracker() as tracker:
        gc.collect()
        held = host_allocator().held_bytes
        policy = policy_of(untied_folder, mesh, NATIVE, world_size)
        shard = sum(parameter.numel() for parameter in policy.model.parameters()) * 4 // world_size
        assert host_allocator().held_bytes - held == shard
        assert tracker.kinds(HOST).get("params") == shard
        assert len({local(parameter).untyped_storage()._cdata for parameter in policy.model.parameters()}) == 1
        assert tracker.kinds(DEVICE).get("params", 0) == 0


# On a GPU, with a stand-in for the driver: all tensors lie on the CPU, and what is locked is what would be.

ROWS, ROUNDED_ROWS, COLUMNS, RANKS = 10, 12, 100, 3
GPU = torch.device("cuda", 0)


def two_layers(mesh):
    """Gives two sharded layers without storage, whose ten rows three ranks share as 4, 4 and 2."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(2)))
    model[1].requires_grad_(False)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, offload_policy=native_offload(True))
    return model


SHARD = ROUNDED_ROWS // RANKS * COLUMNS * 4
"""Bytes of a padded shard."""


@pytest.fixture
def driver(monkeypatch):
    gc.collect()
    yield install(monkeypatch)
    gc.collect()


@pytest.mark.parametrize("rank", [0, 2])
def test_shards_of_any_size_are_gathered_from_locked_memory_and_locked_once(driver, rank):
    held = host_allocator().held_bytes
    with fake_ranks(RANKS, rank=rank) as mesh:
        model = two_layers(mesh)
        allocate_on_host(model, GPU)
        (locked,) = driver.locked.values()
        model.unshard()
        assert driver.taken_by_torch == 0
        assert list(driver.locked.values()) == [locked] == [-(-2 * SHARD // 4096) * 4096]
        for module in model:
            (param,) = module._get_fsdp_state()._fsdp_param_group.fsdp_params
            assert driver.holds(param._sharded_param_data)
            assert param._sharded_param_data.numel() * 4 == SHARD
            assert driver.holds(local(param.sharded_param))
        # The trained layer's gradient, as torch rounds it.
        assert host_allocator().held_bytes - held == locked + {0: 2048, 2: 1024}[rank]
        del model, module, param
        gc.collect()
    assert (driver.locked, host_allocator().held_bytes) == ({}, held)


def test_gradients_are_copied_without_waiting_where_they_may_be_locked(driver, monkeypatch):
    copies, to = [], torch.Tensor.to

    def noted(tensor, *args, **kwargs):
        if args[:1] == (torch.device("cpu"),) and "non_blocking" in kwargs:
            copies.append(kwargs["non_blocking"])
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    locked, pages = 2048, 4096
    for room, expected in ((pages + locked, True), (pages + locked - 1, False), (pages - 1, False)):
        held = host_allocator().held_bytes
        with fake_ranks(RANKS) as mesh, host_limits(None, room + host_allocator().pinned_bytes):
            model = two_layers(mesh)
            allocate_on_host(model, GPU)
            assert len(driver.locked) == (room >= pages)
            model[0](torch.ones(2, COLUMNS)).sum().backward()
            # Gathers ask for a copy that does not wait in any case; the gradient's comes last.
            assert copies[-1] is expected
            shards = pages if room >= pages else 2 * SHARD
            assert host_allocator().held_bytes - held == shards + (locked if expected else SHARD)
            del model
            gc.collect()
        assert host_allocator().held_bytes == held


def test_gradients_count_in_the_host_limit(driver):
    held = host_allocator().held_bytes
    for beyond in (False, True):
        with fake_ranks(RANKS) as mesh, host_limits(held + 4096 + 2048 - beyond, None):
            model = two_layers(mesh)
            with pytest.raises(ConfigError, match=r"memory\.host_limit_gb.*grads") if beyond else nullcontext():
                allocate_on_host(model, GPU)
            del model
            gc.collect()


def two_ranks(rank, folder, aside):
    mesh = training_mesh("cpu", 2, -1)
    policy = policy_of(folder, mesh, NATIVE, 2)
    assert_equal_runs(three_steps(policy, share(rank, 2)), three_steps(policy_of(folder, mesh, None, 2), share(rank, 2)))
    save(policy, aside / "saved")
    other = policy_of(folder, mesh, NATIVE, 2)
    load(other, aside / "saved")
    synced = [full_weights(named_weights(each.model), torch.float32, 1) for each in (policy, other)]
    pairs = zip(*synced, strict=True)
    assert all(torch.equal(one, two) for (_, one), (_, two) in pairs)
    for each in (policy, other):
        each.update([share(rank, 2)], 0.9)
    for one, two in zip(policy.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(local_of(one), local_of(two))
    return "equal"


def test_two_ranks_step_save_resume_and_gather_as_without_it(untied_folder, tmp_path):
    assert run_ranks(two_ranks, 2, untied_folder, tmp_path) == ["equal", "equal"]
