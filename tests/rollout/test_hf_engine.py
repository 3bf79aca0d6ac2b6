import pytest

from tests.rollout.tools import engine_at, model_of, prompts, sampling, weights_of
from verl_memopt.config import schema
from verl_memopt.errors import ConfigError, RolloutError
from verl_memopt.memory.host_buffers import host_allocator


def test_without_a_load_the_dummy_engine_refuses_to_generate(tied_folder):
    engine = engine_at("hf", tied_folder)
    with pytest.raises(RolloutError, match="load_format=auto"):
        engine.generate(prompts(1), [0], sampling())


def test_chunks_of_one_row_give_what_one_chunk_gives(tied_folder, hf_engine):
    small = engine_at("hf", tied_folder, load_format="auto", max_num_seqs=1)
    whole = hf_engine.generate(prompts(6), list(range(6)), sampling(repetition_penalty=1.3))
    assert small.generate(prompts(6), list(range(6)), sampling(repetition_penalty=1.3)).response_ids == whole.response_ids


def test_sleep_frees_the_weights_and_a_load_after_waking_brings_them_back(hf_engine, tied_folder):
    before = hf_engine.generate(prompts(4), [0] * 4, sampling())
    tensors = [tensor for _, tensor in hf_engine.resident_tensors() if tensor.requires_grad is False and tensor.dim() == 2]
    hf_engine.sleep()
    assert list(hf_engine.resident_tensors()) == []
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 0
    with pytest.raises(RolloutError, match="asleep"):
        hf_engine.generate(prompts(1), [0], sampling())
    hf_engine.wake_up("weights")
    hf_engine.load_weights(weights_of(model_of(tied_folder)))
    hf_engine.wake_up("kv_cache")
    assert hf_engine.generate(prompts(4), [0] * 4, sampling()) == before


def test_an_engine_that_keeps_its_weights_needs_no_load_and_holds_them_on_the_host(tied_folder):
    engine = engine_at("hf", tied_folder, load_format="auto", sleep_level=1)
    before = engine.generate(prompts(4), [0] * 4, sampling())
    weights = sum(parameter.numel() * 4 for parameter in model_of(tied_folder).parameters())
    held = host_allocator().held_bytes
    engine.sleep()
    engine.sleep()
    assert list(engine.resident_tensors()) == []
    assert host_allocator().held_bytes - held == weights
    engine.wake_up("weights")
    engine.wake_up("kv_cache")
    assert host_allocator().held_bytes == held
    assert engine.generate(prompts(4), [0] * 4, sampling()) == before


def test_settings_meant_for_another_engine_are_refused(tied_folder):
    with pytest.raises(ConfigError, match=r"logprobs_mode=raw_logits.*processed_logprobs and raw_logprobs"):
        engine_at("hf", tied_folder, logprobs_mode="raw_logits")
    with pytest.raises(ConfigError, match=r"engine_kwargs\.vllm.*rollout\.name=hf"):
        engine_at("hf", tied_folder, engine_kwargs=schema.EngineKwargs(vllm={"block_size": 16}))
