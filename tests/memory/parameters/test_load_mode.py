import gc

import pytest
import torch

from tests.memory.sharded import fake_ranks, local
from tests.worker.test_policy import batch
from verl_memopt.config.schema import Fsdp, Model
from verl_memopt.errors import ConfigError
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.memory.residency import REFERENCE, OffloadedParams
from verl_memopt.model.assembly import build_policy, materialize, materialize_mapped
from verl_memopt.observe.byte_tracker import DEVICE, HOST, ByteTracker
from verl_memopt.worker.policy import compute_log_probs

CPU = torch.device("cpu")


def empty(folder, mesh, **fsdp):
    settings = Model(path=str(folder), attn_implementation="sdpa", logprob_chunk_tokens=8)
    model = build_policy(settings, Fsdp(dtype="fp32", **fsdp), folder, mesh, CPU)
    return model.requires_grad_(False)


def sizes(model):
    return [local(parameter).untyped_storage().nbytes() for parameter in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_streaming_holds_one_shard_on_the_device_and_one_mapped_tensor_at_a_time(untied_folder, world_size):
    with fake_ranks(world_size) as mesh, ByteTracker(default_kind="built") as tracker:
        before = host_allocator().peak_bytes
        model = empty(untied_folder, mesh)
        tracker.enter("load")
        materialize(model, untied_folder, CPU)
        shards, device, host = sizes(model), tracker.peaks[DEVICE].bytes, tracker.peaks[HOST]
        assert sum(shards) <= device <= sum(shards) * 1.01
        # A mapped tensor counts whole, resident or not.
        assert host.kinds == {"mapped file": max(parameter.numel() for parameter in model.parameters()) * 4}
        assert host_allocator().peak_bytes == before


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_mapped_model_rests_in_its_file_and_takes_no_host_memory(untied_folder, world_size):
    with fake_ranks(world_size) as mesh, ByteTracker() as tracker:
        gc.collect()
        held = host_allocator().held_bytes
        model = empty(untied_folder, mesh)
        home = OffloadedParams(REFERENCE, model.parameters(), CPU, materialize_mapped(model, untied_folder, CPU))
        home.to_host()
        assert sum(sizes(model)) == 0
        assert tracker.kinds(HOST) == {"mapped file": sum(parameter.numel() for parameter in model.parameters()) * 4}
        assert host_allocator().held_bytes == held
        home.to_device()
        plain = empty(untied_folder, mesh)
        materialize(plain, untied_folder, CPU)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(local(one), local(other))


def test_a_mapped_model_gives_the_log_probs_of_a_streamed_one(tiny_folder, one_rank):
    whole = batch()
    model, plain = empty(tiny_folder, one_rank), empty(tiny_folder, one_rank)
    home = OffloadedParams(REFERENCE, model.parameters(), CPU, materialize_mapped(model, tiny_folder, CPU))
    materialize(plain, tiny_folder, CPU)
    expected = compute_log_probs(plain, whole, [range(16)], 0.9, False, CPU).log_probs
    for _ in range(2):
        home.to_host()
        home.to_device()
        assert torch.equal(compute_log_probs(model, whole, [range(16)], 0.9, False, CPU).log_probs, expected)


def test_the_file_is_not_written_to(tiny_folder, one_rank):
    before = (tiny_folder / "model.safetensors").read_bytes()
    model = empty(tiny_folder, one_rank)
    home = OffloadedParams(REFERENCE, model.parameters(), CPU, materialize_mapped(model, tiny_folder, CPU))
    home.to_host()
    home.to_device()
    for parameter in model.parameters():
        local(parameter).zero_()
    home.to_host()
    assert (tiny_folder / "model.safetensors").read_bytes() == before


def test_a_file_of_another_dtype_is_refused_by_both_keys(tiny_folder, one_rank):
    model = empty(tiny_folder, one_rank, model_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"load_mode=mmap.*float32.*bfloat16.*ref\.fsdp_config\.model_dtype"):
        materialize_mapped(model, tiny_folder, CPU)
