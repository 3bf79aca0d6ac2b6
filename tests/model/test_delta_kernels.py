"""The rule by kernels of flash-linear-attention. On a CPU a loop over tokens with their signature stands in for them."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory import activation_cases as act
from tests.model import interpreted_fla
from tests.model import test_decoder as decoders
from tests.model import test_prefix_kv as prefixes
from tests.model.forests import agent, forests
from tests.model.test_delta_rule import GROUPS, SHAPE, assert_exact, by_token, elements, inputs  # noqa: F401
from tests.model.test_pack import packed
from verl_memopt.errors import ConfigError
from verl_memopt.model.delta_kernels import (
    BOUND,
    KernelRule,
    known_wrong,
    largest_difference,
    refuse_beyond_rounding,
    with_kernels,
)
from verl_memopt.model.delta_rule import DeltaShape, gated_delta_rule
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.state_chunks import state_chunks, state_tiles
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.byte_tracker import ByteTracker

CPU = torch.device("cpu")


def loop(q, k, v, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, chunk_indices):
    """Computes what fla's ``chunk_gated_delta_rule`` computes, token by token."""
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    borders, repeats, size = cu_seqlens.tolist(), v.shape[2] // q.shape[2], q.shape[3]
    assert (borders[0], borders[-1], len(borders)) == (0, q.shape[1], len(initial_state) + 1)
    lengths = [end - start for start, end in pairwise(borders)]
    assert min(lengths) > 0, "kernels take no empty sequence"
    assert chunk_indices.tolist() == [[n, piece] for n, length in enumerate(lengths) for piece in range(-(-length // 64))]
    q, k = ((x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeats, 2)[0] for x in (q, k))
    v, g, beta, outputs, after = v[0], g[0], beta[0], [], []
    for number, (start, end) in enumerate(pairwise(borders)):
        state = initial_state[number]
        for at in range(start, end):
            state = state * g[at].exp()[:, None, None]
            new = beta[at][:, None] * (v[at] - (state * k[at][:, :, None]).sum(1))
            state = state + k[at][:, :, None] * new[:, None]
            outputs.append((state * q[at][:, :, None]).sum(1) / size**0.5)
        after.append(state)
    return torch.stack(outputs)[None].to(v.dtype), torch.stack(after)


KERNELS = replace(SHAPE, by_kernels=partial(KernelRule, loop))


def rule(layout, tensors):
    chunks = state_chunks(layout, None, KERNELS.sizes(CPU))
    return gated_delta_rule(*tensors[:3], tuple(tensors[3:]), chunks, KERNELS)[0]


@pytest.mark.parametrize("groups", GROUPS)
def test_prompts_and_answers_are_computed_as_rows_alone(groups, elements):  # noqa: F811
    layout = PrefixLayout.of(tuple(groups))
    tensors = inputs(len(layout.stops))
    assert_exact(layout, rule(layout, tensors), tensors)


@settings(max_examples=30, deadline=None)
@given(forest=forests(size=9).filter(lambda forest: forest.places), seed=st.integers(0, 9))
def test_trees_are_computed_as_their_paths(forest, seed):
    layout = forest.pack().layout
    tensors = inputs(len(layout.stops), seed)
    assert_exact(layout, rule(layout, tensors), tensors)


def test_a_tree_of_many_levels_is_cut_into_calls_that_hand_states_on(elements):  # noqa: F811
    layout = agent(turns=4, answers=3, context=70, answer=5).pack().layout
    tensors = inputs(len(layout.stops))
    assert_exact(layout, rule(layout, tensors), tensors)


@settings(max_examples=30, deadline=None)
@given(forest=forests(size=9).filter(lambda forest: forest.places), size=st.sampled_from((1, 3, 17)), seed=st.integers(0, 9))
def test_tiles_hand_states_on(forest, size, seed):
    layout = forest.pack().layout
    tensors = inputs(len(layout.stops), seed)
    tails, states, found = [], [], []
    for tile in state_tiles(layout, size, KERNELS.sizes(CPU)):
        before = None if not len(tile.given) else tuple(torch.cat(some)[tile.given] for some in (tails, states))
        own = [tensor[tile.rows] for tensor in tensors[:3]]
        out, tail, state = gated_delta_rule(*own, tuple(tensors[3:]), tile.chunks, KERNELS, before)
        found.append(out)
        tails.append(tail)
        states.append(state)
    assert_exact(layout, torch.cat(found), tensors)


@settings(max_examples=50, deadline=None)
@given(forest=forests(size=60).filter(lambda forest: forest.places), most=st.sampled_from((1, 20, 100, 1000)))
def test_each_token_is_in_one_call_that_is_no_longer_than_allowed(forest, most):
    layout = forest.pack().layout
    chunks = state_chunks(layout, None, (most,))
    calls = chunks.calls(most)
    assert sorted(torch.cat([call.tokens for call in calls]).tolist()) == list(range(len(layout.stops)))
    for call in calls:
        assert len(call.tokens) <= most
        assert len(set(chunks.rounds[call.part.chunks].tolist())) == 1
        assert torch.equal(call.rows[call.own] - chunks.first_row, call.tokens)


def held(shape, groups):
    """Gives the bytes that forward keeps for backward, beside its inputs and results."""
    layout = PrefixLayout.of(groups)
    tensors, chunks = inputs(len(layout.stops)), state_chunks(layout, None, shape.sizes(CPU))
    with ByteTracker() as tracker:
        gated_delta_rule(*tensors[:3], tuple(tensors[3:]), chunks, shape)  # what the chunks cache
        before = tracker.total()
        results = gated_delta_rule(*tensors[:3], tuple(tensors[3:]), chunks, shape)
        return tracker.total() - before - sum(result.nbytes for result in results)


def test_forward_keeps_for_kernels_what_it_keeps_without_them(elements):  # noqa: F811
    row = ((300, ()),)
    assert held(KERNELS, row) == held(SHAPE, row)
    # A state for each of the prompts that answers begin with, and zeros.
    state = 8 * SHAPE.values * SHAPE.key_dim
    assert held(KERNELS, ((70, (3, 5)), (20, (30,)))) <= held(SHAPE, ((70, (3, 5)), (20, (30,)))) + 4 * state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_results_differ_by_rounding_alone(dtype):
    assert largest_difference(KERNELS, CPU, dtype) <= {torch.float32: 2e-6, torch.bfloat16: BOUND / 2}[dtype]


def wrong_decays(q, k, v, g, beta, **named):
    return loop(q, k, v, g.detach() + 0.5 * (g - g.detach()), beta, **named)


def wrong_states(q, k, v, g, beta, *, initial_state, **named):
    return loop(q, k, v, g, beta, initial_state=0.5 * (initial_state + initial_state.detach()), **named)


def not_finite(q, k, v, g, beta, **named):
    out, after = loop(q, k, v, g, beta, **named)
    return out * (out > out.min()).to(out).log(), after


@pytest.mark.parametrize("kernel", [wrong_decays, wrong_states, not_finite])
def test_a_wrong_kernel_is_noticed(kernel):
    shape = replace(SHAPE, by_kernels=partial(KernelRule, kernel))
    difference = largest_difference(shape, CPU, torch.float32)
    assert not difference <= BOUND
    with pytest.raises(ConfigError, match=r"model\.attn_implementation=auto: fla-core 1\.0.*uninstall"):
        refuse_beyond_rounding(difference, "model.attn_implementation=auto: fla-core 1.0", CPU)


@pytest.fixture
def with_fla(tmp_path, monkeypatch):
    """Gives a function that makes a package fla of a version importable, with other text in its module of the rule."""

    def made(version, text="chunk_gated_delta_rule = None"):
        folder = tmp_path / "fla" / "ops"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text(f"__version__ = {version!r}")
        (folder / "__init__.py").touch()
        (folder / "gated_delta_rule.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with_kernels.cache_clear()
    yield made
    with_kernels.cache_clear()
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        sys.modules.pop(name, None)


ON_A_GPU = "auto", torch.device("cuda"), torch.bfloat16, "model"


def test_on_a_gpu_a_version_with_wrong_results_ends_the_run_with_a_way_out(with_fla):
    with_fla("0.5.0")
    with pytest.raises(ConfigError, match=r"model\.attn_implementation=auto.*fla-core>=0\.6\.0.*uninstall"):
        with_kernels(SHAPE, *ON_A_GPU)


@pytest.mark.parametrize(
    "text", ["raise OSError('no driver')", "def chunk_gated_delta_rule(*_, **__): raise OSError('no driver')"]
)
def test_kernels_that_do_not_run_leave_torchs_operators_with_a_reason(with_fla, caplog, text):
    with_fla("0.6.0", text)
    with caplog.at_level("INFO"):
        assert with_kernels(SHAPE, *ON_A_GPU) is SHAPE
    assert "fla-core" in caplog.text
    assert "cannot be imported" in caplog.text or "do not run" in caplog.text


@pytest.mark.parametrize(
    ("fla", "triton", "capability", "way_out"),
    [
        ("0.5.1", "3.7.1", (8, 0), "fla-core>=0.6.0"),
        ("0.6.0", "3.7.0", (9, 0), "Triton 3.7.1"),
        ("0.7.1", "3.4.0", (9, 0), "Triton 3.7.1"),
    ],
)
def test_versions_with_wrong_results_are_refused_with_a_way_out(fla, triton, capability, way_out):
    assert way_out in known_wrong(fla, triton, capability)


@pytest.mark.parametrize(
    ("fla", "triton", "capability"),
    [("0.6.0", "3.7.1", (9, 0)), ("0.6.0", "3.3.1", (9, 0)), ("0.6.0", "3.5.0", (8, 0)), ("0.6.1", "3.7.1", (12, 0))],
)
def test_other_versions_are_not_refused(fla, triton, capability):
    assert known_wrong(fla, triton, capability) is None


@pytest.mark.parametrize(("name", "reason"), [("auto", "need a GPU"), ("eager", "model.attn_implementation=eager")])
def test_where_torch_computes_the_layers_the_log_says_why(caplog, name, reason):
    with_kernels.cache_clear()
    with caplog.at_level("INFO"):
        assert with_kernels(SHAPE, name, CPU, torch.bfloat16, "model") is SHAPE
    assert reason in caplog.text


# Whole models.


def by_loop(model):
    """Gives the model with the loop in place of kernels."""
    for block in model.blocks():
        if block.is_linear:
            block.linear_attn.shape = replace(block.linear_attn.shape, by_kernels=partial(KernelRule, loop))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = TinyShape(model_type="qwen3_5_text", tie_embeddings=False, num_layers=4)
    return make_tiny_model(tmp_path_factory.mktemp("kernels"), shape, seed=3)


@pytest.mark.parametrize("options", decoders.OPTIONS)
def test_packed_sequences_give_the_log_probs_and_gradients_of_transformers(folder, options):
    model = decoders.theirs(folder, {})
    policy = by_loop(decoders.ours(folder, {}, decoders.OPTIONS[options], model))
    found, _ = policy(packed(decoders.PROMPTS, decoders.ANSWERS, decoders.GROUPS), 1.0, False)
    decoders.assert_same(model, policy, found, decoders.log_probs_row_by_row(model))


def test_a_prompt_in_several_micro_batches_hands_its_states_on(folder, one_rank):
    plain, policy = (act.build(folder, one_rank, **prefixes.OWN) for _ in range(2))
    by_loop(policy.model)
    expected = prefixes.results(plain, prefixes.BATCH, prefixes.PARTS, False)
    for reuse in (False, True):
        prefixes.assert_near(prefixes.results(policy, prefixes.BATCH, prefixes.PARTS, reuse), expected)


INTERPRETED = {
    "prompts": (((70, (3, 130)), (65, ())), (1, 2, 16, 16), 2**23),
    "short": (((1, (1, 2, 5)), (2, ())), (2, 2, 32, 16), 2**23),
    "calls": (((130, (3, 64, 1)),), (1, 2, 16, 16), 1),
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="fla-core is not installed")
def test_the_kernels_of_fla_give_the_same_in_the_interpreter(tmp_path, monkeypatch):
    given = {}
    for name, (groups, heads, most) in INTERPRETED.items():
        shape, tokens = DeltaShape(*heads), len(PrefixLayout.of(groups).stops)
        channels = 2 * shape.keys + shape.values
        sizes = (tokens, channels), *[(tokens, heads[1])] * 2, (channels, 1, 4), *[(heads[1],)] * 2, (tokens, shape.values)
        given[name] = groups, heads, most, [torch.randn(size) for size in sizes]
    path = tmp_path / "packs.pt"
    torch.save(given, path)
    run = [sys.executable, "-W", "ignore", "-m", interpreted_fla.__name__, str(path)]
    subprocess.run(run, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=240)
    found = torch.load(path)
    for name, (groups, heads, _, (*tensors, weights)) in given.items():
        exact = [tensor.double().requires_grad_() for tensor in tensors]
        chunks = state_chunks(PrefixLayout.of(groups))
        out = gated_delta_rule(*exact[:3], tuple(exact[3:]), chunks, DeltaShape(*heads))[0]
        expected = out, *torch.autograd.grad(out, exact, weights.double())
        # The kernels' gradients of decays, and so those of a, A_log and dt_bias, are differences of sums.
        bounds = [2e-6, 2e-6, 2e-6, 2e-5, 2e-6, 2e-4, 2e-4]
        for one, other, bound in zip(found[name], expected, bounds, strict=True):
            assert (one.double() - other).norm() <= bound * other.norm()
