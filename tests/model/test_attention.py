from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.attention_cases import (
    HEADS,
    LAYOUTS,
    SIZES,
    agree,
    gpu_operators_on_a_cpu,
    norm_error,
    random_inputs,
    with_gradients,
)
from tests.model.test_build import filled
from tests.model.test_pack import packed
from tests.tensors import Operations
from verl_memopt.errors import ConfigError
from verl_memopt.model.attention import (
    KERNELS,
    REGISTERED,
    AttentionArgs,
    choose_attention,
    eager_attention,
    flash_attn_problem,
    visible,
    windowed_attention,
)
from verl_memopt.model.block_options import BlockOptions
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.tiny import TinyShape, make_tiny_model

CPU = torch.device("cpu")
ROWS = st.lists(st.tuples(st.integers(0, 3), st.one_of(st.integers(0, 12), st.just(6))), min_size=1, max_size=10)
"""Rows as (group, tokens of the response); a group's prompt has three tokens more than its number."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny models by the heads they have: six on three key heads, two of their own."""
    parent = tmp_path_factory.mktemp("attention")
    shapes = {
        "grouped": TinyShape(num_heads=6, num_kv_heads=3, initializer_range=0.05),
        "own": TinyShape(num_heads=2, num_kv_heads=2, initializer_range=0.05),
    }
    return {name: make_tiny_model(parent / name, shape, seed=3) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def models(folders):
    return {name: filled(folder) for name, folder in folders.items()}


def packs(rows, seed=0):
    """Gives the pack of rows that share prompts within their groups, and the pack in which each row has its own."""
    generator = torch.Generator().manual_seed(seed)
    prompts = {group: torch.randint(256, (group + 3,), generator=generator).tolist() for group, _ in sorted(rows)}
    responses = [torch.randint(256, (length,), generator=generator).tolist() for _, length in rows]
    groups = [group for group, _ in rows]
    own = [prompts[group] for group in groups]
    return packed(own, responses, groups), packed(own, responses)


def scored(model, pack):
    """Gives the log-probs of a pack and the gradient of a weighted sum of them with respect to every parameter."""
    model.zero_grad()
    log_probs, _ = model(pack, 0.9, False)
    (log_probs * torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(4))).sum().backward()
    zero = torch.zeros(())
    return [log_probs.detach(), *(zero if each.grad is None else each.grad.clone() for each in model.parameters())]


def attend(name, query, key, value, layout, window=None, sinks=None):
    tokens_first = (x[0].transpose(0, 1) for x in (query, key, value))
    return KERNELS[REGISTERED[name]](*tokens_first, AttentionArgs(layout, 0.3, window, None, sinks=sinks))


@given(SIZES, HEADS)
def test_the_fused_kernel_and_written_out_attention_agree_in_output_and_gradients(sizes, heads):
    layout = PrefixLayout.of(sizes)
    inputs = random_inputs(layout, *heads)
    found, expected = (with_gradients(lambda *x, name=name: attend(name, *x, layout), inputs) for name in ("sdpa", "eager"))
    assert agree(found, expected, 5e-7)


@pytest.mark.parametrize("which", ["grouped", "own"])
@settings(max_examples=20)
@given(rows=ROWS)
def test_a_shared_prompt_changes_no_log_prob_and_no_gradient(models, which, rows):
    shared, repeated = (scored(models[which], pack) for pack in packs(rows))
    assert max(norm_error(one, other) for one, other in zip(shared, repeated, strict=True)) < 2e-6


GROUPS = [(0, 20), (0, 1), (0, 0), (0, 7), (2, 12), (2, 12), (2, 12), (3, 5)]


