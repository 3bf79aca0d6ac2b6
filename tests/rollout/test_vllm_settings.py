from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.observe.simulated_device import GIB, MIB, SimulatedDevice
from tests.rollout.sleeping import sleeping_allocator
from tests.rollout.tools import place_at, rollout_settings, sampling
from verl_memopt.config import schema
from verl_memopt.errors import ConfigError
from verl_memopt.memory.rollout_memory import sampler_bytes
from verl_memopt.observe.device_ledger import Asleep
from verl_memopt.rollout import vllm_process
from verl_memopt.rollout.vllm_process import (
    advice_for,
    asleep_in_vllm,
    bytes_to_wake,
    check_free_memory,
    check_no_other_sleeper,
    copies_in_place,
    engine_arguments,
    host_bytes_to_sleep,
    sampling_arguments,
)

CHANGED = {
    "dtype": ("bfloat16", "dtype", "bfloat16"),
    "load_format": ("auto", "load_format", "auto"),
    "seed": (2**40 + 3, "seed", 3),
    "gpu_memory_utilization": (0.25, "gpu_memory_utilization", 0.25),
    "kv_cache_memory_gb": (0.5, "kv_cache_memory_bytes", 2**29),
    "kv_cache_dtype": ("fp8", "kv_cache_dtype", "fp8"),
    "max_model_len": (99, "max_model_len", 99),
    "max_num_seqs": (3, "max_num_seqs", 3),
    "max_num_batched_tokens": (300, "max_num_batched_tokens", 300),
    "enforce_eager": (False, "enforce_eager", False),
    "enable_prefix_caching": (False, "enable_prefix_caching", False),
    "cudagraph_capture_sizes": ([1, 2], "compilation_config", {"cudagraph_capture_sizes": [1, 2]}),
    "logprobs_mode": ("raw_logprobs", "logprobs_mode", "raw_logprobs"),
    "disable_log_stats": (False, "disable_log_stats", False),
    "scheduling_policy": ("priority", "scheduling_policy", "priority"),
}
"""Rollout key: a value that is not the default, and the engine argument it becomes."""


@pytest.mark.parametrize("key", CHANGED)
def test_each_rollout_key_becomes_an_argument(key, tmp_path):
    value, argument, expected = CHANGED[key]
    settings, place = rollout_settings("vllm"), place_at(tmp_path)
    assert engine_arguments(settings, place).get(argument) != expected
    assert engine_arguments(replace(settings, **{key: value}), place)[argument] == expected


@pytest.mark.parametrize("setting", [True, False])
def test_a_cpu_splits_a_prompt_only_where_no_batch_holds_the_longest_sequence(setting, tmp_path):
    for tokens, arrived in ((100, setting), (160 + 64, False)):
        settings = rollout_settings("vllm", enable_chunked_prefill=setting, max_num_batched_tokens=tokens)
        assert engine_arguments(settings, place_at(tmp_path))["enable_chunked_prefill"] is arrived


def test_the_longest_sequence_is_prompt_plus_response_and_a_cpu_cache_has_a_gib(tmp_path):
    arguments = engine_arguments(rollout_settings("vllm", kv_cache_memory_gb=None), place_at(tmp_path))
    assert arguments["max_model_len"] == 160 + 64
    assert arguments["kv_cache_memory_bytes"] == 2**30


def test_a_gpu_engine_can_sleep_unless_told_otherwise_and_sizes_its_cache_by_its_share(tmp_path):
    place = replace(place_at(tmp_path), device=torch.device("cuda", 0))
    arguments = engine_arguments(rollout_settings("vllm", kv_cache_memory_gb=None), place)
    assert arguments["enable_sleep_mode"]
    assert "kv_cache_memory_bytes" not in arguments
    assert not engine_arguments(rollout_settings("vllm", free_cache_engine=False), place)["enable_sleep_mode"]


def test_a_cache_that_takes_the_rest_has_the_bytes_that_the_worker_found(tmp_path):
    place = replace(place_at(tmp_path), cache_bytes=12_345_678)
    assert engine_arguments(rollout_settings("vllm", kv_cache_memory_gb="auto"), place)["kv_cache_memory_bytes"] == 12_345_678


