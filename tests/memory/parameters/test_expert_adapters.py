"""Adapters of experts in files of peft, as a reference, as a teacher's, and merged; and names that fit no expert."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.memory import activation_cases as act
from tests.model import architectures, mxfp4
from tests.model.test_expert_lora import BOTH, LORA, TINY, adapted, shake
from verl_memopt.config.schema import Model
from verl_memopt.errors import ConfigError
from verl_memopt.memory.lora import Lora
from verl_memopt.memory.lora_torch import (
    adapters,
    adapters_off,
    as_reference,
    load_adapter,
    merged_weights,
    other_adapter,
    save_adapter,
    starting_adapter,
)
from verl_memopt.model.packing import pack_rows
from verl_memopt.model.packing_check import check_architecture
from verl_memopt.model.tiny import make_tiny_model
from verl_memopt.model.weights import named_weights

ROW = torch.arange(5, 25)
CPU = torch.device("cpu")
CHOICES = {"both": BOTH, "gate and up": BOTH[:1], "down": BOTH[1:]}
EXPERTS = "base_model.model.model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    at = tmp_path_factory.mktemp("mixtures")
    made = {kind: make_tiny_model(at / kind, shape, seed=3) for kind, shape in TINY.items()}
    made["mxfp4"], made["decoded"] = mxfp4.folders(at / "mxfp4")
    return made


def log_probs(policy):
    with torch.no_grad():
        return policy.model(pack_rows(ROW[:8], [8], ROW[8:], [12]), 1.0, False)[0]


def by_transformers(model):
    with torch.no_grad():
        logits = model(ROW[None]).logits[0].log_softmax(-1)
    return logits[:-1].gather(1, ROW[1:, None]).squeeze(1)[7:]


def saved(policy, folder, chosen=BOTH, modules="all-linear", base="base"):
    settings = Lora(lora_rank=4, lora_alpha=8, target_modules=modules, target_parameters=chosen)
    save_adapter(folder, policy.model, str(base), settings, True)
    return folder


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_file_has_an_experts_rows_of_a_together_and_its_columns_of_b_apart(folders, one_rank, tmp_path, kind):
    policy = adapted(folders[kind], one_rank)
    tensors = load_file(saved(policy, tmp_path) / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["target_modules"], config["target_parameters"]) == ([], BOTH)
    layers = adapters(policy.model)
    for prefix, weight in ((f"{EXPERTS}.base_layer", "gate_up_proj"), (EXPERTS, "down_proj")):
        layer = layers[f"model.layers.1.mlp.experts.{weight}_lora"]
        down, up = (tensors.pop(f"{prefix}.lora_{part}.weight") for part in "AB")
        for expert in range(layer.num_experts):
            assert torch.equal(down[4 * expert : 4 * expert + 4], layer.lora_A[expert])
            assert torch.equal(up[:, expert :: layer.num_experts], layer.lora_B[expert])
    assert all(name.startswith("base_model.model.model.layers.") for name in tensors)
    assert len(tensors) == 4 * (TINY[kind].num_layers - 1)


@pytest.mark.parametrize("chosen", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "mxfp4"])
def test_adapters_come_back_from_a_folder_and_merged_ones_score_the_same(folders, one_rank, tmp_path, kind, chosen):
    policy = adapted(folders[kind], one_rank, target_parameters=chosen)
    expected = log_probs(policy)
    again = adapted(folders[kind], one_rank, target_parameters=chosen)
    shake(again.model, seed=70)
    assert not torch.equal(log_probs(again), expected)
    load_adapter(saved(policy, tmp_path, chosen), again.model)
    assert torch.equal(log_probs(again), expected)
    plain = AutoModelForCausalLM.from_pretrained(folders["decoded" if kind == "mxfp4" else kind], dtype=torch.float32)
    merged = dict(merged_weights(named_weights(policy.model), policy.model))
    assert merged.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict({name: tensor.float() for name, tensor in merged.items()})
    torch.testing.assert_close(by_transformers(plain), expected, rtol=0, atol=1e-5)


def test_merging_leaves_the_base_as_it_is(folders, one_rank):
    policy = adapted(folders["qwen3_moe"], one_rank)
    before = {name: weight.clone() for name, weight in named_weights(policy.model)}
    for name, tensor in merged_weights(named_weights(policy.model), policy.model):
        assert (".experts." in name) == (not torch.equal(tensor, before[name]))
    assert all(torch.equal(weight, before[name]) for name, weight in named_weights(policy.model))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mxfp4"])
def test_the_reference_is_what_training_started_from(folders, one_rank, tmp_path, kind):
    policy = adapted(folders[kind], one_rank, target_modules="all-linear")
    started = log_probs(policy)
    start = starting_adapter(saved(policy, tmp_path), policy.model, torch.float32, CPU)
    shake(policy.model, seed=40)
    moved = log_probs(policy)
    assert not torch.allclose(moved, started, atol=1e-3)
    with as_reference(policy.model, start, CPU):
        assert torch.equal(log_probs(policy), started)
    plain = act.build(folders[kind], one_rank, recompute_elementwise=True)
    with adapters_off(policy.model):
        torch.testing.assert_close(log_probs(policy), log_probs(plain), rtol=0, atol=2e-6)
    assert torch.equal(log_probs(policy), moved)
    again = tmp_path / "again"
    save_adapter(again, policy.model, "base", Lora(lora_rank=4, target_parameters=BOTH), True, start)
    first, second = (load_file(place / "adapter_model.safetensors") for place in (tmp_path, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("chosen", CHOICES.values(), ids=CHOICES)
def test_a_teachers_adapters_may_have_another_rank_and_be_on_other_weights(folders, one_rank, tmp_path, chosen):
    teacher = adapted(folders["gpt_oss"], one_rank, target_parameters=chosen, lora_rank=3)
    expected, policy = log_probs(teacher), adapted(folders["gpt_oss"], one_rank)
    found = other_adapter(saved(teacher, tmp_path, chosen), policy.model, torch.float32, 8 / 3, "teacher.model.lora_adapter_path")
    with as_reference(policy.model, found, CPU):
        torch.testing.assert_close(log_probs(policy), expected, rtol=0, atol=2e-6)


def test_a_file_with_inputs_and_outputs_exchanged_is_refused_by_its_shapes(folders, one_rank, tmp_path):
    policy = adapted(folders["qwen3_moe"], one_rank)
    path = saved(policy, tmp_path) / "adapter_model.safetensors"
    exchanged = {
        name.replace("lora_A", "lora_X").replace("lora_B", "lora_A").replace("lora_X", "lora_B"): tensor.t().contiguous()
        for name, tensor in load_file(path).items()
    }
    save_file(exchanged, path)
    with pytest.raises(ConfigError, match=r"lora_adapter_path=.*target_parameters: .*lora_A\.weight has shape"):
        load_adapter(tmp_path, policy.model)


# Against peft itself.


def peft_model(folder, **more):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **more)
    torch.manual_seed(3)
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), config)


@pytest.mark.parametrize("chosen", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("kind", TINY)
def test_peft_loads_what_is_saved_and_scores_the_same(folders, one_rank, tmp_path, kind, chosen):
    peft = pytest.importorskip("peft")
    policy = adapted(folders[kind], one_rank, target_modules=["q_proj"], target_parameters=chosen)
    saved(policy, tmp_path, chosen, ["q_proj"])
    base = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32).eval()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(by_transformers(loaded), log_probs(policy), rtol=0, atol=1e-5)


@pytest.mark.parametrize("chosen", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("kind", TINY)
def test_adapters_that_peft_saves_are_loaded_and_score_the_same(folders, one_rank, tmp_path, kind, chosen):
    theirs = peft_model(folders[kind], target_parameters=chosen, target_modules=["q_proj"])
    theirs.save_pretrained(tmp_path)
    policy = adapted(folders[kind], one_rank, target_modules=["q_proj"], target_parameters=chosen)
    load_adapter(tmp_path, policy.model)
    torch.testing.assert_close(log_probs(policy), by_transformers(theirs), rtol=0, atol=1e-5)


# Names.


def checked(folder, targets, modules="all-linear"):
    model = Model(path=str(folder), lora_rank=4, target_parameters=targets, target_modules=modules)
    check_architecture(model, folder, longest=64)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["mlp.experts.gate_up_porj"], "no tensor is named mlp.experts.gate_up_porj (near: mlp.experts.gate_up_proj"),
        (["down_porj"], "no tensor is named down_porj (near: down_proj"),
        (["mlp.gate.weight"], "mlp.gate.weight is no weight of experts. Name linear layers in target_modules"),
        (["q_proj.weight"], "q_proj.weight is no weight of experts."),
    ],
)
def test_a_name_that_fits_no_expert_is_refused_with_the_nearest_names(folders, one_rank, targets, said):
    for refuse in (
        lambda: checked(folders["qwen3_moe"], targets),
        lambda: act.build(folders["qwen3_moe"], one_rank, **(LORA | {"target_parameters": targets})),
    ):
        with pytest.raises(ConfigError) as error:
            refuse()
        assert str(error.value).startswith(f"actor_rollout_ref.model.target_parameters: {said}")
        assert "The weights of experts are mlp.experts.down_proj, mlp.experts.gate_up_proj." in str(error.value)


def test_a_model_without_experts_or_with_those_of_transformers_is_refused(tiny_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"target_parameters=\[.*\]: the model has no experts"):
        checked(tiny_folder, BOTH)
    with pytest.raises(ConfigError, match=r"target_parameters=\[.*\]: transformers computes the experts of models of type olmoe"):
        checked(architectures.tiny_folder(tmp_path / "olmoe", "olmoe"), BOTH)


def test_without_experts_an_empty_list_of_layers_chooses_nothing(folders):
    with pytest.raises(ConfigError, match=r"target_modules=\[\]: no linear layer is chosen"):
        checked(folders["qwen3_moe"], None, [])
    checked(folders["qwen3_moe"], ["gate_up_proj"], [])


def test_all_linear_layers_leave_experts_as_they_are(folders, one_rank):
    policy = act.build(folders["qwen3_moe"], one_rank, **act.LORA)
    assert not any(".experts" in name for name in adapters(policy.model))
