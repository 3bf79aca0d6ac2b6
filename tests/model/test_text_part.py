"""A folder of a multimodal model, trained as text: what is read, what stays on disk, and what a saved model holds."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.model.architectures import text_name, tiny_folder, whole_model
from tests.model.test_build import filled
from verl_memopt.config.schema import Actor, Model
from verl_memopt.errors import ConfigError
from verl_memopt.model.decoder import Decoder
from verl_memopt.model.export import export_folder, stored_dtype
from verl_memopt.model.given import write_model
from verl_memopt.model.packing_check import check_architecture
from verl_memopt.model.sizes import size_of
from verl_memopt.model.text_part import split_names, with_dtype
from verl_memopt.model.tiny import build_tokenizer
from verl_memopt.model.weights import WeightFolder, load_model_config, named_weights, store_scalars, stored_tensors

KINDS = ["qwen3_vl_moe", "qwen3_vl", "gemma3", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe"]
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
PROCESSOR = '{"size": {"longest_edge": 56}}'


def folder_of(at, kind, tied=True):
    """A folder with a processor, and in its config and its weights what published folders have."""
    folder = tiny_folder(at, kind, tie_word_embeddings=tied)
    (folder / "preprocessor_config.json").write_text(PROCESSOR)
    if kind.startswith("qwen3_5"):
        file = folder / "model.safetensors"
        drafts = {"mtp.fc.weight": torch.randn(4, 8), "mtp.layers.0.mlp.gate.weight": torch.arange(3)}
        save_file(load_file(file) | drafts, file, {"format": "pt"})
    if kind == "gemma4":  # weights of layers that read the keys of an earlier one, which have no use for them
        file, at = folder / "model.safetensors", "model.language_model.layers.3.self_attn"
        unread = {f"{at}.k_proj.weight": torch.randn(64, 64), f"{at}.k_norm.weight": torch.randn(64)}
        save_file(load_file(file) | unread, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=[(kind, tied) for kind in KINDS for tied in (True, False)], ids=str)
def folder(request, tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("whole") / "model", *request.param)


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def assert_same_logits(one, other):
    # Not to the bit: a product of mapped weights may depend on their place in the file.
    torch.testing.assert_close(logits(one), logits(other), rtol=0, atol=1e-6)


def exported(folder, out, dtype=torch.float32, add=0.0, **settings):
    policy = filled(folder, **settings)
    weights = ((name, (parameter.detach() + add).to(dtype)) for name, parameter in named_weights(policy))
    export_folder(out, policy.lm.config, folder, weights, True, dtype, WeightFolder(folder))
    return out


def bytes_of(folder):
    """Name -> bytes of each tensor of a folder."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def test_only_the_text_part_is_built(folder):
    policy = filled(folder)
    names = {name for name, _ in named_weights(policy)}
    assert all(
        name.startswith(("model.layers.", "model.embed_tokens", "model.norm.", "model.per_l", "lm_head.")) for name in names
    )
    assert isinstance(policy.decoder, Decoder)
    whole = {text_name(name): weight for name, weight in whole_model(folder).state_dict().items()}
    assert all(torch.equal(parameter, whole[name]) for name, parameter in named_weights(policy))


def folder_type(folder):
    return json.loads((folder / "config.json").read_text())["model_type"]


def test_a_saved_folder_gives_the_same_logits_with_every_other_part_to_the_byte(folder, tmp_path):
    out = exported(folder, tmp_path / "out")
    assert_same_logits(whole_model(out), whole_model(folder))
    before, after = bytes_of(folder), bytes_of(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (out / "preprocessor_config.json").read_text() == PROCESSOR
    written, given = (json.loads((place / "config.json").read_text()) for place in (out, folder))
    if given["tie_word_embeddings"]:  # said in both places, so that a text model that is built from it is tied too
        given["text_config"]["tie_word_embeddings"] = True
    assert written == given


def test_trained_weights_are_saved_under_the_names_of_the_folder_and_the_others_keep_their_bytes(folder, tmp_path):
    out = exported(folder, tmp_path / "out", torch.bfloat16, add=0.25)
    before, after, source = bytes_of(folder), bytes_of(out), WeightFolder(folder)
    for name in source.stored.values():
        assert torch.equal(after[name], (before[name] + 0.25).bfloat16())
    for name in source.apart:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name])
    assert stored_dtype(out, torch.float32) == torch.bfloat16


