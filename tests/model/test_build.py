import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from verl_memopt.config.schema import Model
from verl_memopt.errors import ConfigError
from verl_memopt.model import weights
from verl_memopt.model.assembly import allocate
from verl_memopt.model.attention import choose_attention
from verl_memopt.model.packed_model import PolicyModel
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import (
    WeightFolder,
    check_tied_head,
    empty_model,
    fill_from_folder,
    load_model_config,
    named_weights,
    rebuild_buffers,
)

CPU = torch.device("cpu")


def built(folder, dtype=torch.float32, attention="sdpa", options=None, **settings):
    """Gives an empty model; options: of each of its blocks, of which only the last one is pruned."""
    model = Model(path=str(folder), **settings)
    lm = empty_model(load_model_config(model, folder), choose_attention(attention, CPU, dtype), dtype, False)
    whole = [] if options is None else [replace(options, prune=False)] * (lm.config.num_hidden_layers - 1)
    return PolicyModel(lm, 64, False, 0, None if options is None else [*whole, options])


def filled(folder, **settings):
    policy = built(folder, **settings)
    allocate(policy, CPU)
    rebuild_buffers(policy, CPU)
    fill_from_folder(policy, folder)
    return policy


def test_an_empty_model_holds_no_bytes(tiny_folder):
    assert {parameter.device.type for parameter in built(tiny_folder).parameters()} == {"meta"}


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral", "qwen3_moe"])
def test_a_filled_model_equals_the_one_transformers_loads(kind, tmp_path):
    folder = make_tiny_model(tmp_path / kind, TinyShape(model_type=kind, tie_embeddings=kind != "llama"), seed=3)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ours = filled(folder)
    expected = dict(theirs.named_parameters())
    for name, parameter in named_weights(ours):
        assert torch.equal(parameter, expected.pop(name))
    assert not expected
    buffers = dict(theirs.named_buffers())
    for name, buffer in ours.lm.named_buffers():
        assert torch.equal(buffer, buffers[name])


def damaged(folder, tmp_path, change):
    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    change(copy)
    return copy


def rewrite(change):
    def apply(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rewrite(lambda weights: weights.pop(NORM)), f"missing {NORM}"),
        (rewrite(lambda weights: weights.update(stray=torch.zeros(1))), "unexpected stray"),
        (rewrite(lambda weights: weights.update({NORM: torch.zeros(3)})), rf"{NORM} has shape \(3,\)"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"torn"), "not a whole safetensors file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    ],
)
def test_a_folder_whose_weights_do_not_fit_is_refused_by_name(tiny_folder, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        filled(damaged(tiny_folder, tmp_path, change))


def test_a_config_that_is_no_json_is_refused(tiny_folder, tmp_path):
    folder = damaged(tiny_folder, tmp_path, lambda copy: (copy / "config.json").write_text("{"))
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_model_config(Model(path=str(folder)), folder)


def test_an_override_reaches_the_model_and_an_unknown_one_is_refused(tiny_folder):
    assert load_model_config(Model(path="x", override_config={"num_hidden_layers": 1}), tiny_folder).num_hidden_layers == 1
    with pytest.raises(ConfigError, match=r"override_config\.hidden_sise"):
        load_model_config(Model(path="x", override_config={"hidden_sise": 8}), tiny_folder)


def test_weights_whose_header_says_whole_numbers_are_refused_by_name(tiny_folder, tmp_path):
    def as_whole_numbers(folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))

    folder = damaged(tiny_folder, tmp_path, as_whole_numbers)
    with pytest.raises(ConfigError, match=r"model\.safetensors: .* has the dtype I32, and weights have F64, F32"):
        filled(folder)


