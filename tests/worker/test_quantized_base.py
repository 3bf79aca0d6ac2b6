"""A quantised base under adapters: trainer and vLLM compute with the same bytes, and nothing of the base is there twice."""

import pytest
import torch
from safetensors.torch import load_file

from tests.model import mxfp4
from tests.rollout.tools import tiny_folder as model_folder
from tests.worker.test_shared_weights import AR, engine_places, places, settings_of, step
from tests.worker.test_worker import ALL, PROMPTS, call, generated, same
from verl_memopt.memory.lora_torch import ADAPTERS
from verl_memopt.memory.lora_torch import adapters as adapters_of
from verl_memopt.memory.quantized_frozen_torch import PACKED
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import named_weights
from verl_memopt.rollout.engine import train_sampling

KEY = f"{AR}.model.quantization"
LORA = {f"{AR}.model.lora_rank": 4, f"{AR}.model.lora_alpha": 8, f"{AR}.actor.optim.lr": 1e-2}


@pytest.mark.parametrize(("kind", "dtype"), [("nf4", "fp32"), pytest.param("int8", "default", marks=pytest.mark.slow)])
def test_vllm_computes_with_the_bytes_of_the_trainers_base_and_gets_the_adapters_alone(made, tmp_path, kind, dtype):
    worker = made(settings_of("auto", dtype, "vllm") | LORA | {KEY: kind}, model_folder(tmp_path / "model", tied=True))
    assert worker.shares_weights
    weights = dict(named_weights(worker.policy.model))
    adapters = {name for name in weights if name.rsplit(".", 1)[-1] in ADAPTERS}
    packed = {name for name, weight in weights.items() if weight.dtype == torch.uint8}
    assert {name.rsplit(".", 2)[-2] for name in packed} == {f"{each}_proj" for each in ("q", "k", "v", "o", "gate", "up", "down")}
    assert {weights[name].dtype for name in adapters} == {torch.float32}
    base = {name: weight.clone() for name, weight in weights.items() if name not in adapters}
    in_adapters = sum(weights[name].numel() for name in adapters)
    for at in range(6):
        assert {name: places(worker)[name] for name in base} == engine_places(worker)
        _, difference, elements = step(worker, at)
        assert 0 < elements <= 3 * in_adapters * 2
        assert difference <= (1e-5 if dtype == "fp32" else 0.2)
    assert same(base, {name: weights[name] for name in base})
    assert weights["model.layers.0.mlp.up_proj.lora_B"].abs().max() > 0
    # Saved, and taken up by a run whose engine has decoded weights of its own: the same base, so the same log-probs.
    call(worker, "update_weights")
    shared = generated(worker, seed=9)
    records = call(worker, "save", str(tmp_path / "saved"), [*ALL, "hf_model"])
    assert sum(file.stat().st_size for file in (tmp_path / "saved").glob("*.distcp")) < 20 * 4 * in_adapters
    exported = load_file(tmp_path / "saved" / "huggingface" / "model.safetensors")
    original = load_file(tmp_path / "model" / "model.safetensors")
    name, layer = "model.layers.0.mlp.up_proj", adapters_of(worker.policy.model)["model.layers.0.mlp.up_proj"]
    merged = original[f"{name}.weight"].float() + layer.scale * layer.lora_B.detach() @ layer.lora_A.detach()
    assert (exported[f"{name}.weight"] - merged).abs().max() <= 1e-6
    assert torch.equal(exported["model.norm.weight"].float(), original["model.norm.weight"].float())
    assert records
    for engine in ("vllm", "hf"):
        worker = made(settings_of(False, dtype, engine) | LORA | {KEY: kind}, tmp_path / "model")
        assert not worker.shares_weights
        call(worker, "load", str(tmp_path / "saved"), ALL)
        assert same({name: dict(named_weights(worker.policy.model))[name] for name in base}, base)
        call(worker, "update_weights")
        apart = generated(worker, seed=9)
        if dtype == "fp32" and engine == "vllm":
            assert apart.response_ids == shared.response_ids
            for one, other in zip(apart.log_probs, shared.log_probs, strict=True):
                assert one == pytest.approx(other, abs=1e-5)
        _, difference, _ = step(worker, 7)
        assert difference <= (1e-5 if dtype == "fp32" else 0.2)


