import pytest
import torch

from tests.memory.optimizers import bucketed, policy_with, same, weights_after
from tests.memory.sharded import fake_ranks
from tests.tensors import local_of
from tests.worker.test_policy import CPU
from verl_memopt.errors import ConfigError
from verl_memopt.memory.bucketed_adamw import SLOTS
from verl_memopt.memory.host_buffers import host_allocator, host_limits
from verl_memopt.memory.optimizer_offload_torch import StateLanes
from verl_memopt.observe.byte_tracker import ByteTracker


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 4, 7])
def test_every_bucket_passes_once_and_is_written_back(num_buckets):
    resting = {"a": torch.arange(70.0), "b": torch.arange(70.0) + 100}
    ranges = [{name: slice(10 * bucket, 10 * bucket + 10) for name in resting} for bucket in range(num_buckets)]
    for bucket in StateLanes(CPU).passing(resting, ranges):
        assert bucket["a"].data_ptr() != resting["a"].data_ptr()
        for tensor in bucket.values():
            tensor.add_(1000)
    done = 10 * num_buckets
    for name, start in (("a", 0.0), ("b", 100.0)):
        expected = torch.arange(70.0) + start + 1000 * (torch.arange(70) < done)
        assert torch.equal(resting[name], expected)


def test_three_buckets_are_on_the_device_at_once():
    resting = {"a": torch.zeros(1000), "b": torch.zeros(1000, dtype=torch.uint8)}
    ranges = [{"a": slice(at, at + 100), "b": slice(at, at + 100)} for at in range(0, 1000, 100)]
    with ByteTracker() as tracker:
        tracker.mark("optimizer", resting.values(), "host")
        for bucket in StateLanes(CPU).passing(resting, ranges):
            del bucket
        assert tracker.peaks["device"].bytes == SLOTS * 100 * 5
        assert tracker.total() == 0


def test_no_bucket_is_nothing_to_do():
    assert list(StateLanes(CPU).passing({"a": torch.zeros(3)}, [])) == []


@pytest.mark.parametrize("bucket_megabytes", [64, 0.01, 0.002])
def test_offloading_changes_no_weight(bucket_megabytes):
    plain = weights_after(lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True))
    assert same(plain, weights_after(bucketed(offload=True, bucket_megabytes=bucket_megabytes)))


@pytest.mark.parametrize("options", [{"state_dtype": "int8"}, {"state_dtype": "int4"}, {"state_dtype": "bfloat16"}])
def test_offloading_changes_no_rounding(options):
    # Buckets are smaller with offload, so they are made equal: rounding follows from where a bucket starts.
    whole = weights_after(bucketed(bucket_megabytes=64, **options))
    assert same(whole, weights_after(bucketed(bucket_megabytes=64, offload=True, **options)))


def test_state_is_made_where_it_rests(wide):
    with fake_ranks(4) as mesh, ByteTracker() as tracker:
        held = host_allocator().held_bytes
        policy = policy_with(wide, mesh, 4, fsdp={"optimizer_offload": True})
        elements = sum(local_of(parameter).numel() for parameter in policy.model.parameters())
        assert host_allocator().held_bytes - held == pytest.approx(8 * elements, abs=128)
        assert tracker.kinds("host")["optimizer"] == host_allocator().held_bytes - held
        assert tracker.kinds()["optimizer"] == 4 * len(policy.trained.optimizer.state)
        del policy


def test_the_host_limit_refuses_the_state_by_name(wide, one_rank):
    with host_limits(1000, None), pytest.raises(ConfigError, match=r"memory\.host_limit_gb"):
        policy_with(wide, one_rank, fsdp={"optimizer_offload": True})
