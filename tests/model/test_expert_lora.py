"""Adapters on experts, against the same experts with the adapters added to their weights."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.memory import activation_cases as act
from tests.memory.batching.test_shared_prompt import counts_of, grouped, sharing
from tests.memory.recomputed import EPS, drawn, gradients, plain_norm, relative
from tests.model import architectures, mxfp4
from tests.model.test_experts import (
    CHOSEN,
    EXPERTS,
    HIDDEN,
    OSS,
    ROUNDING,
    SCALE,
    TOKENS,
    WIDTH,
    by_layers,
    by_token,
    oss_by_token,
    oss_weights,
    shared_expert,
    weights,
)
from tests.model.test_prefix_kv import PARTS, assert_near, results
from tests.model.test_router_replay import with_data
from tests.ranks import run_ranks
from tests.tensors import whole_of
from tests.worker.test_conversations import batch_of, conversations
from verl_memopt.distributed.device import training_mesh
from verl_memopt.memory.lora_torch import _copy_whole, adapters, merged_weights
from verl_memopt.memory.recompute_elementwise_torch import RMSNorm
from verl_memopt.memory.tiled_mlp import TiledMlp
from verl_memopt.memory.tiled_mlp_torch import Traits
from verl_memopt.model import expert_products
from verl_memopt.model.experts import Mixture, TiledExperts, mixed
from verl_memopt.model.mixture_kind import MixtureKind, Router
from verl_memopt.model.packing import pack_rows
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import named_weights
from verl_memopt.worker.trained_model import micro_batches_of

RANK = 3
PLAIN = MixtureKind(Router(CHOSEN, True))
KINDS = {"qwen3_moe": PLAIN, "gpt_oss": OSS}
SCALES = 0.5, 1.5


def factors(dtype=torch.float64, width=WIDTH, rank=RANK):
    shapes = (EXPERTS, rank, HIDDEN), (EXPERTS, 2 * width, rank), (EXPERTS, rank, width), (EXPERTS, HIDDEN, rank)
    return [drawn(*shape, seed=place + 60, dtype=dtype, scale=0.4) for place, shape in enumerate(shapes)]


def base(kind, dtype=torch.float64, width=WIDTH):
    """Gives frozen weights of experts, and a router that learns, as all of a mixture's tensors."""
    made = oss_weights(dtype, width) if KINDS[kind] is OSS else list(weights(dtype=dtype, width=width))
    return [tensor if place in (0, 3) else tensor.detach() for place, tensor in enumerate(made)]


def added(weight, down, up, scale, turned):
    change = scale * up @ down
    return weight + (change.transpose(1, 2) if turned else change)


def merged(kind, tensors, adapters):
    """Gives the tensors with the adapters added to the weights."""
    turned = KINDS[kind].transposed
    whole = [added(tensors[place + 1], *adapters[2 * place : 2 * place + 2], SCALES[place], turned) for place in range(2)]
    return [tensors[0], *whole, *tensors[3:]]


def expected_of(kind, x, tensors, adapters):
    changed = merged(kind, tensors, adapters)
    return oss_by_token(x, changed) if KINDS[kind] is OSS else by_token(x, Router(CHOSEN, True), changed)


def learning(kind, x, tensors, adapters):
    return [x, *(tensor for tensor in tensors if tensor.requires_grad), *adapters]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiles", [None, 1, 4])
