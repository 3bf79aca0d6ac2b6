"""Quantised bases of families with experts or with layers that carry a state: numbers, errors, bytes, and what is saved."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.memory import activation_cases as act
from tests.memory.batching.test_shared_prompt import grouped, sharing
from tests.model import mxfp4
from tests.model.architectures import tiny_folder, whole_model
from tests.model.test_prefix_kv import PARTS, results
from tests.ranks import run_ranks
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import ActorRolloutRef, Fsdp, Model
from verl_memopt.distributed.device import training_mesh
from verl_memopt.errors import ConfigError
from verl_memopt.memory.lora_torch import adapters, merged_weights
from verl_memopt.memory.quantized_frozen_torch import KEPT, PACKED, packed_experts, quantized_layers
from verl_memopt.memory.tiled_mlp import TiledMlp
from verl_memopt.model import expert_products
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.sizes import size_of
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import WeightFolder, named_weights
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.plan.held import Held
from verl_memopt.worker.roles import exact_weights_of, quantization_error

CPU = torch.device("cpu")
BATCH = sharing(grouped(20, [9, 5, 1, 12, 3, 7]))
BESIDE = "gemma4_text with experts"
KINDS = ("qwen3_5_text", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss", "glm4_moe", BESIDE)
MIXTURES = KINDS[1:]
OPTIONS = {
    "plain": {"recompute_elementwise": False, "prune_last_block": False},
    "recomputed": {"recompute_elementwise": True},
    "checkpoints and tiles": {"recompute_elementwise": True, "recompute": True, "tiled_mlp": TiledMlp(True, 3)},
    "tiled block": {"recompute_elementwise": True, "block_tile_tokens": 16},
}


def shape_of(kind, **more):
    return TinyShape(
        kind.split()[0], num_layers=4, tie_embeddings=False, initializer_range=0.06, experts_beside=kind == BESIDE, **more
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    at = tmp_path_factory.mktemp("quantised")
    return {kind: make_tiny_model(at / kind, shape_of(kind), seed=3) for kind in KINDS}


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """Qwen3-VL with experts, which its files have turned."""
    at = tmp_path_factory.mktemp("vl") / "model"
    folder = tiny_folder(at, "qwen3_vl_moe", tie_word_embeddings=False, moe_intermediate_size=24)
    own = {name: parameter.detach() for name, parameter in whole_model(folder).named_parameters()}
    turned = {name: tensor.transpose(1, 2) if ".experts." in name else tensor for name, tensor in own.items()}
    save_file({name: tensor.contiguous() for name, tensor in turned.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def shaken(policy):
    for number, layer in enumerate(adapters(policy.model).values()):
        torch.manual_seed(number)
        layer.lora_B.detach().copy_(torch.randn(layer.lora_B.shape) * 0.1)
    return policy


def filled_with_decoded(model, plain):
    """Fill a model with the weights that the bytes of another stand for."""
    weights = dict(named_weights(plain))
    for name, layer in quantized_layers(model).items():
        weights[f"{name}.weight"].detach().copy_(layer.packing.dequantize(layer.qweight, torch.float32))
    stored = dict(named_weights(model))
    for name, packed in packed_experts(model).items():
        weights[name].detach().copy_(packed.whole(stored[name + PACKED]))


@pytest.mark.parametrize(("option", "format"), [*((option, "nf4") for option in OPTIONS), ("checkpoints and tiles", "int8")])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_gradients_are_those_of_the_decoded_base(folders, one_rank, kind, option, format):
    if kind == BESIDE and option == "tiled block":
        pytest.skip("norms of outputs")
    build = partial(act.build, folders[kind], one_rank, **act.LORA, **OPTIONS[option])
    policy, plain = shaken(build(quantization=format)), shaken(build())
    exact = plain.compute_log_probs(BATCH, PARTS, 0.9, False).log_probs
    filled_with_decoded(policy.model, plain.model)
    found, expected = (results(each, BATCH, PARTS, False) for each in (policy, plain))
    assert len(found) == 3 + 2 * len(adapters(plain.model))
    assert act.largest_difference(found, expected) <= (2e-6 if kind == "qwen3_5_text" else 1e-5)
    assert (found[0] - exact).abs().max() > 1e-3


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_kernel_for_several_experts_gets_the_weights_of_a_few_at_once(folders, one_rank, kind, monkeypatch):
    build = partial(act.build, folders[kind], one_rank, quantization="nf4", **act.LORA, **OPTIONS["recomputed"])
    one_by_one = results(shaken(build()), BATCH, PARTS, False)
    monkeypatch.setattr(expert_products, "_has_kernel", lambda *_: True)
    for at_once in (1, 3 * 64 * 64, 2**24):
        monkeypatch.setattr(expert_products, "DECODED_AT_ONCE", at_once)
        assert act.largest_difference(results(shaken(build()), BATCH, PARTS, False), one_by_one) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_linear_layers_and_experts_are_bytes_and_what_is_small_stays(folders, one_rank, kind):
    policy = act.build(folders[kind], one_rank, quantization="nf4", **act.LORA)
    weights = dict(named_weights(policy.model))
    packed = {name for name, weight in weights.items() if weight.dtype == torch.uint8}
    whole = {name for name in weights if ".layers." in name and weights[name].ndim > 1 and "lora_" not in name} - packed
    assert all(name.endswith(("qweight", PACKED)) for name in packed)
    assert all(KEPT & set(name.split(".")) for name in whole if not name.endswith("bias"))
    assert any(name.endswith(PACKED) for name in packed) == (kind in MIXTURES)


def test_experts_one_by_one_and_turned_give_the_bytes_of_whole_ones(folders, text_folder, one_rank, tmp_path):
    def experts(folder):
        model = act.quantised(folder, one_rank, "nf4")
        return {name: weight for name, weight in named_weights(model) if name.endswith(PACKED)}

    apart = experts(folders["qwen3_moe"])  # files of this type have experts one by one
    names = load_file(folders["qwen3_moe"] / "model.safetensors")
    assert any(".experts.0." in name for name in names)
    together = tmp_path / "together"
    together.mkdir()
    model = act.build(folders["qwen3_moe"], one_rank).model
    save_file({name: weight.detach().contiguous() for name, weight in named_weights(model)}, together / "model.safetensors")
    (together / "config.json").write_bytes((folders["qwen3_moe"] / "config.json").read_bytes())
    found = experts(together)
    assert found.keys() == apart.keys()
    assert all(torch.equal(found[name], apart[name]) for name in apart)
    turned = experts(text_folder)
    weights = WeightFolder(text_folder)
    for name, packed in packed_experts(act.quantised(text_folder, one_rank, "nf4")).items():
        assert weights.is_stacked(name)
        expected = torch.stack([packed.packing.quantize(one) for one in weights.read(name, ())])
        assert torch.equal(turned[name + PACKED], expected)


@pytest.mark.parametrize("format", ["int8", "nf4"])
@pytest.mark.parametrize("kind", [*KINDS, "qwen3_vl_moe"])
def test_the_error_of_a_reference_is_measured_against_its_own_weights(folders, text_folder, one_rank, kind, format):
    folder = folders.get(kind, text_folder)
    model = act.quantised(folder, one_rank, format)
    mean, _ = quantization_error(model, folder, CPU, 1.0)
    assert 0 < mean <= {"int8": 0.04, "nf4": 0.4}[format]
    plain = build_policy(Model(path=str(folder)), Fsdp(dtype="fp32"), folder, one_rank, CPU)
    plain.requires_grad_(False)
    materialize(plain, folder, CPU)
    pack = act.micros(act.mini_batch())[0].pack
    with torch.no_grad(), exact_weights_of(model, folder, CPU):
        exact = model(pack, 1.0)[0]
    with torch.no_grad():
        expected = plain(pack, 1.0)[0]
    assert (exact - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_streams_its_bytes_from_the_host_computes_the_same(folders, one_rank, kind):
    pack, found = act.micros(act.mini_batch())[0].pack, []
    for offload in (False, "stream"):
        fsdp, settings = Fsdp(dtype="fp32", param_offload=offload), Model(path=str(folders[kind]))
        model = build_policy(settings, fsdp, folders[kind], one_rank, CPU, ModelUse(quantization="nf4"))
        model.requires_grad_(False)
        materialize(model, folders[kind], CPU)
        with torch.no_grad():
            found.append(model(pack, 1.0)[0])
    assert (model.stream is not None) == (offload == "stream")
    assert torch.equal(*found)


def on_two_ranks(rank, folders, dtype):
    found = []
    for folder in folders:
        mesh, settings, fsdp = training_mesh("cpu", 2, -1), Model(path=str(folder)), Fsdp(dtype=dtype, model_dtype=dtype)
        model = build_policy(settings, fsdp, folder, mesh, CPU, ModelUse(quantization="nf4"))
        model.requires_grad_(False)
        materialize(model, folder, CPU)
        shards = {name: weight.to_local().shape for name, weight in named_weights(model) if name.endswith(PACKED)}
        found.append((quantization_error(model, folder, CPU, 1.0), shards))
    return found


def test_ranks_that_shard_a_reference_by_experts_compute_what_one_does(folders, one_rank):
    alone = [quantization_error(act.quantised(folder, one_rank, "nf4"), folder, CPU, 1.0) for folder in folders.values()]
    for answer in run_ranks(on_two_ranks, 2, list(folders.values()), "fp32"):
        for (error, shards), expected in zip(answer, alone, strict=True):
            assert error == pytest.approx(expected, rel=1e-3)
            assert all(shape[0] == 4 for shape in shards.values())  # of 8 experts
    for answer in run_ranks(on_two_ranks, 2, list(folders.values()), "bfloat16"):
        for (error, _), expected in zip(answer, alone, strict=True):
            assert error[0] == pytest.approx(expected[0], rel=0.3)  # the mean


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_gets_decoded_weights_and_a_saved_model_unquantised_ones(folders, one_rank, kind):
    policy = shaken(act.build(folders[kind], one_rank, quantization="nf4", **act.LORA)).model
    plain = shaken(act.build(folders[kind], one_rank, **act.LORA)).model
    weights = WeightFolder(folders[kind])
    exact = dict(merged_weights(named_weights(policy), policy, lambda name: weights.read(name, ())))
    expected = dict(merged_weights(named_weights(plain), plain))
    assert exact.keys() == expected.keys()
    assert all(torch.equal(exact[name], expected[name]) for name in exact)
    filled_with_decoded(policy, plain)
    sent, expected = (dict(merged_weights(named_weights(model), model)) for model in (policy, plain))
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], expected[name]) for name in sent)


@pytest.mark.parametrize("format", ["int8", "nf4"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_the_base_are_those_of_the_plan_and_one_expert_is_decoded_at_a_time(tmp_path, one_rank, kind, format):
    shape = shape_of(kind, hidden_size=128, num_experts=16, expert_size=96, intermediate_size=256)
    folder = make_tiny_model(tmp_path / "model", shape)
    options = {"recompute_elementwise": True, **act.LORA}
    with ByteTracker() as tracker:
        policy = act.build(folder, one_rank, quantization=format, **options)
        loaded = tracker.peaks[DEVICE].bytes
    rests = sum(parameter.nbytes for parameter in policy.model.parameters())
    keys = {"model.lora_rank": 4, "actor.fsdp_config.dtype": "fp32", "actor.fsdp_config.model_dtype": "fp32"}
    size = size_of(Model(path=str(folder)), "model")
    held = Held("policy", replaced(ActorRolloutRef(), keys), size, 1, "cpu", trained=True, quantization=format)
    trained = sum(parameter.nbytes for parameter in policy.model.parameters() if parameter.requires_grad)
    assert rests - trained == held.base
    largest = 128 * size.widest
    assert loaded <= rests + 21 * largest
    whole = act.build(folder, one_rank, **options)
    beside = act.peaks(whole, act.mini_batch(), steps=1)[0] - sum(parameter.nbytes for parameter in whole.model.parameters())
    assert act.peaks(policy, act.mini_batch(), steps=1)[0] - rests <= beside + held.decode_scratch


def test_experts_in_mxfp4_keep_their_bytes_whatever_the_format_of_the_other_layers(tmp_path, one_rank):
    folder, plain = mxfp4.folders(tmp_path)
    policy = shaken(act.build(folder, one_rank, quantization="int8", **act.LORA))
    decoded = shaken(act.build(plain, one_rank, **act.LORA))
    unquantised = dict(named_weights(act.build(folder, one_rank, **act.LORA).model))
    stored = {name: weight for name, weight in named_weights(policy.model) if name.endswith(PACKED)}
    assert len(stored) == 2 * mxfp4.SHAPE.num_layers
    assert all(torch.equal(stored[name], unquantised[name]) for name in stored)
    filled_with_decoded(policy.model, decoded.model)
    assert act.largest_difference(*(results(each, BATCH, PARTS, False) for each in (policy, decoded))) <= 1e-5
    frozen = act.quantised(folder, one_rank, "nf4")
    assert {packed.packing.kind for packed in packed_experts(frozen).values()} == {"mxfp4"}
    assert quantization_error(frozen, folder, CPU, 1.0)[0] > 0


def test_a_base_whose_experts_transformers_computes_is_refused(tmp_path, one_rank):
    folder = tiny_folder(tmp_path / "model", "olmoe")
    with pytest.raises(ConfigError, match=r"model\.quantization=nf4: .*experts.*Set it to none"):
        act.build(folder, one_rank, quantization="nf4", **act.LORA)
    assert not packed_experts(act.quantised(folder, one_rank, "nf4"))
