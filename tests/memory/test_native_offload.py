import gc

import pytest
import torch

from tests.memory.sharded import CPU, WHOLE, assert_equal_runs, fake_ranks, local, policy_of, share, three_steps
from tests.ranks import run_ranks
from tests.tensors import local_of
from tests.workers.test_worker import AR, call, generated, made, mini_batch, same, weights  # noqa: F401 - made is a fixture
from verl_memopt.distributed.process_group import training_mesh
from verl_memopt.distributed.sharded_state import load_training_state, save_training_state
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.models.build import named_weights
from verl_memopt.observe.byte_tracker import DEVICE, HOST, ByteTracker
from verl_memopt.sync.full_weights import full_weights

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


def test_tied_weights_stay_one(tiny_folder, one_rank):
    assert policy_of(tiny_folder, one_rank, NATIVE).model.tied


def two_ranks(rank, folder, aside):
    mesh = training_mesh("cpu", 2, -1)
    policy = policy_of(folder, mesh, NATIVE, 2)
    assert_equal_runs(three_steps(policy, share(rank, 2)), three_steps(policy_of(folder, mesh, None, 2), share(rank, 2)))
    save_training_state(aside / "saved", policy.model, policy.optimizer, policy.schedule, CPU, ["model", "optimizer"])
    other = policy_of(folder, mesh, NATIVE, 2)
    load_training_state(aside / "saved", other.model, other.optimizer, other.schedule, CPU, ["model", "optimizer"])
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


def test_a_worker_saves_resumes_and_syncs_from_the_host(made, tmp_path):  # noqa: F811
    worker = made({f"{AR}.actor.fsdp_config.offload_policy": True})
    call(worker, "update_actor", [mini_batch()])
    call(worker, "update_weights")
    answers = generated(worker)
    call(worker, "save", str(tmp_path), ["model", "optimizer", "extra", "hf_model"])
    expected = weights(worker)
    worker.close()
    plain = made()
    call(plain, "load", str(tmp_path), ["model", "optimizer", "extra"])
    assert same(weights(plain), expected)
    call(plain, "update_weights")
    assert generated(plain).response_ids == answers.response_ids
