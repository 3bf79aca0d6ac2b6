import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.model.test_build import filled
from verl_memopt.model import export
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
