import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.critics import CPU, critic_batch, critic_for, naive_values, with_value_head
from tests.model.architectures import tiny_folder as folder_of_type
from tests.tensors import whole_of
from verl_memopt.errors import ConfigError
from verl_memopt.memory.tiled_mlp import TiledMlp
from verl_memopt.model import value_model as room
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.value_model import classifier_config, random_head, scalar_head, stored_head
from verl_memopt.model.weights import named_weights
from verl_memopt.observe.byte_tracker import ByteTracker


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama", "mistral"])
def folders(request, tmp_path_factory):
    """A model of each type, with tied and untied heads, and the same with a value head."""
    out = tmp_path_factory.mktemp(request.param)
    shape = TinyShape(model_type=request.param, tie_embeddings=request.param != "llama")
    plain = make_tiny_model(out / "plain", shape, seed=3)
    return plain, with_value_head(plain, out / "valued")


def values_of(critic, whole):
    return critic.values(whole, [range(whole.num_rows)])


def test_values_are_those_of_transformers_token_classifier(folders, one_rank):
    theirs = AutoModelForTokenClassification.from_pretrained(folders[1]).eval()
    whole = critic_batch()
    with torch.no_grad():
        expected = naive_values(theirs, whole)
    found = values_of(critic_for(folders[1], one_rank), whole)
    assert found.dtype == torch.float32
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_model_without_a_head_gives_values_of_0_and_its_weights_are_the_folders(folders, one_rank):
    critic = critic_for(folders[0], one_rank)
    assert torch.equal(values_of(critic, critic_batch()), torch.zeros(sum(critic_batch().responses.sizes())))
    stored = load_file(folders[0] / "model.safetensors")
    named = dict(named_weights(critic.model))
    assert not named.pop("score.weight").any()
    assert not named.pop("score.bias").any()
    assert "lm_head.weight" not in named
    assert all(torch.equal(parameter, stored[name]) for name, parameter in named.items())
    assert stored.keys() - named.keys() <= {"lm_head.weight"}


def test_a_head_without_a_bias_gets_a_bias_of_0(tiny_folder, one_rank, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1)
    model.save_pretrained(tmp_path)
    critic = critic_for(tmp_path, one_rank)
    named = dict(named_weights(critic.model))
    assert torch.equal(named["score.weight"], model.score.weight)
    assert not named["score.bias"].any()


def rename(folder, out, change):
    weights = load_file(with_value_head(folder, out) / "model.safetensors")
    save_file({change(name): tensor for name, tensor in weights.items()}, out / "model.safetensors")
    return out


def test_a_head_named_classifier_is_read_too(tiny_folder, one_rank, tmp_path):
    folder = rename(tiny_folder, tmp_path / "renamed", lambda name: name.replace("score", "classifier"))
    assert stored_head(folder) == {"score.weight": "classifier.weight", "score.bias": "classifier.bias"}
    expected = values_of(critic_for(with_value_head(tiny_folder, tmp_path / "score"), one_rank), critic_batch())
    assert torch.equal(values_of(critic_for(folder, one_rank), critic_batch()), expected)


def test_a_folder_that_lacks_a_weight_is_refused_under_the_critics_key(tiny_folder, one_rank, tmp_path):
    folder = rename(tiny_folder, tmp_path / "lacking", lambda name: name.replace("layers.0.mlp.up_proj", "other"))
    with pytest.raises(ConfigError, match=r"critic\.model\.path=.*missing model\.layers\.0\.mlp\.up_proj\.weight"):
        critic_for(folder, one_rank)


def test_a_config_that_cannot_be_read_is_refused_under_the_critics_key(tmp_path, one_rank):
    with pytest.raises(ConfigError, match=r"critic\.model\.path=.*config\.json cannot be read"):
        critic_for(tmp_path, one_rank)


@pytest.mark.parametrize("compute", ["fp32", "bfloat16"])
def test_the_head_rests_in_the_masters_dtype_and_computes_in_fp32(tiny_folder, one_rank, tmp_path, compute):
    """In bfloat16 the states are rounded, and the head is not: values equal the fp32 product with these states."""
    folder = with_value_head(tiny_folder, tmp_path / "valued")
    critic = critic_for(folder, one_rank, fsdp={"dtype": compute})
    states = []
    score = critic.model.score
    hook = score.register_forward_hook(lambda _, inputs, __: states.append(inputs[0]))
    values = values_of(critic, critic_batch())
    hook.remove()
    weight, bias = whole_of(score.weight), whole_of(score.bias)
    assert (weight.dtype, states[0].dtype) == (torch.float32, getattr(torch, compute.replace("fp", "float")))
    torch.testing.assert_close(values, states[0].float() @ weight[0] + bias, rtol=0, atol=1e-6)


