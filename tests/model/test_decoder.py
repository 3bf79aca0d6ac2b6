from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.test_build import built, filled
from tests.model.test_pack import packed
from verl_memopt.model.block_options import BlockOptions, class_name, is_llama_like
from verl_memopt.model.decoder import Attention, Decoder, DecoderBlock
from verl_memopt.model.packing import pack_rows
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import store_scalars

BOUND = 2e-6
"""Of log-probs in nats, and of a gradient's difference relative to its norm, in fp32."""

VARIANTS = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama with scaled rotary tables": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "mistral": {"sliding_window": None},
    "mistral with a window": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen3_moe": {},
    "qwen3_moe with weights as they are": {"norm_topk_prob": False},
    "qwen3_moe with a dense layer": {"mlp_only_layers": [1]},
    "qwen3 with a window in one layer": {
        "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "glm4_moe": {},
    "glm4_moe with groups": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5},
    "glm4_moe with weights as they are": {"norm_topk_prob": False, "use_qk_norm": False, "first_k_dense_replace": 0},
    "gpt_oss": {"sliding_window": 4, "swiglu_limit": 0.1},
    "gemma3_text": {
        "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 24,
        "final_logit_softcapping": 0.8,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
    },
    "gemma4_text": {"sliding_window": 4},
    "gemma4_text with values of their own": {"attention_k_eq_v": False},
    "gemma4_small": {"sliding_window": 4},
    "gemma4_experts": {"sliding_window": 4},
}  # fmt: skip
OPTIONS = {
    "plain": BlockOptions(),
    "recomputed": BlockOptions(recompute=True),
    "tiled": BlockOptions(mlp_tiles=3),
    "recomputed, tiled and checkpointed": BlockOptions(recompute=True, mlp_tiles=3, checkpoint="full"),
    "over tiles": BlockOptions(recompute=True, mlp_tiles=9, tile_tokens=5),
}

