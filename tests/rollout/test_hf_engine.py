import pytest
import torch

from tests.model.architectures import tiny_folder
from tests.model.test_trial_build import SHAPED, fields_of, trained
from tests.rollout.tools import engine_at, model_of, prompts, sampling, weights_of
from verl_memopt.config import schema
from verl_memopt.errors import ConfigError, RolloutError
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.model.packing import pack_rows
from verl_memopt.model.tiny import TinyShape, make_tiny_model


def test_without_a_load_the_dummy_engine_refuses_to_generate(tied_folder):
    engine = engine_at("hf", tied_folder)
    with pytest.raises(RolloutError, match="load_format=auto"):
        engine.generate(prompts(1), [0], sampling())


def test_chunks_of_one_row_give_what_one_chunk_gives(tied_folder, hf_engine):
    small = engine_at("hf", tied_folder, load_format="auto", max_num_seqs=1)
    whole = hf_engine.generate(prompts(6), list(range(6)), sampling(repetition_penalty=1.3))
    assert small.generate(prompts(6), list(range(6)), sampling(repetition_penalty=1.3)).response_ids == whole.response_ids


def test_answers_to_one_prompt_compute_it_once_and_are_what_single_rows_give(hf_engine):
    asked, seeds = [prompts(4)[number] for number in (3, 1, 3, 3, 2)], list(range(5))
    computed = []
    embedding = hf_engine._model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, inputs, output: computed.append(inputs[0].numel()))
    together = hf_engine.generate(asked, seeds, sampling(max_tokens=2))
    hook.remove()
    width = max(map(len, asked))
    assert computed == [3 * (width - 1), 5, 5]
    for prompt, seed, ids, log_probs in zip(asked, seeds, together.response_ids, together.log_probs, strict=True):
        alone = hf_engine.generate([prompt], [seed], sampling(max_tokens=2))
        assert alone.response_ids == [ids]
        assert alone.log_probs[0] == pytest.approx(log_probs, abs=1e-5)


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


def test_layers_that_transformers_would_compute_by_kernels_of_a_gpu_are_refused_on_a_cpu(tmp_path, monkeypatch):
    folder = make_tiny_model(tmp_path / "model", TinyShape("qwen3_5_text"), seed=3)
    package = tmp_path / "packages" / "fla"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.6.0"')
    monkeypatch.syspath_prepend(package.parent)
    with pytest.raises(ConfigError, match=r"rollout\.name=hf.*fla-core.*uninstall"):
        engine_at("hf", folder)


@pytest.mark.parametrize(
    "model_type",
    [*SHAPED, "gemma3_text", "gemma4_text", "gpt_oss", "mistral", "qwen3", "qwen3_moe", "qwen2_moe", "olmoe"],
)
def test_the_engine_computes_what_is_special_in_a_family_as_the_trainer_does(tmp_path, one_rank, model_type):
    """Caps, factors, windows shorter than a row, and norms; prompts of several lengths, some of them twice."""
    folder = tiny_folder(tmp_path, model_type, **fields_of(model_type))
    engine = engine_at("hf", folder, load_format="auto")
    asked = [list(range(5, 5 + size)) for size in (21, 3, 12, 21, 3)]
    answer = engine.generate(asked, list(range(5)), sampling())
    policy, ids = trained(folder, one_rank, False), [torch.tensor(row) for row in answer.response_ids]
    tokens = torch.tensor([token for row in asked for token in row])
    pack = pack_rows(tokens, [len(row) for row in asked], torch.cat(ids), [len(row) for row in ids])
    with torch.no_grad():
        expected = policy(pack, 1.0, False)[0]
    found = torch.tensor([value for row in answer.log_probs for value in row])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_record_of_experts_is_that_of_whole_rows_and_rows_of_a_prompt_share_its_part(tmp_path):
    folder = tiny_folder(tmp_path, "qwen3_moe")
    engine = engine_at("hf", folder, load_format="auto", max_num_seqs=4)
    asked = [list(range(5, 5 + size)) for size in (21, 3, 12, 21, 3, 1)]
    answer = engine.generate(asked, list(range(6)), sampling(ignore_eos=False, routes=True))
    model = model_of(folder)
    for prompt, response, (first, rest) in zip(asked, answer.response_ids, answer.routes, strict=True):
        found = []
        hooks = [
            block.mlp.gate.register_forward_hook(lambda _, arguments, output, found=found: found.append(output[2]))
            for block in model.model.layers
        ]
        model(torch.tensor([prompt + response[:-1]]))
        for hook in hooks:
            hook.remove()
        assert torch.cat([first, rest]).tolist() == torch.stack(found, 1).tolist()
        assert len(first) == len(prompt)
    assert answer.routes[0][0] is answer.routes[3][0]
    assert engine.generate(asked, list(range(6)), sampling()).routes is None