def test_one_process_needs_no_launcher_and_several_use_the_callers(tmp_path):
    for world_size, size, backend in [(1, 1, "uni"), (2, 1, "external_launcher"), (4, 2, "external_launcher")]:
        place = place_at(tmp_path, world_size=world_size, tensor_parallel_size=size)
        arguments = engine_arguments(rollout_settings("vllm"), place)
        assert (arguments["distributed_executor_backend"], arguments["tensor_parallel_size"]) == (backend, size)


def test_vllm_returns_experts_only_if_they_are_replayed(tmp_path):
    settings, place = rollout_settings("vllm"), place_at(tmp_path)
    assert engine_arguments(settings, replace(place, records_routes=True))["enable_return_routed_experts"]
    assert "enable_return_routed_experts" not in engine_arguments(settings, place)


def test_a_further_argument_replaces_the_default(tmp_path):
    settings = rollout_settings("vllm", engine_kwargs=schema.EngineKwargs(vllm={"block_size": 64}))
    assert engine_arguments(settings, place_at(tmp_path))["block_size"] == 64


def test_a_greedy_row_has_neither_filters_nor_a_seed():
    settings = sampling(do_sample=False, temperature=0.7, top_k=5, top_p=0.5, max_tokens=9, ignore_eos=False)
    arguments = sampling_arguments(settings, 3, (1, 2))
    assert (arguments["temperature"], arguments["top_k"], arguments["top_p"], arguments["seed"]) == (0.0, -1, 1.0, None)
    assert (arguments["max_tokens"], arguments["stop_token_ids"]) == (9, [1, 2])


def test_a_sampled_row_has_its_own_seed_and_stops_at_no_token_where_the_end_is_ignored():
    settings = sampling(do_sample=True, temperature=0.7, top_k=5, top_p=0.5, ignore_eos=True, log_probs=False)
    arguments = sampling_arguments(settings, 3, (1, 2))
    assert (arguments["temperature"], arguments["top_k"], arguments["top_p"], arguments["seed"]) == (0.7, 5, 0.5, 3)
    assert (arguments["ignore_eos"], arguments["stop_token_ids"], arguments["logprobs"]) == (True, [], None)


@pytest.mark.parametrize("changed", [{"quantization": "fp8"}, {"is_moe": True}, {"use_mla": True}, {}])
def test_only_a_plain_dense_model_takes_its_weights_in_place(changed):
    config = SimpleNamespace(**({"quantization": None, "is_moe": False, "use_mla": False} | changed))
    assert copies_in_place(config, "none") == (not changed)


@pytest.mark.parametrize(("base", "engine"), [("nf4", "nf4"), ("nf4", "int8"), ("none", "nf4"), ("nf4", "none")])
def test_a_quantised_base_is_shared_in_its_own_format(base, engine):
    named = None if engine == "none" else f"verl_memopt_{engine}"
    config = SimpleNamespace(quantization=named, is_moe=False, use_mla=False)
    assert copies_in_place(config, base) == (base == engine or engine == "none")


def test_advice_follows_an_error_about_the_cache_alone():
    advice = advice_for(ValueError("No available KV cache memory"))
    assert "raise actor_rollout_ref.rollout.gpu_memory_utilization" in advice
    assert "lower data.max_response_length or actor_rollout_ref.rollout.max_num_seqs" in advice
    assert "rollout.share_weights=false" in advice_for(ValueError("NewForCausalLM does not support LoRA yet."))
    assert advice_for(ValueError("the dtype is unknown")) == ""


def test_books_of_another_shape_are_not_guessed_at(monkeypatch):
    """The driver's free memory is used then."""
    device = SimulatedDevice(total=4 * GIB)
    device.installed(monkeypatch)
    allocator, _ = sleeping_allocator(device, monkeypatch)
    assert asleep_in_vllm() == Asleep()
    allocator.pointer_to_data[0] = SimpleNamespace(handle=(0, GIB, 0, 0), tag="kv_cache")
    assert asleep_in_vllm() is None