GROUPS = [0, 0, 0, 1]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11]] * 3 + [[12, 13]]
ANSWERS = [[14, 15, 16], [17], [18, 19, 20, 21, 22], [23, 24]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("families")
    names = {name.split()[0] for name in VARIANTS}
    shapes = {name: TinyShape(model_type=name, tie_embeddings=False) for name in names - {"gemma4_small", "gemma4_experts"}}
    shapes["gemma4_experts"] = replace(shapes["gemma4_text"], experts_beside=True)
    shapes["gemma4_small"] = replace(shapes["gemma4_text"], num_layers=4, layer_inputs=8, reading_layers=2)
    return {name: make_tiny_model(parent / name, shape, seed=3) for name, shape in shapes.items()}


def theirs(folder, config):
    """Gives the model as transformers computes it, its config changed; norms, biases and layers that no file holds are drawn."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **config).eval()
    store_scalars(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("_bias"):
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def ours(folder, config, options, model, attention="sdpa"):
    """Gives the same model with our decoder, holding the same weights."""
    policy = built(folder, attention=attention, override_config=config, options=options)
    policy.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(model.get_parameter(name.removeprefix("lm.")))
        for name, buffer in policy.named_buffers():
            buffer.copy_(model.get_buffer(name.removeprefix("lm.")))
    return policy


def log_probs_row_by_row(model):
    found = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        log_p = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        found += [log_p[len(prompt) - 1 + place, token] for place, token in enumerate(answer)]
    return torch.stack(found)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_sequences_give_the_log_probs_and_gradients_of_transformers(folders, variant, options):
    folder, config = folders[variant.split()[0]], VARIANTS[variant]
    model = theirs(folder, config)
    policy = ours(folder, config, OPTIONS[options], model)
    assert isinstance(policy.decoder, Decoder)
    expected = log_probs_row_by_row(model)
    found, _ = policy(packed(PROMPTS, ANSWERS, GROUPS), 1.0, False)
    assert_same(model, policy, found, expected)


def assert_same(model, policy, found, expected, digits=24):
    """Compares log-probs, and the gradients of their sums."""
    torch.testing.assert_close(found, expected, rtol=0, atol=BOUND)
    expected.sum().backward()
    found.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    # Small gradients of queries and keys are differences of larger terms, whose rounding is of these terms' size.
    rounding = 2**-digits * max(float(gradient.norm()) for gradient in gradients.values())
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = gradients.pop(name.removeprefix("lm."))
        assert float((parameter.grad - gradient).norm()) <= BOUND * float(gradient.norm()) + rounding, name
    assert not gradients


SLIDING = {
    "mistral": lambda width: {"sliding_window": width},
    "qwen3": lambda width: VARIANTS["qwen3 with a window in one layer"] | {"sliding_window": width},
    "gpt_oss": lambda width: {"sliding_window": width},
    "gemma3_text": lambda width: VARIANTS["gemma3_text"] | {"sliding_window": width, "layer_types": ["sliding_attention"] * 2},
    "gemma4_text": lambda width: {"sliding_window": width},
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("options", ["pruned", "recomputed and pruned"])
@pytest.mark.parametrize("width", [1, 2, 6, 7, 8, 11, 40])
@pytest.mark.parametrize("kind", SLIDING)
def test_a_window_of_any_width_goes_on_from_a_shared_prompt(folders, kind, width, options, attention):
    # Of the first prompt there are 7 tokens, and its longest row has 11 that are computed.
    config = SLIDING[kind](width)
    model = theirs(folders[kind], config)
    policy = ours(folders[kind], config, BlockOptions(recompute=options != "pruned", prune=True), model, attention)
    pack = packed(PROMPTS, ANSWERS, GROUPS)
    assert pack.last_block is not None
    # With one key there are no gradients of queries and keys, so what is found is rounding alone.
    assert_same(model, policy, policy(pack, 1.0, False)[0], log_probs_row_by_row(model), 22 if width == 1 else 24)


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "gemma3_text",
        "gemma4_text",
        "gemma4_small",
        "gemma4_experts",
        "glm4_moe",
        "qwen3_moe",
    ],
)
def test_it_takes_over_every_parameter_under_its_name_and_in_its_order(folders, kind):
    model, policy = AutoModelForCausalLM.from_pretrained(folders[kind]), built(folders[kind])
    store_scalars(model)
    names = [name.removeprefix("lm.") for name, _ in policy.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert list(policy.lm.state_dict()) == list(model.state_dict())


def test_its_modules_answer_to_the_classes_they_took_the_place_of(folders):
    block = built(folders["mistral"]).blocks()[0]
    assert (type(block), type(block.self_attn)) == (DecoderBlock, Attention)
    names = [class_name(module) for module in (block, block.self_attn, block.mlp, block.input_layernorm, torch.nn.Linear(1, 1))]
    assert names == ["MistralDecoderLayer", "MistralAttention", "MistralMLP", "MistralRMSNorm", "Linear"]


def test_other_modules_beside_the_known_ones_are_not_taken_over(folders):
    lm = AutoModelForCausalLM.from_pretrained(folders["llama"])
    assert is_llama_like(lm)
    lm.model.adapter = torch.nn.Identity()
    assert not is_llama_like(lm)


def test_experts_with_another_activation_stay_those_of_transformers(folders):
    folder, config = folders["qwen3_moe"], {"hidden_act": "gelu"}
    assert not is_llama_like(AutoModelForCausalLM.from_pretrained(folder, **config))
    model = theirs(folder, config)
    policy = ours(folder, config, None, model)
    found, _ = policy(packed(PROMPTS, ANSWERS, GROUPS), 1.0, False)
    torch.testing.assert_close(found, log_probs_row_by_row(model), rtol=0, atol=BOUND)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_a_row_alone_in_eager_attention_gives_what_the_pack_gives(folders, kind):
    # The logits of Gemma are capped so low that it shows.
    policy = filled(folders[kind], options=BlockOptions(recompute=True), override_config=VARIANTS[kind])
    row = pack_rows(torch.tensor(PROMPTS[0]), [len(PROMPTS[0])], torch.tensor(ANSWERS[0]), [len(ANSWERS[0])])
    with torch.no_grad():
        packed_ones, _ = policy(packed(PROMPTS, ANSWERS, GROUPS), 0.7, False)
        alone, _ = policy(row, 0.7, False, unpacked=True)
    torch.testing.assert_close(packed_ones[: len(ANSWERS[0])], alone, rtol=0, atol=BOUND)
