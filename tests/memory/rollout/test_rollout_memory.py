import pytest
import torch

from tests.config.conftest import LEAST
from tests.rollout.tools import SHAPE, engine_at, prompts, sampling, weights_of
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Rollout
from verl_memopt.errors import ConfigError
from verl_memopt.memory.rollout_memory import KNOB, kv_bytes_per_token
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.byte_tracker import ByteTracker
from verl_memopt.rollout.engine import sleep_level

ROLLOUT = "actor_rollout_ref.rollout"
VLLM_ONLY = {
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_gb": 2,
    "max_num_batched_tokens": 100,
    "enforce_eager": True,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "cudagraph_capture_sizes": [1],
    "disable_log_stats": False,
    "scheduling_policy": "priority",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "two_heads", TinyShape(num_kv_heads=2, **SHAPE))


def test_tensor_parallel_ranks_divide_the_heads_but_hold_one_at_least():
    # Qwen3-8B: 36 layers, 8 KV heads of 128, bf16.
    assert kv_bytes_per_token(36, 8, 128, 2) == 147_456
    assert [kv_bytes_per_token(36, 8, 128, 2, ranks) for ranks in (2, 8, 16)] == [73_728, 18_432, 18_432]


def test_the_cache_of_transformers_takes_the_bytes_of_the_formula(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    cache = model(torch.tensor([[5] * 17] * 3), use_cache=True).past_key_values
    held = sum(tensor.numel() * tensor.itemsize for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert held == 3 * 17 * kv_bytes_per_token(2, 2, 32, 2)


def test_fewer_rows_at_once_hold_a_smaller_cache(folder):
    peaks = []
    for rows in (16, 4):
        engine = engine_at("hf", folder, load_format="auto", max_num_seqs=rows)
        with ByteTracker() as tracker:
            tracker.mark("rollout weights", (tensor for _, tensor in engine.resident_tensors()))
            tracker.enter("gen")
            engine.generate([[5] * 100] * 16, list(range(16)), sampling(max_tokens=4, log_probs=False))
            peaks.append(tracker.peaks["device"].bytes - tracker.total())
    assert peaks[0] - peaks[1] >= 12 * 103 * kv_bytes_per_token(2, 2, 32, 4)


def test_a_sleeping_engine_gives_its_weights_back_whichever_level(folder):
    for level in (1, 2):
        engine = engine_at("hf", folder, load_format="auto", sleep_level=level)
        weights = sum(tensor.numel() * tensor.itemsize for _, tensor in weights_of(engine._model))
        with ByteTracker() as tracker:
            tracker.mark("rollout weights", (tensor for _, tensor in engine.resident_tensors()))
            before = tracker.total()
            engine.sleep()
            assert before - tracker.total() == weights
            assert tracker.total("host") == (weights if level == 1 else 0)
            engine.wake_up("weights")
            assert (tracker.total(), tracker.total("host")) == (before, 0)
        engine.shutdown()


def test_sleeping_changes_no_answer(folder):
    answers = []
    for level in (None, 1):
        engine = engine_at("hf", folder, load_format="auto", sleep_level=level)
        if level is not None:
            engine.sleep()
            engine.wake_up("weights")
            engine.wake_up("kv_cache")
        answers.append(engine.generate(prompts(3), [1, 2, 3], sampling()))
    assert answers[0] == answers[1]


def test_a_sleeping_engine_keeps_nothing_unless_told_to():
    assert [sleep_level(Rollout(name="vllm", sleep_level=level)) for level in (None, 1, 2)] == [2, 1, 2]


def test_every_key_of_the_knob_reaches_an_engine_or_is_spoken_of():
    reaching_hf = {"max_model_len", "max_num_seqs", "free_cache_engine", "sleep_level"}
    refused_with_hf = {"kv_cache_dtype"}
    assert {key.removeprefix(f"{ROLLOUT}.") for key in KNOB.keys} <= reaching_hf | refused_with_hf | VLLM_ONLY.keys()


def test_a_cache_dtype_that_hf_does_not_have_is_refused():
    with pytest.raises(
        ConfigError, match=rf"{ROLLOUT}\.name=hf, {ROLLOUT}\.kv_cache_dtype=fp8: this engine's cache has the dtype"
    ):
        settings_from_mapping(LEAST | {f"{ROLLOUT}.name": "hf", f"{ROLLOUT}.kv_cache_dtype": "fp8"})


def test_a_sleep_level_that_does_not_exist_is_refused_and_one_without_sleep_warned_of(caplog):
    with pytest.raises(ConfigError, match=r"sleep_level=3: must be 1 or 2"):
        settings_from_mapping(LEAST | {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.sleep_level": 3})
    settings_from_mapping(LEAST | {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.sleep_level": 1, f"{ROLLOUT}.free_cache_engine": False})
    assert "sleep_level=1 has no effect" in caplog.text
