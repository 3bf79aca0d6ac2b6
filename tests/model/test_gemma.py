"""Gemma 3 and 4 in our own decoder: each memory knob against a model that uses none, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from tests.memory import activation_cases as act
from tests.memory.batching.test_shared_prompt import counts_of, grouped, sharing
from tests.ranks import run_ranks
from tests.tensors import whole_of
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import ActorRolloutRef, Fsdp, Model
from verl_memopt.distributed.device import training_mesh
from verl_memopt.errors import ConfigError
from verl_memopt.memory.embedding_gradient import TrainedEmbedding, is_plain
from verl_memopt.memory.lora import adapter_params
from verl_memopt.model.assembly import ModelUse, build_policy
from verl_memopt.model.captured_block import why_not_captured
from verl_memopt.model.decoder import Decoder
from verl_memopt.model.sizes import size_of
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import load_model_config
from verl_memopt.plan.formulas import Pass, Shapes
from verl_memopt.worker.trained_model import micro_batches_of

BOUND = 2e-6
"""Of the difference of a gradient, relative to its norm, in fp32."""
SHAPE = TinyShape(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16)
KINDS = {kind: replace(SHAPE, model_type=kind) for kind in ("gemma3_text", "gemma4_text")}
SMALL = "small gemma4_text"
KINDS[SMALL] = replace(KINDS["gemma4_text"], num_layers=4, layer_inputs=8, reading_layers=2)
LAYERS = {"gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}}
"""Fields of a config. The layers of Gemma 4 have the sizes of their types, so these cannot be changed."""
CONFIG = {"sliding_window": 6, "final_logit_softcapping": 20.0}
PLAIN, OWN = {"prune_last_block": False}, act.ELEMENTWISE
KNOBS = {
    "recomputed values": OWN,
    "pruned": {},
    "checkpoints": {**OWN, **act.FULL},
    "selective checkpoints": {**OWN, **act.SELECTIVE},
    "every second block": {**OWN, **act.EVERY_2},
    "checkpoints alone": {**PLAIN, **act.FULL},
    "offloaded": {**OWN, **act.FULL, "offload": (1, 2)},
    "tiled MLP": {**OWN, **act.TILED},
    "tiled MLP and checkpoints": {**OWN, **act.TILED, **act.FULL},
    "tiled MLP alone": {**PLAIN, **act.TILED},
    "eager": {**OWN, "attn_implementation": "eager"},
    "gradients on the host": {**OWN, "fsdp": {"grad_offload": True}},
    "gradients on the host, that of the embedding in tiles": {
        **OWN,
        "fsdp": {"grad_offload": True},
        "optim": {"bucket_megabytes": 0.02},
    },
    "weights on the host": {**OWN, "fsdp": {"offload_policy": True}},
}
"""Options of :func:`tests.memory.activation_cases.build`."""
BATCH, PARTS = sharing(grouped(20, [9, 5, 1, 12, 3, 7])), [[0, 1], [2, 3], [4, 5]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    at = tmp_path_factory.mktemp("gemma")
    made = {kind: make_tiny_model(at / kind, shape, seed=3) for kind, shape in KINDS.items()}
    for kind, folder in made.items():
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | CONFIG | LAYERS.get(kind, {})))
    return made


@pytest.fixture(params=KINDS)
def folder(request, folders):
    return folders[request.param]


def results(folder, mesh, world_size=1, parts=PARTS, reuse=None, **options):
    """Gives log-probs, entropies and every whole gradient of a batch whose rows share a prompt."""
    policy = act.build(folder, mesh, world_size, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.dim() == 1:  # norms and factors that do not multiply by one
                whole_of(parameter).add_(0.1 * torch.randn(parameter.shape, generator=generator))
    policy.model.supports_prefix_kv = policy.model.supports_prefix_kv if reuse is None else reuse
    scores = policy.compute_log_probs(BATCH, parts, 0.9, True)
    policy.accumulate(micro_batches_of(BATCH, parts, policy.model.supports_prefix_kv), counts_of(BATCH), 0.9)
    gradients = {name: parameter.grad for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    offloaded = policy.trained.offloaded
    if offloaded is not None:
        gradients = {name: offloaded._places[id(policy.model.get_parameter(name))] for name in gradients}
    return [scores.log_probs, scores.entropy, *(whole_of(gradient).clone() for gradient in gradients.values())]


@pytest.mark.parametrize("knobs", KNOBS)
def test_no_knob_changes_log_probs_or_gradients(folder, one_rank, knobs):
    expected = results(folder, one_rank, parts=[[*range(6)]], **PLAIN)
    assert act.largest_difference(results(folder, one_rank, **KNOBS[knobs]), expected) <= BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scaled_embedding_is_that_of_transformers_to_the_bit(dtype):
    theirs = Gemma3TextScaledWordEmbedding(50, 24, padding_idx=0, embed_scale=24**0.5).to(dtype)
    theirs.embed_scale = torch.tensor(theirs.scalar_embed_scale)  # which transformers keeps in fp32
    assert is_plain(theirs)
    ids, above = torch.tensor([[3, 0, 7, 3]]), torch.randn(1, 4, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = theirs(ids)
    (gradient,) = torch.autograd.grad(expected, theirs.weight, above)
    found = TrainedEmbedding(theirs)(ids)
    assert torch.equal(found, expected)
    found.backward(above)
    assert torch.allclose(theirs.weight.grad, gradient, rtol=0 if dtype == torch.float32 else 2**-7, atol=0)


def test_answers_in_several_micro_batches_reuse_the_keys_of_their_prompt(folder, one_rank):
    found = [results(folder, one_rank, reuse=reuse, **OWN, **act.FULL) for reuse in (True, False)]
    assert act.largest_difference(*found) <= BOUND


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
def test_adapters_over_a_frozen_base_get_the_gradients_of_a_plain_model(folder, one_rank, quantization):
    adapters = {**act.LORA, "quantization": quantization}
    expected = results(folder, one_rank, parts=[[*range(6)]], **PLAIN, **adapters)
    for options in (OWN, KNOBS["tiled MLP and checkpoints"]):
        assert act.largest_difference(results(folder, one_rank, **options, **adapters), expected) <= BOUND


def on_ranks(rank, folders):
    mesh = training_mesh("cpu", 2, -1)
    return [
        [[each.numpy() for each in results(folder, mesh, 2, **options)] for options in (PLAIN, KNOBS["offloaded"])]
        for folder in folders.values()
    ]


def test_ranks_that_shard_it_have_one_gradient(folders):
    for plain, own in (pair for answer in run_ranks(on_ranks, 2, folders) for pair in answer):
        assert act.largest_difference(*(map(torch.from_numpy, side) for side in (own, plain))) <= BOUND


WHOLE = {"prune_last_block": False}
BYTES = {
    "plain": {**WHOLE, "recompute_elementwise": False},
    "checkpoints alone": {**WHOLE, "recompute_elementwise": False, **act.FULL},
    "recomputed values": {**WHOLE, **act.ELEMENTWISE},
    "tiled MLP": {**WHOLE, **act.ELEMENTWISE, **act.TILED},
    "tiled MLP and checkpoints": {**WHOLE, **act.ELEMENTWISE, **act.TILED, **act.FULL},
}


DEEP = {kind: replace(act.SHAPE, model_type=kind) for kind in ("gemma3_text", "gemma4_text")}
DEEP[SMALL] = replace(DEEP["gemma4_text"], layer_inputs=32, reading_layers=2)


@pytest.fixture(scope="module", params=DEEP.values(), ids=DEEP)
def deep(request, tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("deep") / "model", request.param, seed=5)


@pytest.mark.parametrize("knobs", BYTES)
def test_activations_are_those_of_the_formula(deep, knobs):
    with act.fake_ranks(2) as mesh:
        policy, mini = act.build(deep, mesh, **BYTES[knobs]), act.mini_batch()
        found = act.tracked_step(policy, act.micros(mini), mini.counts).peaks[act.DEVICE].kinds["activations"]
    model = {name: value for name, value in BYTES[knobs].items() if name != "recompute"}
    model["enable_gradient_checkpointing"] = "recompute" in BYTES[knobs]
    keys = {f"model.{name}": value for name, value in model.items()} | {"actor.fsdp_config.dtype": "fp32"}
    work = Pass(act.TOKENS, act.RESPONSES, 2 * act.ROWS, act.TOKENS, longest=act.PROMPT + act.RESPONSE)
    shapes = Shapes.of(size_of(Model(path=str(deep)), "model"), replaced(ActorRolloutRef(), keys), work, "cpu")
    assert act.close(found, shapes.activation_bytes)


@pytest.mark.parametrize("kind", ["gemma4_text", SMALL])
def test_predicted_parameters_of_blocks_and_adapters_are_those_of_the_model(folders, one_rank, kind):
    policy = act.build(folders[kind], one_rank, **act.LORA)
    size, settings = size_of(Model(path=str(folders[kind])), "model"), replaced(ActorRolloutRef(), {"model.lora_rank": 4})
    shapes = Shapes.of(size, settings, Pass(1, 1, 1, 1), "cpu")
    learning = [parameter.numel() for parameter in policy.model.parameters() if parameter.requires_grad]
    assert adapter_params(shapes) == sum(learning)
    blocks = [(name, part) for block in policy.model.blocks() for name, part in block.named_modules()]
    matrices = [part.weight.numel() for name, part in blocks if hasattr(part, "in_features") and "per_layer" not in name]
    assert shapes.linear_params == sum(matrices)
    # Two wide layers with one key head, or one of them with two; and a layer with two heads of half the size.
    assert size.pair_elements == 2 * (2 * 32 + 2 * 16)


def built(folder, mesh, **model):
    settings = Model(path=str(folder), attn_implementation="sdpa", **model)
    return build_policy(settings, Fsdp(dtype="fp32"), folder, mesh, torch.device("cpu"), ModelUse(recompute=True, trained=True))


def test_blocks_over_tiles_are_refused_and_blocks_are_not_captured(folder, one_rank):
    with pytest.raises(
        ConfigError, match=r"block_tile_tokens.*Gemma[34]\w*DecoderLayer has norms of the outputs of attention and MLP"
    ):
        built(folder, one_rank, block_tile_tokens=16)
    model = built(folder, one_rank, enable_gradient_checkpointing=True)
    assert isinstance(model.decoder, Decoder)
    assert [why_not_captured(block) for block in model.blocks()] == ["the outputs of its attention and MLP have norms"] * len(
        model.blocks()
    )


@pytest.mark.parametrize(("kind", "value"), [("gemma3_text", True), ("gemma4_text", "all")])
def test_attention_to_later_tokens_is_refused(folders, kind, value):
    folder = folders[kind]
    with pytest.raises(ConfigError, match=r"see later tokens \(use_bidirectional_attention=(true|all)\)"):
        load_model_config(Model(path=str(folder), override_config={"use_bidirectional_attention": value}), folder)


def test_sizes_that_differ_from_layer_to_layer_are_not_overridden(folders):
    given = Model(path=str(folders["gemma4_text"]), override_config={"head_dim": 32})
    with pytest.raises(ConfigError, match=r"override_config\.head_dim: this field differs from layer to layer"):
        load_model_config(given, folders["gemma4_text"])


def test_ranks_do_not_share_the_tokens_of_rows_whose_keys_later_layers_read(folders, one_rank):
    fsdp = Fsdp(dtype="fp32", ulysses_sequence_parallel_size=2)
    with pytest.raises(
        ConfigError, match=r"ulysses_sequence_parallel_size=2: some layers of gemma4_text read the keys.*Set it to 1"
    ):
        build_policy(Model(path=str(folders[SMALL])), fsdp, folders[SMALL], one_rank, torch.device("cpu"), ModelUse(trained=True))


def test_an_unknown_activation_is_computed_by_autograd(folder, one_rank, caplog):
    model = built(folder, one_rank, override_config={"hidden_activation": "relu"})
    assert not model.decoder.recompute
    assert "has the activation relu, not silu" in caplog.text
    assert isinstance(model.blocks()[0].mlp.act_fn, nn.ReLU)