@pytest.mark.parametrize(("kind", "place"), [*((kind, "outer") for kind in KINDS), *((kind, "text") for kind in KINDS[1:])])
def test_a_head_tied_in_one_config_alone_is_tied_in_both_of_the_saved_folder(tmp_path, kind, place):
    folder = folder_of(tmp_path / "model", kind)
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = place == "outer", place == "text"
    (folder / "config.json").write_text(json.dumps(config))
    policy = filled(folder)
    assert policy.tied
    out = exported(folder, tmp_path / "out")
    written = json.loads((out / "config.json").read_text())
    assert written["tie_word_embeddings"] is written["text_config"]["tie_word_embeddings"] is True


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_head_is_an_error_and_never_random(tmp_path, kind):
    folder = folder_of(tmp_path / "model", kind, tied=False)
    file = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "lm_head" not in name}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"weights and config disagree: missing lm_head\.weight"):
        filled(folder)


def test_a_weight_that_no_part_has_is_an_error(tmp_path):
    folder = folder_of(tmp_path / "model", "qwen3_vl")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.hearing.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"unexpected model\.hearing\.weight"):
        filled(folder)


def test_a_field_that_the_settings_change_is_changed_in_the_text_part_of_the_saved_config(tmp_path):
    folder = folder_of(tmp_path / "model", "qwen3_vl")
    axes = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"] |= axes
    (folder / "config.json").write_text(json.dumps(config))
    rope = {"rope_type": "default", "rope_theta": 123.0}
    out = exported(folder, tmp_path / "out", override_config={"rms_norm_eps": 0.5, "rope_parameters": rope})
    written = json.loads((out / "config.json").read_text())
    assert written["text_config"]["rms_norm_eps"] == 0.5
    assert written["text_config"]["rope_parameters"] == rope | axes
    assert written["vision_config"] == config["vision_config"]
    model = Model(path=str(folder), override_config={"rms_norm_eps": 0.5, "rope_parameters": rope})
    assert load_model_config(Model(path=str(out)), out).to_diff_dict() == load_model_config(model, folder).to_diff_dict()