KINDS = ("qwen3_5_text", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss")


@pytest.mark.parametrize("kind", [*KINDS, "mxfp4"])
def test_transformers_generates_with_the_bytes_of_experts_and_a_run_without_sharing_goes_on_from_them(made, tmp_path, kind):
    if kind == "mxfp4":
        folder, plain = mxfp4.folders(tmp_path)
    else:
        folder = plain = make_tiny_model(tmp_path / "model", TinyShape(kind, tie_embeddings=False, initializer_range=0.06))
    worker = made(settings_of(True, "fp32", "hf") | LORA | {KEY: "nf4"}, folder)
    weights = dict(named_weights(worker.policy.model))
    base = {name: weight.clone() for name, weight in weights.items() if name.rsplit(".", 1)[-1] not in ADAPTERS}
    assert any(name.endswith(PACKED) for name in base) == (kind != "qwen3_5_text")
    for at in range(3):
        assert {name: places(worker)[name] for name in base} == engine_places(worker)
        _, difference, _ = step(worker, at)
        assert difference <= 1e-5
    assert same(base, {name: weights[name] for name in base})
    call(worker, "update_weights")
    shared = generated(worker, seed=9)
    call(worker, "save", str(tmp_path / "saved"), [*ALL, "hf_model"])
    exported, original = (load_file(at / "model.safetensors") for at in (tmp_path / "saved" / "huggingface", plain))
    assert exported.keys() == original.keys()
    adapted = {f"{name}.weight" for name in adapters_of(worker.policy.model)}
    assert all(torch.equal(exported[name], original[name]) for name in original if name not in adapted)
    assert any(not torch.equal(exported[name], original[name]) for name in adapted)
    moves = {f"{AR}.actor.fsdp_config.param_offload": True}
    worker = made(settings_of(False, "fp32", "hf") | LORA | {KEY: "nf4"} | moves, folder)
    call(worker, "load", str(tmp_path / "saved"), ALL)
    assert same({name: dict(named_weights(worker.policy.model))[name] for name in base}, base)
    call(worker, "update_weights")
    apart = generated(worker, seed=9)
    assert apart.response_ids == shared.response_ids
    for one, other in zip(apart.log_probs, shared.log_probs, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("share", ["auto", False])
def test_vllm_gets_decoded_experts_because_it_does_not_share_them(made, tmp_path, share):
    shape = TinyShape("qwen3_moe", tie_embeddings=False, initializer_range=0.06)
    worker = made(settings_of(share, "fp32", "vllm") | LORA | {KEY: "nf4"}, make_tiny_model(tmp_path / "model", shape))
    assert not worker.shares_weights
    for at in range(2):
        _, difference, _ = step(worker, at)
        assert difference <= 1e-5


@pytest.mark.slow  # tests/worker/test_adapters_on_ranks.py counts the bytes beside transformers in every run of the tests
def test_the_base_lies_on_the_device_once_as_bytes_in_update_and_rollout(made, tmp_path):
    shape = TinyShape(hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=4, initializer_range=0.2)
    worker = made(settings_of("auto", "fp32", "vllm") | LORA | {KEY: "nf4"}, make_tiny_model(tmp_path / "model", shape))
    step(worker, 0)
    linear = 2 * (4 * 128 * 128 + 3 * 128 * 256)
    weights = dict(named_weights(worker.policy.model))
    others = sum(each.nbytes for each in weights.values() if each.dtype != torch.uint8)
    update = worker.call("update_weights", True, "update_weights").memory.kind_peaks
    assert update["params"] == linear // 2 + 4 * linear // 64 + others
    sampling = train_sampling(worker.settings.rollout)
    rollout = worker.call("gen", True, "generate", PROMPTS, [1, 2, 3], sampling).memory.kind_peaks
    assert rollout["params"] == update["params"]
    worker = made(settings_of("auto", "fp32", "vllm") | LORA, tmp_path / "model")
    step(worker, 0)
    plain = worker.call("gen", True, "generate", PROMPTS, [1, 2, 3], sampling).memory.kind_peaks
    levels = 2 * 4 * 256 * 2 * 4  # of the four layers of each block, what a byte of codes stands for
    assert rollout["rollout weights"] == plain["rollout weights"] + levels
    assert plain["params"] - rollout["params"] == 4 * linear - linear // 2 - 4 * linear // 64