@pytest.mark.parametrize("name", ["eager", "sdpa"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_blocks_give_a_shared_pack_the_same_bits(folders, name, recompute, mode):
    shared, _ = packs(GROUPS)
    expected, found = (
        scored(filled(folders["grouped"], attention=name, options=BlockOptions(recompute, checkpoint=one)), shared)
        for one in (None, mode)
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["sdpa", "varlen", "flash_attention_2"])
@given(LAYOUTS, HEADS, st.integers(1, 30))
def test_a_sliding_window_goes_on_from_a_prefix_to_what_follows(name, layout, heads, window):
    inputs = random_inputs(layout, *heads)
    with gpu_operators_on_a_cpu():
        if name == "flash_attention_2" and not layout.rounds:
            return  # the package
        found = with_gradients(lambda *x: attend(name, *x, layout, window), inputs)
    assert agree(found, with_gradients(lambda *x: attend("eager", *x, layout, window), inputs), 5e-7)


@pytest.mark.parametrize("name", ["sdpa", "varlen", "flash_attention_2"])
@settings(max_examples=30)
@given(LAYOUTS, HEADS, st.integers(1, 30))
def test_a_sink_takes_its_share_in_a_window(name, layout, heads, window):
    inputs = *random_inputs(layout, *heads), 2 * torch.randn(heads[0], generator=torch.Generator().manual_seed(3))
    with gpu_operators_on_a_cpu():
        found = with_gradients(lambda *x: attend(name, *x[:3], layout, window, x[3]), inputs)
    expected = with_gradients(lambda *x: attend("eager", *x[:3], layout, window, x[3]), inputs)
    assert agree(found, expected, 1e-6)
    # Terms of a sink's gradient may cancel, and then it is rounding of numbers of the others' size.
    others = torch.stack([gradient.norm() for gradient in expected[1:4]]).norm()
    assert (found[4] - expected[4]).norm() <= 1e-6 * expected[4].norm() + 1e-6 * others


@given(LAYOUTS, st.integers(1, 30))
def test_calls_in_a_window_take_each_segment_once_and_copy_few_keys(layout, window):
    calls, segments = layout.behind(window), []
    for call in calls:
        ends = call.cu_seqlens_k.tolist()
        keys = [call.index[first:end].tolist() for first, end in pairwise(ends)]
        assert (ends[-1], call.cu_seqlens_q[-1]) == (len(call.index), call.queries.stop - call.queries.start)
        assert len(call.index) <= 2 * len(layout.stops)
        sizes = call.cu_seqlens_q.diff().tolist()
        assert call.longest == (max(sizes), max(map(len, keys)))
        segments += zip(sizes, keys, strict=True)
    assert [length for length, _ in segments] == list(layout.segments)
    seen, query = visible(layout.stops, window, CPU, layout.query_places), 0
    for length, keys in segments:
        assert keys == seen[query : query + length].any(0).nonzero()[:, 0].tolist()
        query += length
    assert [call.queries.start for call in calls[1:]] == [call.queries.stop for call in calls[:-1]]


@given(LAYOUTS)
def test_the_longest_path_has_as_many_tokens_as_its_last_one_sees(layout):
    assert layout.longest_path == int(visible(layout.stops, None, CPU).sum(1).max())


def test_values_may_have_heads_of_another_size():
    layout = PrefixLayout.of(((4, (3, 2)), (5, ())))
    query, key, value = random_inputs(layout, 4, 2)
    for narrow in ((query, key, value[..., :5]), (query[..., :5], key[..., :5], value)):
        torch.testing.assert_close(attend("sdpa", *narrow, layout), attend("eager", *narrow, layout), rtol=0, atol=2e-6)


def test_auto_is_sdpa_on_a_cpu():
    assert choose_attention("auto", CPU, torch.float32) == REGISTERED["sdpa"]


def test_an_unknown_kernel_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"attn_implementation=flashy.*Use auto"):
        choose_attention("flashy", CPU, torch.float32)


def test_flash_attention_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"attn_implementation=flash_attention_2.*auto"):
        choose_attention("flash_attention_2", CPU, torch.float32)