def test_a_sharded_folder_reads_slice_by_slice(tiny_folder, tmp_path):
    folder = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(tiny_folder).save_pretrained(folder, max_shard_size="60KB")
    assert (folder / "model.safetensors.index.json").is_file()
    weights = WeightFolder(folder)
    whole = load_file(tiny_folder / "model.safetensors")[NORM]
    assert torch.equal(weights.read(NORM, (slice(2, 5),)), whole[2:5])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_hidden_layers", 0, "it must be a whole number from 1 to 10000"),
        ("num_hidden_layers", 100_000, "it must be a whole number from 1 to 10000"),
        ("num_attention_heads", 0, "it must be a whole number from 1 to 65536"),
        ("vocab_size", -5, "it must be a whole number from 1 to 2147483647"),
        ("head_dim", 10**12, "it must be a whole number from 1 to 65536"),
        ("num_key_value_heads", 3, "it must divide num_attention_heads=2"),
    ],
)
@pytest.mark.parametrize("by", ["file", "override"])
def test_a_number_that_no_model_can_have_is_refused_where_it_was_given(tiny_folder, tmp_path, name, value, said, by):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        del config["layer_types"]  # with them transformers counts the layers itself
        (folder / "config.json").write_text(json.dumps({**config, name: value}))

    folder = damaged(tiny_folder, tmp_path, change if by == "file" else lambda folder: None)
    model = Model(path=str(folder), override_config={name: value} if by == "override" else {})
    with pytest.raises(ConfigError) as caught:
        load_model_config(model, folder)
    place = f"path={folder}: {name}" if by == "file" else f"override_config.{name}"
    assert str(caught.value).startswith(f"actor_rollout_ref.model.{place}={value}: {said}")


def with_head(tiny_folder, tmp_path, head):
    """Gives a copy of a folder with tied embeddings whose file has a head as well."""

    def add(folder):
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, "lm_head.weight": head(tensors[EMBEDDING])}, folder / "model.safetensors", {"format": "pt"})

    return damaged(tiny_folder, tmp_path, add)


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("head", [torch.Tensor.clone, torch.Tensor.double], ids=["the same", "the same in another dtype"])
def test_a_head_equal_to_the_tied_embedding_is_let_through(tiny_folder, tmp_path, head):
    folder = with_head(tiny_folder, tmp_path, head)
    check_tied_head(WeightFolder(folder), EMBEDDING, folder)


def one_number_changed(embedding):
    head = embedding.clone()
    head[-1, -1] += 1e-3
    return head


@pytest.mark.parametrize("head", [one_number_changed, lambda embedding: embedding[:-1].clone()], ids=["values", "rows"])
def test_a_head_that_differs_from_the_tied_embedding_is_refused(tiny_folder, tmp_path, head, monkeypatch):
    monkeypatch.setattr(weights, "TIED_ROWS", 100)  # so that the difference lies in a later slice
    folder = with_head(tiny_folder, tmp_path, head)
    with pytest.raises(ConfigError, match=r"tie_word_embeddings=true\), and its files hold a lm_head\.weight that differs"):
        check_tied_head(WeightFolder(folder), EMBEDDING, folder)


def test_a_folder_without_a_head_is_let_through(tiny_folder):
    check_tied_head(WeightFolder(tiny_folder), EMBEDDING, tiny_folder)


@pytest.fixture(scope="module")
def mixture_folder(tmp_path_factory):
    shape = TinyShape(model_type="qwen3_moe", num_experts=3, num_layers=1)
    return make_tiny_model(tmp_path_factory.mktemp("mixture") / "model", shape, seed=4)


UP_OF_LAST = "model.layers.0.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    "region", [(), (slice(1, 3), slice(0, 64), slice(0, 64)), (slice(0, 1), slice(20, 50), slice(3, 9))], ids=str
)
def test_experts_of_a_folder_are_read_as_one_tensor(mixture_folder, region):
    weights, stored = WeightFolder(mixture_folder), load_file(mixture_folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    pairs = [[stored[f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up")] for e in range(3)]
    whole = torch.stack([torch.cat(pair) for pair in pairs])
    assert weights.shape(name) == (3, 64, 64)
    assert UP_OF_LAST not in weights.names
    assert torch.equal(weights.read(name, region), whole[region])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rewrite(lambda weights: weights.pop(UP_OF_LAST)), f"1 tensors of experts are missing, such as {UP_OF_LAST}"),
        (rewrite(lambda weights: weights.update({UP_OF_LAST: torch.zeros(3, 64)})), f"{UP_OF_LAST} has another shape"),
        (
            rewrite(lambda weights: [weights.pop(name) for name in list(weights) if "experts.2." in name]),
            r"experts.gate_up_proj has shape \(2, 64, 64\), the config says \(3, 64, 64\)",
        ),
    ],
)
def test_a_folder_with_other_experts_than_its_config_says_is_refused(mixture_folder, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        filled(damaged(mixture_folder, tmp_path, change))


def test_experts_cannot_stay_in_a_mapped_file(mixture_folder):
    with pytest.raises(ConfigError, match=r"load_mode=mmap: .*mlp.experts.gate_up_proj holds all.*Set load_mode=stream"):
        weights.mapped_weights(built(mixture_folder), mixture_folder)
