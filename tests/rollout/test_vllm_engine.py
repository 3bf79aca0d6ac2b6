"""What is vLLM's own: agreement with transformers, its caches, its settings, its process."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import shutil
import sys
import threading
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.observe.simulated_device import GIB, MIB, SimulatedDevice
from tests.rollout.sleeping import CumemExtension, on_simulated_gpu, simulated_gpu_worker, sleeping_allocator
from tests.rollout.test_vllm_settings import CHANGED
from tests.rollout.tools import (
    difference_from_naive,
    engine_at,
    largest_difference,
    model_of,
    prompts,
    rollout_settings,
    sampling,
    weights_of,
)
from verl_memopt.config import schema
from verl_memopt.errors import ConfigError, RolloutError, Stopped
from verl_memopt.memory.host_buffers import host_allocator, host_limits
from verl_memopt.memory.out_of_memory import PartDoesNotFitError
from verl_memopt.memory.rollout_memory import kv_bytes_per_token
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.byte_tracker import ByteTracker
from verl_memopt.observe.device_ledger import Asleep, ledger_of
from verl_memopt.rollout import vllm_engine
from verl_memopt.rollout.engine import max_model_len
from verl_memopt.rollout.engine_weights import SyncCheck
from verl_memopt.rollout.vllm_process import check_arrived, check_no_other_sleeper, host_bytes_to_sleep

SLOW = pytest.mark.slow


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_vllm_and_greedy_transformers_agree_token_for_token(vllm_engine, hf_engine, penalty):
    settings = sampling(do_sample=False, max_tokens=32, repetition_penalty=penalty)
    left, right = (engine.generate(prompts(16), [0] * 16, settings) for engine in (vllm_engine, hf_engine))
    assert left.response_ids == right.response_ids
    assert largest_difference(left.log_probs, right.log_probs) <= 1e-5


def test_prompts_that_do_not_fit_into_one_batch_are_answered_as_alone(vllm_engine):
    long, short = [[3 + place % 200 for place in range(150)]] * 6, [[5, 6, 7]] * 3
    rows, seeds = [*short, *[[number, *row] for number, row in enumerate(long, 3)], *short], list(range(12))
    with vllm_engine.serving() as requests:
        for number, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
            requests.add(number, row, seed, sampling(max_tokens=8))
        answers = {}
        while requests.under_way:
            answers |= requests.step()
    alone = [
        vllm_engine.generate([row], [seed], sampling(max_tokens=8)).response_ids[0] for row, seed in zip(rows, seeds, strict=True)
    ]
    assert [answers[number].response_ids for number in range(12)] == alone


def test_a_cached_prefix_of_the_old_weights_is_never_used_with_the_new(vllm_engine, other_folder):
    long_prompt = [3 + place % 200 for place in range(150)]
    greedy = sampling(do_sample=False, max_tokens=8)
    vllm_engine.generate([long_prompt], [0], greedy)
    other = model_of(other_folder)
    vllm_engine.load_weights(weights_of(other))
    after = vllm_engine.generate([long_prompt], [0], greedy)
    assert difference_from_naive(other, [long_prompt], after) <= 1e-5


def test_a_sync_that_does_not_reset_the_cache_is_caught_by_the_check(vllm_engine, tied_folder, monkeypatch):
    check = SyncCheck(max_model_len(rollout_settings("vllm")))

    def sync():
        model = model_of(tied_folder)
        vllm_engine.load_weights(weights_of(model))
        check.check_weights(vllm_engine, weights_of(model))
        check.check_cache(vllm_engine)

    sync()
    sync()
    monkeypatch.setattr(vllm_engine._llm, "reset_prefix_cache", lambda: True)
    with pytest.raises(RolloutError, match=r"took \d+ tokens of a prompt from its prefix cache"):
        sync()


def test_weights_do_not_load_while_a_request_holds_blocks_of_the_cache(vllm_engine, tied_folder):
    core = vllm_engine._llm.llm_engine
    core.add_request("held", {"prompt_token_ids": prompts(1)[0]}, vllm_engine._parameters(sampling(), 0))
    core.step()
    with pytest.raises(RolloutError, match=r"did not reset its prefix cache.*enable_prefix_caching=false"):
        vllm_engine.load_weights(weights_of(model_of(tied_folder)))
    with pytest.raises(RolloutError, match="weights are incomplete"):
        vllm_engine.generate(prompts(1), [0], sampling())
    core.abort_request(["held"])
    vllm_engine.load_weights(weights_of(model_of(tied_folder)))
    vllm_engine.generate(prompts(1), [0], sampling())


def test_answers_to_one_prompt_compute_it_once(vllm_engine):
    long_prompt = [5 + place % 190 for place in range(150)]
    for prompt in (long_prompt, long_prompt[-45:]):
        found = vllm_engine.generate([prompt] * 4, [0, 1, 2, 3], sampling(max_tokens=4))
        # Whole blocks of 32 tokens of the first answer's prompt serve the other three; one token at least is computed, to predict
        # the next.
        assert found.cached_tokens == 3 * ((len(prompt) - 1) // 32 * 32)
    vllm_engine.load_weights(weights_of(model_of(vllm_engine._place.model_folder)))
    assert vllm_engine.generate([long_prompt], [0], sampling(max_tokens=4)).cached_tokens == 0


def test_rebuilding_each_module_loads_the_same_weights_as_copying_in_place(vllm_engine, other_folder, monkeypatch):
    answers = []
    for in_place in (True, False):
        monkeypatch.setattr(vllm_engine, "_in_place", in_place)
        vllm_engine.load_weights((name, tensor * 0) for name, tensor in weights_of(model_of(other_folder)))
        vllm_engine.load_weights(weights_of(model_of(other_folder)))
        answers.append(vllm_engine.generate(prompts(4), [0] * 4, sampling()))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["qwen3_moe", *(pytest.param(kind, marks=SLOW) for kind in ("glm4_moe", "gemma4_text"))])
def test_experts_are_synced_again_and_again_and_stay_in_the_order_of_the_kernel(tmp_path, no_shared_engine, kind):
    # vLLM has no tied head for GLM.
    more = {"glm4_moe": {"tie_embeddings": False}, "gemma4_text": {"experts_beside": True, "initializer_range": 0.06}}
    shape = TinyShape(kind, **{"initializer_range": 0.2, "max_positions": 256, **more.get(kind, {})})
    folders = [make_tiny_model(tmp_path / str(seed), shape, seed=seed) for seed in range(2)]
    engine = engine_at("vllm", folders[0])
    try:
        for place in (0, 1, 0):
            model = model_of(folders[place])
            engine.load_weights(weights_of(model))
            answer = engine.generate(prompts(6), list(range(6)), sampling())
            assert difference_from_naive(model, prompts(6), answer) <= 1e-5
        with pytest.raises(RolloutError, match="tensors that it derives from experts"):
            engine.share_weights()
    finally:
        engine.shutdown()


def test_experts_that_vllm_cannot_load_again_are_refused(tmp_path, no_shared_engine):
    folder = make_tiny_model(tmp_path / "model", TinyShape(model_type="gpt_oss"))
    with pytest.raises(ConfigError, match=r"name=vllm: vLLM loads the experts of gpt_oss models only when it starts.*name=hf"):
        engine_at("vllm", folder)


def test_a_tied_head_that_vllm_would_not_tie_is_refused(tmp_path, no_shared_engine):
    folder = make_tiny_model(tmp_path / "model", TinyShape(model_type="glm4_moe"))
    with pytest.raises(ConfigError, match=r"name=vllm: vLLM gives glm4_moe models a head of their own.*name=hf"):
        engine_at("vllm", folder)


def test_the_kv_cache_has_the_size_asked_for(vllm_engine):
    asked = int(0.02 * 2**30)
    assert 0.98 * asked <= kv_bytes(vllm_engine) <= asked


def kv_bytes(engine):
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for kind, t in engine.resident_tensors() if kind == "kv"
    }
    return sum(storages.values())


def kv_tokens(engine):
    cache = engine._llm.llm_engine.vllm_config.cache_config
    return cache.num_gpu_blocks * cache.block_size


def test_a_token_takes_the_bytes_of_the_formula(vllm_engine):
    # 2 layers, 1 KV head of 32, fp32: a key and a value of 128 bytes each in each layer.
    assert kv_bytes_per_token(2, 1, 32, 4) == 2 * 2 * 128
    assert kv_bytes(vllm_engine) == kv_tokens(vllm_engine) * kv_bytes_per_token(2, 1, 32, 4)


def test_syncing_holds_nothing_beside_the_two_models(vllm_engine, tied_folder):
    model = model_of(tied_folder)
    vllm_engine.load_weights(weights_of(model))
    with ByteTracker() as tracker:
        tracker.mark("params", model.parameters())
        tracker.mark("rollout weights", (tensor for _, tensor in vllm_engine.resident_tensors()))
        before = tracker.total()
        tracker.enter("sync")
        vllm_engine.load_weights(weights_of(model))
        assert tracker.peaks["device"].bytes == before


def test_an_engine_on_a_cpu_says_that_it_cannot_sleep(vllm_engine, tied_folder):
    with pytest.raises(RolloutError, match="cannot sleep"):
        vllm_engine.sleep()
    with pytest.raises(ConfigError, match="free_cache_engine=true: vLLM cannot sleep on a CPU"):
        engine_at("vllm", tied_folder, free_cache_engine=True)


def test_starting_and_running_leave_the_process_as_it_was(vllm_engine):
    vllm_engine.generate(prompts(2), [0, 1], sampling())
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert "LD_PRELOAD" not in os.environ or "libgomp" not in os.environ["LD_PRELOAD"]
    assert "LOCAL_WORLD_SIZE" not in os.environ
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("name", ["vllm_engine", "hf_engine"])
def test_a_rollout_that_is_given_up_leaves_an_engine_that_answers_as_before(name, request):
    engine = request.getfixturevalue(name)
    settings = sampling(max_tokens=16, ignore_eos=True)
    before = engine.generate(prompts(4), [1, 2, 3, 4], settings)
    asked = itertools.count(1)
    with pytest.raises(Stopped):
        engine.generate(prompts(4), [5, 6, 7, 8], settings, lambda: next(asked) == 3)
    assert next(asked) == 4, "asked again after it was given up"
    assert engine.generate(prompts(4), [1, 2, 3, 4], settings) == before


@pytest.mark.parametrize("key", CHANGED)
def test_an_argument_that_vllm_did_not_take_is_named_by_its_key(key, vllm_engine):
    resolved = vllm_engine._llm.llm_engine.vllm_config
    _, argument, value = CHANGED[key]
    with pytest.raises(ConfigError, match=rf"actor_rollout_ref\.rollout\.{key}: vLLM was given"):
        check_arrived({argument: value}, resolved, log_stats=False)


@pytest.mark.parametrize("further", [{}, {"cudagraph_capture_sizes": []}])
def test_how_vllm_compiles_can_be_set_beside_the_sizes_of_graphs(further, vllm_engine):
    resolved = vllm_engine._llm.llm_engine.vllm_config
    check_arrived({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", **further}}, resolved, log_stats=False)


def test_vllm_not_installed_is_said_with_the_way_to_install_it(tied_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    with pytest.raises(ConfigError, match=r"rollout\.name=vllm: vLLM cannot be imported.*pip install vllm"):
        engine_at("vllm", tied_folder)


def test_further_arguments_may_not_repeat_a_key_and_must_be_known(tied_folder):
    for further, message in [
        ({"max_num_seqs": 3}, r"engine_kwargs\.vllm\.max_num_seqs: actor_rollout_ref\.rollout\.max_num_seqs sets it"),
        ({"tensor_parallel_size": 2}, r"engine_kwargs\.vllm\.tensor_parallel_size: .*tensor_model_parallel_size sets it"),
        ({"blok_size": 16}, "blok_size"),
    ]:
        with pytest.raises(ConfigError, match=message):
            engine_at("vllm", tied_folder, engine_kwargs=schema.EngineKwargs(vllm=further))


def test_settings_that_vllm_refuses_are_a_config_error(tied_folder):
    with pytest.raises(ConfigError, match="refuses"):
        engine_at("vllm", tied_folder, enable_chunked_prefill=False, max_num_batched_tokens=100)


# Tests that end the shared engine come last, since a start costs seconds.


class _NoStream:
    """Stands in for a CUDA stream and a CUDA event: on a CPU whatever was started has already ended."""

    def __init__(self, *args, **kwargs): ...

    def done(self, *args): ...

    record = synchronize = wait = wait_stream = wait_event = done


@pytest.fixture
def asynchronous(monkeypatch, shared_vllm):
    """vLLM schedules as on a GPU: one batch ahead of the tokens it knows. Its CPU build switches this off."""
    from vllm.platforms.cpu import CpuPlatform

    shared_vllm.close()
    for name in ("Event", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, _NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    check = CpuPlatform.check_and_update_config

    def checked(config):
        check(config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(checked))


def test_asynchronous_scheduling_gives_the_same_answers_and_leaves_no_batch_under_way(
    vllm_engine, tied_folder, other_folder, request
):
    # With so many sampled tokens some answers end early, with a batch under way that holds one more token of theirs.
    settings = sampling(max_tokens=60, ignore_eos=False, temperature=2.0)
    expected = vllm_engine.generate(prompts(12), list(range(12)), settings)
    assert len({len(answer) for answer in expected.response_ids}) > 2
    vllm_engine.load_weights(weights_of(model_of(other_folder)))
    of_others = vllm_engine.generate(prompts(12), list(range(12)), settings)

    request.getfixturevalue("asynchronous")
    engine = engine_at("vllm", tied_folder)
    try:
        core = engine._llm.llm_engine.engine_core.engine_core
        assert core.batch_queue is not None
        engine.load_weights(weights_of(model_of(tied_folder)))
        assert engine.generate(prompts(12), list(range(12)), settings) == expected
        assert not core.batch_queue
        calls = itertools.count()
        with pytest.raises(Stopped):
            engine.generate(prompts(12), list(range(12)), settings, lambda: next(calls) > 4)
        assert not core.batch_queue
        engine.load_weights(weights_of(model_of(other_folder)))
        assert engine.generate(prompts(12), list(range(12)), settings) == of_others
    finally:
        engine.shutdown()


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's CPU build has an fp8 cache on AVX-512 only")
def test_an_fp8_cache_takes_one_byte_an_element(tied_folder, shared_vllm):
    shared_vllm.close()
    engine = engine_at("vllm", tied_folder, kv_cache_dtype="fp8")
    engine.load_weights(weights_of(model_of(tied_folder)))
    try:
        assert kv_bytes(engine) == kv_tokens(engine) * kv_bytes_per_token(2, 1, 32, 1)
        assert 0.98 * 0.02 * 2**30 <= kv_bytes(engine) <= 0.02 * 2**30
        answer = engine.generate(prompts(4), [0] * 4, sampling())
        assert 1e-5 < difference_from_naive(model_of(tied_folder), prompts(4), answer) <= 0.5
    finally:
        engine.shutdown()


def test_any_error_of_the_start_is_one_sentence_with_a_way_out(tied_folder, shared_vllm, tmp_path):
    shared_vllm.close()
    damaged = shutil.copytree(tied_folder, tmp_path / "damaged")
    (weights,) = damaged.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(RolloutError, match=r"rollout\.name=vllm: vLLM does not start on cpu \(\w+: .*\)\. .*name=hf\.$"):
        engine_at("vllm", damaged, load_format="auto")
    assert not dist.is_initialized()


UNUSUAL = {
    "logprobs_mode": "raw_logprobs",
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "scheduling_policy": "priority",
    "disable_log_stats": False,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 230,
}
"""Everything that may differ from the shared engine; the start itself checks that each arrived."""


def test_an_engine_that_is_shut_down_leaves_no_tensor_thread_or_group(untied_folder, shared_vllm, caplog):
    """The shared engine is shut down first, since two engines of one process share their groups."""
    shared_vllm.close()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        threads = set(threading.enumerate())
        engine = engine_at("vllm", untied_folder, **UNUSUAL)
        engine.load_weights(weights_of(model_of(untied_folder)))
        answer = engine.generate(prompts(4), [0] * 4, sampling(temperature=0.5))
        assert difference_from_naive(model_of(untied_folder), prompts(4), answer) <= 1e-5
        alive = [weakref.ref(tensor) for _, tensor in engine.resident_tensors()]
        engine.shutdown()
        engine.shutdown()
        assert [reference() for reference in alive if reference() is not None] == []
        assert {thread.name for thread in set(threading.enumerate()) - threads} <= {"tqdm_monitor"}
        with pytest.raises(RolloutError, match="shut down"):
            engine.generate(prompts(1), [0], sampling())
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 1
        assert [record for record in caplog.records if record.name.startswith("vllm") and record.levelno < logging.ERROR] == []
    finally:
        dist.destroy_process_group()


@dataclass
class Sleeping:
    """vLLM's CPU engines with vLLM's sleeping allocator on a simulated GPU."""

    device: SimulatedDevice
    allocator: Any
    extension: CumemExtension
    folder: Path

    def start(self, limit=None, **changes):
        return on_simulated_gpu(engine_at("vllm", self.folder, **changes), limit)

    def check_nothing_is_left(self):
        assert (self.device.held, self.allocator.get_current_usage(), self.extension.error) == (0, 0, "")
        assert ledger_of(GPU).asleep == Asleep()

    def check_answers(self, engine):
        engine.load_weights(weights_of(model_of(self.folder)))
        engine.wake_up("kv_cache")
        answer = engine.generate(prompts(2), [0, 1], sampling())
        assert difference_from_naive(model_of(self.folder), prompts(2), answer) <= 1e-5


GPU = torch.device("cuda", 0)


@pytest.fixture
def sleeping(tied_folder, shared_vllm, monkeypatch):
    shared_vllm.close()
    device = SimulatedDevice(total=4 * GIB)
    device.installed(monkeypatch)
    allocator, extension = sleeping_allocator(device, monkeypatch)
    simulated_gpu_worker(device, allocator, monkeypatch)
    return Sleeping(device, allocator, extension, tied_folder)


def test_a_start_that_fails_half_way_and_an_engine_that_is_shut_down_asleep_leave_room_for_the_next(sleeping):
    """The first that starts sleeps wholly when it goes, the second in part."""
    with pytest.raises(
        ConfigError, match=r"refuses these settings on this device: .*KV cache.* Here: raise .*kv_cache_memory_gb"
    ):
        sleeping.start(kv_cache_memory_gb=0.0001)
    sleeping.check_nothing_is_left()
    for parts in ([], ["weights"]):
        engine = sleeping.start()
        held = sleeping.device.held
        assert ledger_of(GPU).reserved() == held > 1.2 * GIB
        engine.sleep()
        assert (ledger_of(GPU).reserved(), sleeping.device.held) == (0, 0)
        with pytest.raises(RolloutError, match=r"another engine of this process holds .* GiB"):
            check_no_other_sleeper()
        engine.wake_up("weights")
        sleeping.check_answers(engine)
        assert ledger_of(GPU).reserved() == sleeping.device.held == held
        engine.sleep()
        for part in parts:
            engine.wake_up(part)
        engine.shutdown()
        sleeping.check_nothing_is_left()


def test_an_engine_that_shares_its_weights_sleeps_without_its_cache_alone_and_answers_with_what_was_trained(
    sleeping, other_folder, monkeypatch
):
    # The simulated device has no stream to wait for.
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    engine, other = sleeping.start(), model_of(other_folder)
    awake = sleeping.device.held
    shared = engine.share_weights()
    for weights in (model_of(sleeping.folder), other):
        engine.sleep()
        engine.sleep()
        assert awake - sleeping.device.held == 2 * 512 * MIB
        assert host_allocator().held_bytes == 0
        for name, weight in weights_of(weights):
            shared[name].copy_(weight)
        engine.wake_up("weights")
        engine.weights_changed(shared)
        with pytest.raises(RolloutError, match="kv_cache asleep"):
            engine.generate(prompts(1), [0], sampling())
        engine.wake_up("kv_cache")
        assert sleeping.device.held == awake
        assert difference_from_naive(weights, prompts(2), engine.generate(prompts(2), [0, 1], sampling())) <= 1e-5
    engine.sleep()
    engine.shutdown()
    sleeping.check_nothing_is_left()


def test_what_a_sleeping_engine_keeps_on_the_host_counts_once_and_towards_the_limit(sleeping):
    engine, host = sleeping.start(sleep_level=1), host_allocator()
    before, needed = host.held_bytes, host_bytes_to_sleep(1)
    assert needed > (256 + 32) * MIB
    try:
        with host_limits(before + needed - 1, None), pytest.raises(ConfigError, match=r"memory\.host_limit_gb=.*sleeping engine"):
            engine.sleep()
        assert ledger_of(GPU).reserved() == sleeping.device.held > GIB
        for _ in range(2):
            engine.sleep()
            assert (host.held_bytes - before, sleeping.device.held) == (needed, 0)
            engine.wake_up("weights")
            engine.wake_up("kv_cache")
    finally:
        engine.shutdown()
        host.count_elsewhere(before - host.held_bytes, True, "what this test has counted")
    sleeping.check_nothing_is_left()


def test_a_cache_that_cannot_wake_is_out_of_memory_stays_asleep_and_is_shut_down_so_with_a_warning(sleeping, caplog):
    engine = sleeping.start()
    try:
        engine.sleep()
        engine.wake_up("weights")
        trainer = sleeping.device.empty(sleeping.device.driver.free - 700 * MIB)
        with pytest.raises(PartDoesNotFitError, match=r"waking kv, 1 GiB: CUDA Error: out of memory") as caught:
            engine.wake_up("kv_cache")
        assert (caught.value.kind, caught.value.num_bytes) == ("kv", GIB)
        # One half of the cache was mapped before the other failed; the figures say so.
        assert ledger_of(GPU).reserved() == sleeping.device.held
        assert not engine._state.is_awake("kv_cache")
        del trainer, caught
        sleeping.device.empty_cache()
        sleeping.check_answers(engine)
        engine.sleep()
        trainer = sleeping.device.empty(sleeping.device.driver.free)
    finally:
        engine.shutdown()
    del trainer
    assert "it is shut down asleep, because the device has no room to wake it" in caplog.text


def test_an_engine_whose_settings_did_not_arrive_is_shut_down(sleeping, monkeypatch):
    from vllm.config import ModelConfig

    monkeypatch.setattr(ModelConfig, "seed", property(lambda config: 77, lambda config, value: None), raising=False)
    with pytest.raises(ConfigError, match=r"seed.*77") as caught:
        sleeping.start()
    # The error that is still held keeps the frame of the start, and with it the engine.
    sleeping.check_nothing_is_left()
    assert caught.value is not None


def test_a_message_queue_whose_name_is_removed_is_collected_without_an_error(monkeypatch):
    pytest.importorskip("vllm")
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    buffer = ShmRingBuffer(1, 1024, 2)
    path = Path("/dev/shm") / buffer.shared_memory.name
    assert path.exists()
    gc.freeze()  # as vLLM does once it has started
    vllm_engine._unlink_message_queues()
    assert not path.exists()
    del buffer
    gc.collect()
    assert complaints == []