def test_capped_scores_are_computed_by_eager_attention_alone():
    assert choose_attention("auto", CPU, torch.float32, cap=50.0) == REGISTERED["eager"]
    for name in ("sdpa", "flash_attention_2"):
        with pytest.raises(ConfigError, match=rf"attn_implementation={name}: .*attn_logit_softcapping=50.*Use auto or eager"):
            choose_attention(name, CPU, torch.float32, cap=50.0)


@pytest.fixture
def broken_flash_attn(tmp_path, monkeypatch):
    """A build of flash-attn for another torch: it is found, and fails at import."""
    (tmp_path / "flash_attn.py").write_text('raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10")\n')
    monkeypatch.syspath_prepend(tmp_path)
    flash_attn_problem.cache_clear()
    yield
    flash_attn_problem.cache_clear()


def test_a_flash_attn_that_cannot_be_imported_is_left_by_auto_and_refused_by_name(broken_flash_attn, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert choose_attention("auto", torch.device("cuda"), torch.bfloat16) == REGISTERED["varlen"]
    broken = r"flash-attn cannot be imported \(ImportError: flash_attn_2_cuda.so: undefined symbol"
    with pytest.raises(ConfigError, match=broken + r": _ZN3c10\)\. Install it \(.*no-build-isolation.*or use auto"):
        choose_attention("flash_attention_2", torch.device("cuda"), torch.bfloat16)


def test_no_registered_name_makes_transformers_fetch_a_kernel():
    assert not any("flash" in name for name in REGISTERED.values())


def test_a_windows_positions_go_on_from_prefix_to_suffix():
    assert visible(PrefixLayout.of(((2, (2, 1)),)).stops, 2, CPU).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 1, 0, 0, 1],
    ]


def softmax_over_what_is_seen(query, key, value, seen, scale):
    """Token by token and head by head."""
    out, repeats = torch.empty(query.shape), query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        for token, places in enumerate(seen):
            keys, values = key[0, head // repeats, places], value[0, head // repeats, places]
            out[0, head, token] = (keys @ query[0, head, token] * scale).softmax(0) @ values
    return out


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_written_out_attention_is_a_softmax_over_what_a_token_sees(heads):
    layout = PrefixLayout.of(((2, (2, 1)), (3, ())))
    inputs = random_inputs(layout, *heads)
    seen = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [5], [5, 6], [5, 6, 7]]
    found = eager_attention(*inputs, layout, 0.3, None)
    torch.testing.assert_close(found, softmax_over_what_is_seen(*inputs, seen, 0.3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_skipped_tokens_are_seen(heads):
    layout = PrefixLayout.of(((1, (2, 1)), (2, ())), skipped=(2, 1))
    inputs = random_inputs(layout, *heads)
    # Places of keys: a prefix of three, suffixes 3, 4 and 5, and a group of three.
    seen = [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 5], [6, 7], [6, 7, 8]]
    found = eager_attention(*inputs, layout, 0.3, None)
    torch.testing.assert_close(found, softmax_over_what_is_seen(*inputs, seen, 0.3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("attention", [eager_attention, windowed_attention])
def test_a_window_holds_in_every_sequence(attention):
    layout = PrefixLayout.of(((4, ()), (1, ()), (2, ())))
    inputs = random_inputs(layout, 4, 2)
    seen = [[0], [0, 1], [1, 2], [2, 3], [4], [5], [5, 6]]
    found = attention(*inputs, layout, 0.3, 2)
    torch.testing.assert_close(found, softmax_over_what_is_seen(*inputs, seen, 0.3), rtol=0, atol=1e-6)


def refuse_waiting(func, args, kwargs):
    """Fail at a copy to another device for which a GPU's host would wait: every one that is not told not to."""
    if func.overloadpacket is torch.ops.aten._to_copy and kwargs.get("device") not in (None, args[0].device):
        assert kwargs.get("non_blocking"), func


def test_a_mask_reaches_its_device_without_a_wait_of_the_host():
    with Operations(refuse_waiting):
        assert visible(PrefixLayout.of(((2, (2, 1)),)).stops, 2, torch.device("meta")).device.type == "meta"
