"""Knobs in random combinations, for each family of our own decoder that has other layers than the toy's model."""

import random

import pytest
from transformers import AutoConfig

from tests.memory import activation_cases as act
from tests.memory.batching.test_shared_prompt import grouped, sharing
from tests.model.test_expert_lora import BOTH, shake
from tests.model.test_prefix_kv import assert_near, results
from verl_memopt.memory.tiled_mlp import TiledMlp
from verl_memopt.model.tiny import TinyShape, make_tiny_model

KINDS = {
    kind: TinyShape(kind, num_layers=4)
    for kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_moe", "gemma3_text", "gemma4_text", "glm4_moe", "gpt_oss")
}
KINDS["small gemma4_text"] = TinyShape("gemma4_text", num_layers=4, layer_inputs=8, reading_layers=2, initializer_range=0.01)
KINDS["gemma4_text with experts"] = TinyShape("gemma4_text", num_layers=4, experts_beside=True)
PLAIN = {"recompute_elementwise": False, "prune_last_block": False}
WINDOW = 7
MIXTURES = ("qwen3_5_moe_text", "qwen3_moe", "glm4_moe", "gpt_oss")
EXPERTS = (None, BOTH, BOTH[:1], BOTH[1:])


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def folder(request, tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("family") / "model", request.param, seed=3)


def drawn(draw, kind):
    """Gives options of a policy, and whether answers read the prefix KV of their prompt."""
    checkpoints = draw.choice([{}, act.FULL, act.SELECTIVE, act.EVERY_2])
    recomputes = draw.random() < 0.8
    options = {
        **checkpoints,
        "recompute_elementwise": recomputes,
        "prune_last_block": draw.random() < 0.5,
        "logprob_chunk_tokens": draw.choice([0, 5, 64]),
        "attn_implementation": draw.choice(["sdpa", "eager"]),
        "tiled_mlp": TiledMlp(draw.random() < 0.5, 3),
    }
    if not kind.startswith("gemma") and draw.random() < 0.3:
        options |= {"block_tile_tokens": draw.choice([5, 16]), "recompute_elementwise": True}
    if checkpoints and draw.random() < 0.3:
        options["offload"] = (1, 2)
    if draw.random() < 0.3:
        options |= {**act.LORA, "quantization": draw.choice(["none", "int8", "nf4"])}
    if kind.startswith("gemma") or kind == "gpt_oss":
        options["override_config"] = {"sliding_window": WINDOW}
    whole = options["recompute_elementwise"] and "block_tile_tokens" not in options
    return options, whole and draw.random() < 0.5


def compared(folder, mesh, seed):
    kind = AutoConfig.from_pretrained(folder).model_type
    draw = random.Random(seed)
    lengths = [draw.randint(1, 12) for _ in range(6)]
    batch = sharing(grouped(draw.choice([1, 2, 3, 30, 70]), lengths, 2, seed=seed))
    size = draw.randint(1, 6)
    parts = [[row + 6 * group for row in range(6)[at : at + size]] for group in range(2) for at in range(0, 6, size)]
    options, reuse = drawn(draw, kind)
    options |= {**act.LORA, "target_parameters": draw.choice(EXPERTS)} if kind in MIXTURES and draw.random() < 0.5 else {}
    names = ("override_config", "lora_rank", "lora_alpha", "quantization", "target_parameters")
    same = {name: options[name] for name in names if name in options}
    plain, policy = (act.build(folder, mesh, **each) for each in ({**PLAIN, **same}, options))
    for each in (plain, policy) if "target_parameters" in options else ():
        shake(each.model)
    expected = results(plain, sharing(batch, False), [[row] for row in range(12)], False)
    assert_near(results(policy, batch, parts, reuse), expected)


@pytest.mark.parametrize("seed", range(3))
def test_some_knobs_change_nothing(folder, one_rank, seed):
    compared(folder, one_rank, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 43))
def test_many_combinations_of_knobs_change_nothing(folder, one_rank, seed):
    compared(folder, one_rank, seed)