def test_a_random_head_leaves_the_head_as_it_was(tiny_folder, one_rank, tmp_path):
    critic = critic_for(with_value_head(tiny_folder, tmp_path / "valued"), one_rank, fsdp={"dtype": "bfloat16"})
    before, values = whole_of(critic.model.score.weight).clone(), values_of(critic, critic_batch())
    with random_head(critic.model, CPU):
        assert (values_of(critic, critic_batch()) - values).abs().mean() > 0.1
    assert torch.equal(whole_of(critic.model.score.weight), before)
    assert torch.equal(values_of(critic, critic_batch()), values)


def test_the_config_of_a_written_critic_is_that_of_a_token_classifier(tiny_folder):
    config = AutoConfig.from_pretrained(tiny_folder)
    changed = classifier_config(config)
    assert (changed.architectures, changed.num_labels) == (["Qwen3ForTokenClassification"], 1)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.num_labels == 2


def test_a_type_without_a_token_classifier_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        assert classifier_config(AutoConfig.for_model("olmo2")).architectures == ["ValueModel"]
    assert "no token classifier of type olmo2" in caplog.text


def test_what_a_type_of_model_cannot_do_is_told_with_the_critics_keys(tmp_path, one_rank, caplog):
    folder = folder_of_type(tmp_path / "model", "phi")
    with caplog.at_level(logging.WARNING):
        critic_for(folder, one_rank)
    assert {record.args[0] for record in caplog.records} == {
        "critic.model.recompute_elementwise",
        "critic.model.prune_last_block",
    }
    with pytest.raises(ConfigError, match=r"^critic\.model\.tiled_mlp\.enabled=true"):
        critic_for(folder, one_rank, model={"tiled_mlp": TiledMlp(enabled=True)})
    with pytest.raises(ConfigError, match=r"^critic\.model\.attn_implementation=flash_attention_2"):
        critic_for(folder, one_rank, model={"attn_implementation": "flash_attention_2"})


@pytest.mark.parametrize("kind", ["phi", "starcoder2", "glm4"])
def test_values_of_another_architecture_are_those_of_the_state_before_each_token(tmp_path, one_rank, kind):
    """Transformers' own decoder on one row at a time, and the head by hand."""
    folder = folder_of_type(tmp_path / "model", kind)
    critic, whole = critic_for(folder, one_rank), critic_batch(rows=6, shared=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval().get_decoder()
    with torch.no_grad():
        critic.model.score.weight.copy_(torch.linspace(-1, 1, critic.model.score.weight.shape[1]))
        critic.model.score.bias.fill_(0.5)
        expected = []
        for prompt, response in zip(whole.prompts.rows(), whole.responses.rows(), strict=True):
            states = theirs(torch.cat([prompt, response])[None]).last_hidden_state[0]
            expected.append((states @ critic.model.score.weight[0] + 0.5)[len(prompt) - 1 :][: len(response)])
    torch.testing.assert_close(values_of(critic, whole), torch.cat(expected), rtol=0, atol=1e-5)


HIDDEN = 24


def inputs(tokens, dtype=torch.float32, weight_dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(1, HIDDEN, generator=generator).to(weight_dtype).requires_grad_()
    return states, weight, torch.tensor([0.5], dtype=weight_dtype, requires_grad=True)


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [("float32",) * 2, ("bfloat16", "float32"), ("bfloat16",) * 2])
def test_values_and_gradients_are_those_of_an_fp32_product(monkeypatch, tokens, dtype, weight_dtype):
    monkeypatch.setattr(room, "TILE_TOKENS", 4)
    tensors = inputs(tokens, getattr(torch, dtype), getattr(torch, weight_dtype))
    above = torch.linspace(-1, 1, tokens)
    states, weight, bias = (tensor.detach().float().requires_grad_() for tensor in tensors)
    expected = states @ weight[0] + bias
    wanted = torch.autograd.grad(expected, (states, weight, bias), above)
    found = scalar_head(*tensors)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for tensor, gradient, like in zip(torch.autograd.grad(found, tensors, above), wanted, tensors, strict=True):
        assert tensor.dtype == like.dtype
        # A gradient is rounded once, to its own dtype.
        rtol = 1e-6 if like.dtype == torch.float32 else 2**-8
        torch.testing.assert_close(tensor.float(), gradient, rtol=rtol, atol=1e-6)


def test_what_needs_no_gradient_gets_none():
    states, weight, bias = inputs(3)
    scalar_head(states.detach(), weight, bias.detach()).sum().backward()
    assert weight.grad is not None
    assert states.grad is bias.grad is None
    with torch.no_grad():
        assert not scalar_head(states, weight, bias).requires_grad


def test_narrow_states_are_never_copied_whole_to_fp32():
    tokens = 8 * room.TILE_TOKENS
    with FakeTensorMode(), ByteTracker() as tracker:
        states, weight, bias = inputs(tokens, torch.bfloat16)
        before = tracker.total("device")
        tracker.enter("here")
        scalar_head(states, weight, bias).sum().backward()
        grown = tracker.peaks["device"].bytes - before
    # The gradient of the states, one tile of them in fp32 and its product, and a few numbers per token.
    assert grown <= states.nbytes + 2 * room.TILE_TOKENS * HIDDEN * 4 + 5 * tokens * 4