def test_a_part_wakes_with_its_own_bytes_and_those_without_a_part(monkeypatch):
    device = SimulatedDevice(total=4 * GIB)
    device.installed(monkeypatch)
    allocator, _ = sleeping_allocator(device, monkeypatch)
    for address, (tag, size, is_asleep) in enumerate(
        [("kv_cache", 5, True), ("kv_cache", 7, False), ("weights", 11, True), ("runtime", 13, True)]
    ):
        allocator.pointer_to_data[address] = SimpleNamespace(handle=(0, size, 0, 0), tag=tag, is_asleep=is_asleep)
    assert (bytes_to_wake("kv_cache"), bytes_to_wake("weights")) == (5 + 13, 11 + 13)
    allocator.pointer_to_data[0] = SimpleNamespace(handle=(0, GIB, 0, 0), tag="kv_cache")
    assert bytes_to_wake("kv_cache") == 0


def test_without_memory_of_another_engine_a_sleeper_may_start(monkeypatch):
    monkeypatch.setattr(vllm_process, "sleeping_allocator", lambda: None)
    check_no_other_sleeper()


@pytest.mark.parametrize("free", [8 * 2**30, 8 * 2**30 - 1])
def test_a_device_with_just_the_engines_share_free_is_enough_and_one_byte_less_is_refused(monkeypatch, free):
    monkeypatch.setattr(vllm_process, "memory_info", lambda device: (free, 32 * 2**30))
    monkeypatch.setattr(vllm_process, "empty_cache", lambda device: None)
    rollout, device = schema.Rollout(name="vllm", gpu_memory_utilization=0.25), torch.device("cuda")
    if free == 8 * 2**30:
        check_free_memory(0.25, rollout, device)
        return
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.25: that is 8\.0 GiB of the device's 32\.0"):
        check_free_memory(0.25, rollout, device)


def test_a_sleeping_engines_host_memory_is_rounded_up_to_powers_of_two(monkeypatch):
    assert host_bytes_to_sleep(1) == 0
    allocator, _ = sleeping_allocator(SimulatedDevice(4 * GIB), monkeypatch)
    sizes = {"weights": 311 * MIB, "runtime": 130 * MIB, "cudagraph": 2 * MIB, "kv_cache": 900 * MIB, "workspace": 64 * MIB}
    for address, (tag, size) in enumerate(sizes.items()):
        allocator.pointer_to_data[address] = SimpleNamespace(handle=(0, size, 0, 0), tag=tag)
    assert host_bytes_to_sleep(2) == (256 + 2) * MIB
    assert host_bytes_to_sleep(1) == (512 + 256 + 2) * MIB
    allocator.pointer_to_data[9] = SimpleNamespace(tag="weights")
    assert host_bytes_to_sleep(1) == 0  # books of another shape


def test_the_sampler_of_a_gpu_has_the_bytes_of_the_formula(monkeypatch):
    """vLLM's own classes, on a device without bytes."""
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample import bad_words, logit_bias, penalties

    staged = {}

    class Staged:
        def __init__(self, size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
            staged[len(staged)] = torch.empty(size, dtype=dtype, device=device)

    for module in (bad_words, logit_bias, penalties):
        monkeypatch.setattr(module, "UvaBackedTensor", lambda size, dtype: SimpleNamespace(np=np.zeros(size), copy_to_uva=list))
    for module in (bad_words, logit_bias):
        assert module.StagedWriteTensor is buffer_utils.StagedWriteTensor
        monkeypatch.setattr(module, "StagedWriteTensor", Staged)
    states = SimpleNamespace(max_num_reqs=6, vocab_size=1001, device=torch.device("meta"), prompt_len=SimpleNamespace(np=None))
    counts = penalties.PenaltiesState(None, states)
    for make in (logit_bias.LogitBiasState, bad_words.BadWordsState):
        make(None, states)
    tensors = [counts.output_bin_counts, counts.prompt_bin_mask, *staged.values()]
    assert sum(tensor.nbytes for tensor in tensors) == sampler_bytes(6, 1001)
    assert round(sampler_bytes(256, 151_936) / 1e6) == 165
