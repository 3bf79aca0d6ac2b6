import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.model.test_build import filled
from verl_memopt.model import export
from verl_memopt.model.export import SafetensorsWriter
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import named_weights
from verl_memopt.observe.byte_tracker import HOST, ByteTracker


def exported(folder, tmp_path, writes=True):
    policy = filled(folder)
    weights = ((name, parameter.detach()) for name, parameter in named_weights(policy))
    export.export_folder(tmp_path / "out", policy.lm.config, folder, weights, writes)
    return tmp_path / "out"


def assert_same_weights(folder, other):
    one, two = (dict(AutoModelForCausalLM.from_pretrained(path).named_parameters()) for path in (folder, other))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_an_exported_folder_loads_in_transformers_with_the_same_weights(untied_folder, tmp_path):
    out = exported(untied_folder, tmp_path)
    assert_same_weights(untied_folder, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("2+3=")["input_ids"] == AutoTokenizer.from_pretrained(untied_folder)("2+3=")["input_ids"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.2.up_proj.weight"),
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj"),
    ],
)
def test_experts_are_written_as_published_models_have_them(tmp_path, kind, name):
    folder = make_tiny_model(tmp_path / "in", TinyShape(model_type=kind, num_experts=3), seed=4)
    out = exported(folder, tmp_path)
    one, two = (load_file(path / "model.safetensors") for path in (folder, out))
    assert name in one
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert_same_weights(folder, out)


def test_weights_beyond_one_file_are_indexed(untied_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "FILE_BYTES", 40_000)
    out = exported(untied_folder, tmp_path)
    assert (out / "model.safetensors.index.json").is_file()
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert_same_weights(untied_folder, out)


def test_a_rank_that_does_not_write_writes_nothing(tiny_folder, tmp_path):
    assert not exported(tiny_folder, tmp_path, writes=False).exists()


def test_an_export_holds_one_chunk_on_the_host(untied_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "CHUNK_BYTES", 1000)
    policy, out = filled(untied_folder), tmp_path / "out"
    weights = ((name, parameter.detach()) for name, parameter in named_weights(policy))
    with ByteTracker() as tracker:
        export.export_folder(out, policy.lm.config, untied_folder, weights, True)
    assert tracker.peaks[HOST].kinds == {"export": 1000}
    assert_same_weights(untied_folder, out)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "fp32": torch.randn(5, 3, generator=generator),
        "bf16": torch.randn(7, generator=generator).bfloat16(),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
    }


@pytest.mark.parametrize("chunk", [1, 10, 10_000])
def test_what_is_written_is_read_back_to_the_bit_in_any_chunks(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(export, "CHUNK_BYTES", chunk)
    with SafetensorsWriter(tmp_path / "model.safetensors") as writer:
        for name, tensor in tensors().items():
            writer.add(name, tensor)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_file_that_was_not_finished_is_not_taken_for_a_whole_one(tmp_path):
    def write():
        with SafetensorsWriter(tmp_path / "model.safetensors") as writer:
            for tensor in (torch.zeros(2), torch.zeros(2, dtype=torch.complex64)):
                writer.add(str(tensor.dtype), tensor)

    with pytest.raises(KeyError):
        write()
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "model.safetensors")


def test_a_header_that_is_full_takes_no_more_names(tmp_path):
    one = torch.zeros(1)
    with SafetensorsWriter(tmp_path / "model.safetensors") as writer:
        count = 0
        while writer.has_room(f"a.rather.long.name.of.a.layer.{count}", one):
            writer.add(f"a.rather.long.name.of.a.layer.{count}", one)
            count += 1
    assert count > 400
    assert len(load_file(tmp_path / "model.safetensors")) == count