def test_outputs_and_gradients_are_those_of_experts_with_the_adapters_added_to_their_weights(kind, tiles):
    def run(compute):
        x, tensors, adapters = drawn(TOKENS, HIDDEN, seed=9), base(kind), factors()
        out = compute(x, tensors, adapters)
        return [out.detach(), *gradients((out,), learning(kind, x, tensors, adapters))]

    def ours(x, tensors, adapters):
        return mixed(None, x, None, Mixture(KINDS[kind], (*tensors, *adapters), scales=SCALES), tiles).squeeze(0)

    expected, found = run(partial(expected_of, kind)), run(ours)
    assert all(relative(one, other) <= ROUNDING for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("which", [0, 1], ids=["gate and up", "down"])
def test_one_weight_may_have_adapters_alone(which):
    def run(compute):
        x, tensors, adapters = drawn(TOKENS, HIDDEN, seed=9), base("gpt_oss"), factors()
        own = adapters[2 * which : 2 * which + 2]
        out = compute(x, tensors, own)
        return [out.detach(), *gradients((out,), learning("gpt_oss", x, tensors, own))]

    def naive(x, tensors, own):
        none = [factor.detach() * 0 for factor in factors()]
        none[2 * which : 2 * which + 2] = own
        return expected_of("gpt_oss", x, tensors, none)

    def ours(x, tensors, own):
        places = [None] * 4
        places[2 * which : 2 * which + 2] = own
        return mixed(None, x, None, Mixture(OSS, (*tensors, *places), scales=SCALES), 2).squeeze(0)

    assert all(relative(one, other) <= ROUNDING for one, other in zip(run(ours), run(naive), strict=True))


@pytest.mark.parametrize("checkpoint", [None, "again"])
def test_adapters_of_routed_experts_stand_beside_those_of_a_shared_one_behind_a_norm(checkpoint):
    residual, x, norm = drawn(TOKENS, HIDDEN, seed=5), drawn(TOKENS, HIDDEN, seed=6), drawn(HIDDEN, seed=7)
    tensors, adapters, shared = base("qwen3_moe"), factors(), shared_expert(True)
    learned = [residual, x, norm, tensors[0], *adapters, *(tensor for tensor in shared if tensor is not None)]
    z = residual + x
    normal = plain_norm(z, norm)
    expected = z + expected_of("qwen3_moe", normal, tensors, adapters) + by_layers(normal, shared)
    mixture = Mixture(PLAIN, (*tensors, *adapters, *shared), (Traits(SCALE, None),) * 4, SCALES)
    # Backward overwrites x.
    found = mixed(residual * 1.0, x * 1.0, (RMSNorm(EPS), norm), mixture, 3, checkpoint).squeeze(0)
    pairs = list(zip([found, *gradients((found,), learned)], [expected, *gradients((expected,), learned)], strict=True))
    # A block that is computed again has no values.
    assert all(relative(one, other) <= ROUNDING for one, other in (pairs if checkpoint is None else pairs[1:]))


def test_gradients_of_adapters_are_summed_over_tiles_of_tokens():
    x, above, tensors, adapters = drawn(TOKENS, HIDDEN), drawn(TOKENS, HIDDEN, seed=4), base("qwen3_moe"), factors()
    expected = torch.autograd.grad(expected_of("qwen3_moe", x, tensors, adapters), (x, *adapters), above)
    mixture = Mixture(PLAIN, tuple(tensor.detach() for tensor in (*tensors, *adapters)), scales=SCALES)
    tiled = TiledExperts(mixture, needed=(False,) * 3 + (True,) * 4)
    parts = [part.detach().clone() for part in x.split(10)]
    for part, grad in zip(parts, above.detach().split(10), strict=True):
        tiled.backward(grad, part, alone=False)
    found = torch.cat(parts), *tiled.gradients()[3:]
    assert all(relative(one, other) <= ROUNDING for one, other in zip(found, expected, strict=True))


def test_an_expert_without_a_token_gives_its_adapters_a_gradient_of_zero():
    x, tensors, adapters = drawn(2, HIDDEN), base("qwen3_moe"), factors()
    mixture = Mixture(MixtureKind(Router(1, False)), (*tensors, *adapters), scales=SCALES)
    out = mixed(None, x, None, mixture, None)
    for gradient in gradients((out,), adapters):
        idle = [not one.any() for one in gradient]
        assert sum(idle) >= EXPERTS - 2
        assert not all(idle)


@pytest.mark.parametrize("rank", [8, 3], ids=["rows of 16 bytes", "rows of 6 bytes"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_for_all_experts_of_a_tile_gives_what_one_product_per_expert_gives(monkeypatch, dtype, rank):
    bound = 2**-6 if dtype == torch.bfloat16 else 1e-6  # each way rounds sums in another order

    def run():
        x, tensors, adapters = drawn(TOKENS, HIDDEN, dtype=dtype), base("gpt_oss", dtype, 8), factors(dtype, 8, rank)
        out = mixed(None, x, None, Mixture(OSS, (*tensors, *adapters), scales=SCALES), 2).squeeze(0)
        return [out.detach(), *gradients((out,), learning("gpt_oss", x, tensors, adapters))]

    one_by_one = run()
    aligned = expert_products.ALIGNED_BYTES
    fits = lambda *tensors: all(tensor.shape[-1] * 2 % aligned == 0 for tensor in tensors)  # noqa: E731
    monkeypatch.setattr(expert_products, "_has_kernel", fits)
    assert all(relative(one, other) <= bound for one, other in zip(run(), one_by_one, strict=True))


def test_adapters_in_a_longer_dtype_compute_as_rounded_ones_and_get_gradients_in_their_own():
    found = []
    for longer in (False, True):
        x, tensors = drawn(TOKENS, HIDDEN, dtype=torch.bfloat16), base("qwen3_moe", torch.bfloat16)
        adapters = factors(torch.bfloat16)
        if longer:
            adapters = [factor.detach().float().requires_grad_() for factor in adapters]
        out = mixed(None, x, None, Mixture(PLAIN, (*tensors, *adapters), scales=SCALES), 2)
        found.append([out.detach(), *gradients((out,), [x, *adapters])])
    assert {gradient.dtype for gradient in found[1][2:]} == {torch.float32}
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other.to(one.dtype))


# Whole models.


BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA = {**act.LORA, "target_parameters": BOTH, "target_modules": []}
WIDE = {"gpt_oss": {"override_config": {"sliding_window": 6}}}
TINY = {
    "qwen3_moe": TinyShape("qwen3_moe", tie_embeddings=False, num_layers=3),
    "qwen3_5_moe_text": TinyShape("qwen3_5_moe_text", num_layers=4),
    "gpt_oss": TinyShape("gpt_oss", num_layers=2, num_heads=4, num_kv_heads=2, tie_embeddings=False),
}
BATCH = sharing(grouped(40, [9, 5, 1, 12, 3, 7]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    at = tmp_path_factory.mktemp("mixtures")
    made = {kind: make_tiny_model(at / kind, shape, seed=3) for kind, shape in TINY.items()}
    made["qwen3_vl_moe"] = architectures.tiny_folder(at / "qwen3_vl_moe", "qwen3_vl_moe")
    made["mxfp4"], made["decoded"] = mxfp4.folders(at / "mxfp4")
    return made


def shake(model, seed=11):
    """Gives every B values, the same on any number of ranks."""
    with torch.no_grad():
        for place, layer in enumerate(adapters(model).values()):
            generator = torch.Generator().manual_seed(seed + place)
            _copy_whole(layer.lora_B, torch.randn(layer.lora_B.shape, generator=generator) * 0.1)


def adapted(folder, mesh, **options):
    policy = act.build(folder, mesh, **{"recompute_elementwise": True, **LORA, **options})
    shake(policy.model)
    return policy


def theirs(folder, ids, factors):
    """Gives transformers' log-probs of ids[1:] with the adapters added to the weights. ``factors``: weight -> (A, B, scale)."""
    model = architectures.whole_model(folder)
    weights = dict(model.named_parameters())
    named = {architectures.text_name(name): name for name in weights}
    whole = {
        named[name]: added(weights[named[name]].detach(), *own, model.get_submodule(named[name].rpartition(".")[0]).is_transposed)
        for name, own in factors.items()
    }
    logits = torch.func.functional_call(model, whole, (ids[None],)).logits[0].log_softmax(-1)
    return logits[:-1].gather(1, ids[1:, None]).squeeze(1)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe_text", "qwen3_vl_moe", "gpt_oss", "decoded", "mxfp4"])
def test_log_probs_and_gradients_are_those_of_transformers_with_the_adapters_added(folders, one_rank, kind):
    policy = adapted(folders[kind], one_rank)
    layers = adapters(policy.model)
    assert {name.rsplit(".", 1)[-1] for name in layers} == {"gate_up_proj_lora", "down_proj_lora"}
    row = torch.arange(5, 25)
    found = policy.model(pack_rows(row[:8], [8], row[8:], [12]), 1.0, False)[0]
    above = drawn(12, seed=2, dtype=torch.float32).detach()
    (found * above).sum().backward()
    leaves = {
        name: [factor.detach().clone().requires_grad_() for factor in (layer.lora_A, layer.lora_B)]
        for name, layer in layers.items()
    }
    expected = theirs(
        folders["decoded" if kind == "mxfp4" else kind],
        row,
        {name.removesuffix("_lora"): (*leaves[name], layer.scale) for name, layer in layers.items()},
    )[7:]
    (expected * above).sum().backward()
    assert relative(found, expected) <= 1e-5
    for name, layer in layers.items():
        for own, leaf in zip((layer.lora_A, layer.lora_B), leaves[name], strict=True):
            assert own.grad.norm() > 0
            assert relative(own.grad, leaf.grad) <= 1e-5


PLAIN_BLOCK = {"recompute_elementwise": False, "prune_last_block": False}
TILES = {"tiled_mlp": TiledMlp(True, 3)}
KNOBS = (
    {},
    TILES,
    {"recompute": True, "offload": (1, 2)},
    {"recompute": True, "gradient_checkpointing_mode": "selective", **TILES},
    {"recompute_elementwise": False, **TILES},
    {"block_tile_tokens": 7},
    {"target_modules": "all-linear", "block_tile_tokens": 16, "recompute": True},
)


@pytest.mark.parametrize("options", KNOBS, ids=str)
@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "gpt_oss", "mxfp4"])
def test_no_knob_of_a_block_changes_log_probs_or_gradients(folders, one_rank, kind, options):
    same = {name: options[name] for name in ("target_modules",) if name in options}
    plain = results(adapted(folders[kind], one_rank, **PLAIN_BLOCK, **same), BATCH, PARTS, False)
    policy = adapted(folders[kind], one_rank, **options)
    assert_near(results(policy, BATCH, PARTS, policy.model.supports_prefix_kv), plain)


def gradients_of(policy, batch, parts):
    policy.accumulate(micro_batches_of(batch, parts, False), counts_of(batch), 0.9)
    found = [whole_of(weight.grad).clone() for weight in policy.model.parameters() if weight.grad is not None]
    policy.trained.optimizer.zero_grad()
    return found


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_tree_of_turns_gives_the_gradients_of_its_rows_alone_and_replayed_experts_those_of_chosen_ones(folders, one_rank, kind):
    batch, whole = with_data(batch_of(conversations()[0], torch.arange(9) // 3)), [[*range(9)]]
    alone = gradients_of(adapted(folders[kind], one_rank, **PLAIN_BLOCK), batch, [[row] for row in range(9)])
    policy = adapted(folders[kind], one_rank, **TILES, recompute=True)
    together = gradients_of(policy, batch, whole)
    assert act.largest_difference(together, alone) <= 4e-6
    recorded = policy.compute_log_probs(batch.for_record(), whole, 0.9, False)
    replayed = gradients_of(policy, batch.replaying(recorded.record), whole)
    assert all(torch.equal(one, other) for one, other in zip(replayed, together, strict=True))


def on_ranks(rank, folder, options):
    """Gives the whole gradients of both ranks' rows, the merged experts, and the values that A starts with."""
    rows = [[0, 1, 2], [3, 4, 5]][rank]
    own, counts = BATCH.select(rows), counts_of(BATCH)
    policy = adapted(folder, training_mesh("cpu", 2, -1), world_size=2, **options)
    policy.accumulate(list(micro_batches_of(own, [[0, 1], [2]], False)), counts, 0.9)
    found = {name: whole_of(weight.grad) for name, weight in named_weights(policy.model) if weight.grad is not None}
    merged = {name: whole_of(weight) for name, weight in merged_weights(named_weights(policy.model), policy.model)}
    started = {name: whole_of(layer.lora_A) for name, layer in adapters(policy.model).items()}
    return [{name: tensor.detach().numpy() for name, tensor in each.items()} for each in (found, merged, started)]


@pytest.mark.parametrize("num_experts", [3, 1], ids=["ranks do not divide the experts", "a rank has none"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_ranks_shard_adapters_with_their_experts_and_give_what_one_gives(tmp_path, one_rank, kind, num_experts):
    shape = replace(TINY[kind], num_experts=num_experts, experts_per_token=min(2, num_experts))
    folder = make_tiny_model(tmp_path / "model", shape, seed=3)
    alone = adapted(folder, one_rank)
    alone.accumulate(list(micro_batches_of(BATCH, [[*range(6)]], False)), counts_of(BATCH), 0.9)
    expected = (
        {name: weight.grad for name, weight in named_weights(alone.model) if weight.grad is not None},
        dict(merged_weights(named_weights(alone.model), alone.model)),
        {name: layer.lora_A for name, layer in adapters(alone.model).items()},
    )
    for answer in run_ranks(on_ranks, 2, folder, {"recompute": True}):
        for found, own, bound in zip(answer, expected, (4e-6, 1e-6, 0), strict=True):
            assert found.keys() == own.keys()
            pairs = ([torch.from_numpy(found[name]) for name in own], [each.detach() for each in own.values()])
            assert act.largest_difference(*pairs) <= bound