def test_the_engines_folder_holds_the_text_part_alone(folder, tmp_path):
    config = load_model_config(Model(path=str(folder)), folder)
    export_folder(tmp_path / "engine", config, folder, None, True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(type(config).from_pretrained(tmp_path / "engine"))
    store_scalars(model)
    assert dict(model.named_parameters()).keys() == WeightFolder(folder).names.keys()
    assert model.config.architectures == [type(model).__name__]


def test_the_driver_learns_which_weights_are_apart(folder):
    checked = check_architecture(Model(path=str(folder)), folder, 64, Actor(use_prefix_grouper=False))
    assert checked.has_more
    assert set(checked.apart) == bytes_of(folder).keys() - set(WeightFolder(folder).stored.values())
    assert checked.weights.keys() == WeightFolder(folder).names.keys()


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_a_text_folder_keeps_its_prefix_and_its_head_for_drafting(tmp_path, prefix):
    folder = folder_of(tmp_path / "model", "qwen3_5_text", tied=False)
    file = folder / "model.safetensors"
    # Transformers writes the prefix beside a text config if it has loaded the model from a folder with the prefix.
    of_text = {name: prefix + name.removeprefix("model.") if name.startswith("model.") else name for name in bytes_of(folder)}
    renamed = {of_text[name]: tensor for name, tensor in load_file(file).items()}
    save_file(renamed, file, {"format": "pt"})
    out = exported(folder, tmp_path / "out")
    assert bytes_of(out).keys() == renamed.keys()
    assert torch.equal(bytes_of(out)["mtp.fc.weight"], renamed["mtp.fc.weight"])
    assert_same_logits(whole_model(out), whole_model(folder))
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3_5_text"
    assert check_architecture(Model(path=str(folder)), folder, 64, Actor()).has_more


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_5_moe_text"])
@pytest.mark.parametrize("fused", [True, False])
def test_experts_stay_one_tensor_or_one_by_one_as_the_folder_has_them(tmp_path, kind, fused):
    folder = tiny_folder(tmp_path / "model", kind, tie_word_embeddings=False)
    names = {name: parameter.detach() for name, parameter in whole_model(folder).named_parameters()}
    drafts = {"mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(2, 6, 4), "mtp.layers.0.mlp.gate.weight": torch.arange(3)}
    stored = {
        name: tensor.contiguous() for name, tensor in (names.items() if fused else stored_tensors(names.items(), "qwen3_moe"))
    }
    save_file(stored | drafts, folder / "model.safetensors", {"format": "pt"})
    out = exported(folder, tmp_path / "out")
    before, after = bytes_of(folder), bytes_of(out)
    assert any(name.startswith("model.") and name.endswith("experts.gate_up_proj") for name in before) == fused
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert_same_logits(whole_model(out), whole_model(folder))
    assert check_architecture(Model(path=str(folder)), folder, 64, Actor(use_prefix_grouper=False)).has_more


@pytest.mark.parametrize("turned", [True, False])
def test_experts_that_the_files_have_turned_stay_turned(tmp_path, turned):
    folder = tiny_folder(tmp_path / "model", "qwen3_vl_moe", tie_word_embeddings=False, moe_intermediate_size=24)
    file = folder / "model.safetensors"
    own = {name: parameter.detach() for name, parameter in whole_model(folder).named_parameters()}
    stored = {name: tensor.transpose(1, 2) if turned and ".experts." in name else tensor for name, tensor in own.items()}
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file, {"format": "pt"})
    out = exported(folder, tmp_path / "out")
    before, after = bytes_of(folder), bytes_of(out)
    assert before["model.language_model.layers.0.mlp.experts.down_proj"].shape == ((4, 24, 64) if turned else (4, 64, 24))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert_same_logits(whole_model(out), whole_model(folder))
    weights, name = WeightFolder(folder), "model.layers.1.mlp.experts.gate_up_proj"
    part = weights.read(name, (slice(1, 3), slice(5, 9), slice(0, 7)))
    assert torch.equal(part, own["model.language_model.layers.1.mlp.experts.gate_up_proj"][1:3, 5:9, :7])
    assert weights.is_stacked(name) == turned


def test_the_text_of_a_saved_qwen3_5_loads_alone_with_the_same_logits(tmp_path):
    for tied in (True, False):
        folder = folder_of(tmp_path / f"model{tied}", "qwen3_5", tied)
        out = exported(folder, tmp_path / f"out{tied}")
        alone = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        torch.testing.assert_close(logits(alone), logits(whole_model(folder)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_as_an_object_keeps_its_parts_and_its_processor_and_the_log_names_what_it_lost(tmp_path, kind, caplog):
    folder = folder_of(tmp_path / "model", kind)
    build_tokenizer(320).save_pretrained(folder)
    model = whole_model(folder)
    settings = write_model(model, None, tmp_path / "inputs")
    written = Path(settings["actor_rollout_ref.model.path"])
    assert (written / "preprocessor_config.json").read_text() == PROCESSOR
    lost = "mtp.fc.weight" if kind.startswith("qwen3_5") else None
    lost = "model.language_model.layers.3.self_attn.k_norm.weight" if kind == "gemma4" else lost
    assert (f"the object has no {lost}, and 1 more weights" in caplog.text) == (lost is not None)
    out = exported(written, tmp_path / "out")
    assert_same_logits(whole_model(out), model)
    assert bytes_of(out).keys() == bytes_of(written).keys()
    assert bytes_of(out).keys() >= {
        name for name in bytes_of(folder) if "mtp" not in name and "layers.3.self_attn.k_" not in name
    }


def test_the_sizes_of_a_folder_are_those_of_its_text_part(folder):
    size = size_of(Model(path=str(folder)), "actor_rollout_ref.model")
    assert size.params == sum(parameter.numel() for parameter in filled(folder).parameters())
    assert size.block_params == max(sum(weight.numel() for weight in block.parameters()) for block in filled(folder).blocks())
    assert (size.qk_norm, size.vocab) == (True, 320)


def test_names_of_any_version_of_transformers_become_those_of_the_text_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    stored = ["language_model.model.norm.weight", "language_model.lm_head.weight", "vision_tower.x", "multi_modal_projector.y"]
    names = {"model.norm.weight": stored[0], "lm_head.weight": stored[1]}
    assert split_names(tmp_path, stored) == (names, stored[2:])
    newer = {"model.norm.weight": "model.language_model.norm.weight", "lm_head.weight": "lm_head.weight"}
    assert split_names(tmp_path, [*newer.values(), "model.vision_tower.x"]) == (newer, ["model.vision_tower.x"])
    with pytest.raises(ConfigError, match="are the same weight"):
        split_names(tmp_path, [stored[0], "model.language_model.norm.weight"])
    (tmp_path / "config.json").write_text('{"model_type": "own_code"}')
    assert split_names(tmp_path, stored) == ({name: name for name in stored}, [])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"dtype": "float16"}),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float16"}),
        ({"text_config": {"dtype": "bfloat16"}}, {"text_config": {"dtype": "float16"}}),
        ({"dtype": "x", "text_config": {"dtype": "x"}}, {"dtype": "float16", "text_config": {"dtype": "float16"}}),
        ({"text_config": {}}, {"text_config": {}, "dtype": "float16"}),
    ],
)
def test_a_dtype_is_written_wherever_a_config_states_one(given, expected):
    assert with_dtype(given, "float16") == expected
