from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.model import architectures
from tests.model.attention_cases import norm_error
from tests.model.doubles import in_double
from tests.model.forests import FORESTS, Forest, agent, forests
from tests.model.test_build import CPU, filled
from verl_memopt.config.schema import Fsdp, Model
from verl_memopt.memory.logit_tiles import Head
from verl_memopt.memory.sequence_parallel_torch import SequenceGroup
from verl_memopt.memory.teaching import Divergence, Teaching
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.block_options import BlockOptions
from verl_memopt.model.packed_model import _response_of_target
from verl_memopt.model.tiny import TinyShape, make_tiny_model


def seen_by(layout):
    """Gives for each query the keys that segments and rounds give it, each as often as it is given."""
    found, query = [], 0
    for length in layout.segments:
        key = layout.query_places[query]
        found += [list(range(key, key + place + 1)) for place in range(length)]
        query += length
    for some in layout.rounds:
        for span in some.spans:
            for place in range(span.queries.start, span.queries.start + span.queries.length):
                found[place] += range(span.keys.start, span.keys.start + span.keys.length)
    return [sorted(keys) for keys in found]


def masked(layout):
    return [[key for key in range(place + 1) if place < layout.stops[key]] for place in layout.query_places.tolist()]


@given(FORESTS)
def test_each_learned_token_is_predicted_behind_its_path_and_each_token_is_computed_once(forest):
    pack = forest.pack()
    ids, entry = pack.input_ids[0], torch.arange(len(pack.targets)) if pack.entry is None else pack.entry
    contexts = [ids[keys].tolist() for keys in masked(pack.layout)]
    assert [len(context) - 1 for context in contexts] == pack.position_ids[0].tolist()
    assert pack.predicts[entry].shape == pack.row.shape
    for place, predictor, target in zip(forest.places, pack.predicts[entry].tolist(), pack.targets[entry].tolist(), strict=True):
        path = forest.tokens[forest.path(place)].tolist()
        assert (contexts[predictor], target) == (path[:-1], path[-1])
    assert len(pack.targets) == len(set(forest.places))
    assert pack.input_ids.shape[1] == max(len(forest.computed()), 1)
    assert pack.row.tolist() == [row for row, places in enumerate(forest.rows) for _ in places]
    assert pack.row_lengths.tolist() == [len(row) for row in forest.rows]
    assert (pack.entry is None) == (len(set(forest.places)) == len(forest.places))


def assert_exact(layout):
    assert seen_by(layout) == masked(layout)
    for some in layout.rounds:
        queries = some.index_q.tolist()
        assert queries == sorted(set(queries))
    if layout.query_index is not None:
        assert layout.query_index.tolist() == layout.query_places.tolist()


@given(forests(nodes=40, rows=20))
def test_segments_and_rounds_give_each_pair_of_the_mask_once_and_no_query_twice_in_a_round(forest):
    pack = forest.pack()
    assert_exact(pack.layout)
    if pack.last_block is not None:
        assert_exact(pack.last_block.layout)
        assert torch.equal(pack.last_block.layout.query_index[pack.last_block.predicts], pack.predicts)


@pytest.mark.parametrize(("turns", "rounds", "calls"), [(16, 3, 67), (64, 5, 271)])
def test_many_turns_take_few_rounds(turns, rounds, calls):
    layout = agent(turns).pack().layout
    assert len(layout.rounds) == rounds
    assert len(layout.spans) + len(layout.segments) <= 1.1 * calls
    assert layout.sums_many
    assert_exact(layout)


def test_no_round_copies_many_times_the_keys_of_the_pack():
    # A chain of 1000 tokens with four forks near its end, whose other children see nearly all of it.
    sizes, parents = (1000, 2, 2, 2, 2, 2, 2, 2, 2), (-1, 0, 0, 1, 1, 3, 3, 5, 5)
    ends = [sum(sizes[: node + 1]) - 1 for node in (2, 4, 6, 7, 8)]
    layout = Forest(sizes, parents, (tuple(ends),)).pack().layout
    copied = [len(some.index_k) for some in layout.rounds]
    assert sum(copied) > 3.9 * len(layout.stops)
    assert max(copied) <= 2 * len(layout.stops)
    assert_exact(layout)


def test_queries_of_a_last_block_are_predictors_and_what_is_in_short_gaps_between_them():
    # A prompt of 100, an answer of 10, 30 tokens of a tool, an answer of 5, 3 tokens of a tool, an answer of 5.
    learned = (*range(100, 110), *range(140, 145), *range(148, 153))
    pack = Forest((153,), (-1,), (learned,)).pack()
    assert pack.last_block.layout.query_places.tolist() == [*range(99, 109), *range(139, 152)]
    assert pack.last_block.layout.segments == (10, 13)
    assert pack.layout.rounds == ()
    assert_exact(pack.last_block.layout)


def test_nothing_learned_is_one_token_and_the_first_token_of_a_root_cannot_be_learned():
    pack = Forest((3, 2), (-1, 0), ((), ())).pack()
    assert (pack.input_ids.shape, pack.num_rows, len(pack.targets)) == ((1, 1), 2, 0)
    with pytest.raises(AssertionError, match="first token of a root"):
        Forest((3,), (-1,), ((0,),)).pack()


@given(FORESTS, st.integers(2, 4))
def test_ranks_that_share_a_forest_have_each_token_and_each_entry_once(forest, size):
    pack = forest.pack()
    shares, own = zip(*(pack.share(SequenceGroup(rank, size, None)) for rank in range(size)), strict=True)
    assert torch.equal(torch.cat(own).sort().values, torch.arange(len(pack.row)))
    everything = torch.arange(len(pack.targets)) if pack.entry is None else pack.entry
    for share, places in zip(shares, own, strict=True):
        entry = torch.arange(len(share.targets)) if share.entry is None else share.entry
        assert torch.equal(share.targets[entry], pack.targets[everything[places]])
        assert torch.equal(share.input_ids[0, share.predicts[entry]], pack.input_ids[0, pack.predicts[everything[places]]])
        assert torch.equal(share.row, pack.row[places])
        assert share.entry_on_host is None or share.entry_on_host.tolist() == share.entry.tolist()


@given(FORESTS, st.randoms())
def test_some_targets_of_a_forest_keep_their_predictors(forest, random):
    pack = forest.pack()
    places = torch.tensor([place for place in range(len(pack.row)) if random.random() < 0.5], dtype=torch.int64)
    some = pack.with_targets(places)
    entries = [torch.arange(len(one.targets)) if one.entry is None else one.entry for one in (some, pack)]
    assert torch.equal(some.predicts[entries[0]], pack.predicts[entries[1]][places])
    assert torch.equal(some.targets[entries[0]], pack.targets[entries[1]][places])
    assert len(some.targets) == len(np.unique(entries[1][places]))
    assert torch.equal(some.row, pack.row[places])


# Against rows alone.


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_text"])
def folder(tmp_path_factory, request):
    shape = TinyShape(
        model_type=request.param, num_heads=6, num_kv_heads=3, initializer_range=0.05 if request.param == "qwen3" else 0.03
    )
    return make_tiny_model(tmp_path_factory.mktemp("forest"), shape, seed=3)


@pytest.fixture(scope="module")
def alone(folder):
    """Gives a function: forest -> log-probs of its entries and the gradients of a weighted sum, in fp64, path by path."""
    return partial(rows_alone, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager"))


def rows_alone(model, forest):
    model.zero_grad()
    log_probs = {}
    with in_double(model):
        # Longest paths first: a row that ends at a place is the beginning of any that goes on from there.
        for path in sorted((forest.path(place) for place in set(forest.places)), key=len, reverse=True):
            if path[-1] in log_probs:
                continue
            tokens = forest.tokens[path]
            found = (model(tokens[None]).logits[0, :-1] / 0.9).log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
            log_probs |= dict(zip(path[1:], found, strict=True))
        found = torch.stack([log_probs[place] for place in forest.places])
        (found * weights(found)).sum().backward()
    return [found.detach(), *(parameter.grad for parameter in model.parameters())]


def weights(values):
    return torch.randn(len(values), generator=torch.Generator().manual_seed(4)).to(values)


def together(model, forest, in_forward=False):
    model.zero_grad()
    own = weights(torch.empty(len(forest.places)))
    gradient = (lambda entries, *_: (own[entries], None)) if in_forward else None
    log_probs, _ = model(forest.pack(), 0.9, False, gradient)
    (log_probs * weights(log_probs)).sum().backward()
    return [log_probs.detach(), *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)]


def assert_near(found, expected):
    scale = torch.stack([gradient.norm() for gradient in expected[1:]]).norm()
    assert norm_error(found[0], expected[0]) < 2e-6
    for one, other in zip(found[1:], expected[1:], strict=True):
        # A gradient that is 0 in exact arithmetic is rounding of numbers of the others' size.
        assert (one.double() - other).norm() <= 2e-6 * other.norm() + 2e-7 * scale


LEARNED = FORESTS.filter(lambda forest: forest.places)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@settings(max_examples=25, deadline=None)
@given(forest=LEARNED)
def test_a_forest_gives_the_log_probs_and_gradients_of_rows_alone(folder, alone, attention, forest):
    assert_near(together(filled(folder, attention=attention), forest), alone(forest))


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_sliding_windows_follow_the_path(tmp_path, one_rank, kind):
    # Blocks of gemma2 are those of transformers, which cap their scores, and of which every second has a window.
    folder = architectures.tiny_folder(tmp_path / kind, kind, sliding_window=4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    settings = Model(path=str(folder), attn_implementation="auto")
    policy = build_policy(settings, Fsdp(dtype="fp32"), folder, one_rank, CPU, ModelUse(trained=True))
    materialize(policy, folder, CPU)
    forest = agent(turns=3, answers=2, context=6, answer=3)
    expected = rows_alone(model, forest)
    found = together(policy, forest)
    assert_near(found, expected)


OPTIONS = {
    "recomputed": BlockOptions(recompute=True),
    "checkpointed": BlockOptions(recompute=True, mlp_tiles=1, checkpoint="full"),
    "selective": BlockOptions(recompute=True, checkpoint="selective"),
    "pruned": BlockOptions(recompute=True, prune=True),
    "pruned, plain": BlockOptions(prune=True),
    "tiles": BlockOptions(recompute=True, tile_tokens=5),
    "pruned tiles": BlockOptions(recompute=True, prune=True, tile_tokens=5),
    "tiled MLP": BlockOptions(recompute=True, mlp_tiles=3),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@settings(max_examples=10, deadline=None)
@given(forest=LEARNED)
def test_no_knob_of_a_block_changes_a_forest(folder, alone, options, forest):
    assert_near(together(filled(folder, options=options), forest), alone(forest))


GEMMA = {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"], "query_pre_attn_scalar": 24}
WINDOWS = {
    "gemma3_text": GEMMA, "gemma4_text": {"sliding_window": 4}, "gpt_oss": {"sliding_window": 4},
    "mistral": {"sliding_window": 3}, "qwen3": {
    "use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]
}}  # fmt: skip


@pytest.fixture(scope="module", params=WINDOWS)
def sliding(request, tmp_path_factory):
    """Gives a model with windows: its folder, its config, and transformers' own in fp64."""
    # With 0.02 the rounding of Gemma 3 in fp32 reaches the bound in some forests.
    spread = 0.01 if request.param == "gemma3_text" else 0.02
    shape = TinyShape(model_type=request.param, num_heads=4, num_kv_heads=2, initializer_range=spread)
    config = WINDOWS[request.param]
    folder = make_tiny_model(tmp_path_factory.mktemp(request.param), shape, seed=3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager", **config)
    model.set_experts_implementation("eager")  # the other one refuses fp64
    return folder, config, model


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@settings(max_examples=10, deadline=None)
@given(forest=LEARNED)
def test_no_knob_of_a_block_changes_a_forest_under_a_window(sliding, options, forest):
    folder, config, model = sliding
    assert_near(together(filled(folder, options=options, override_config=config), forest), rows_alone(model, forest))


@settings(max_examples=20, deadline=None)
@given(forest=LEARNED)
def test_the_gradient_of_the_head_in_the_forward_sums_over_entries(folder, alone, forest):
    assert_near(together(filled(folder), forest, in_forward=True), alone(forest))


TEACHER = Head(torch.randn(200, 6, generator=torch.Generator().manual_seed(6)), None, 0.9, 0, 0)


@pytest.mark.parametrize("in_forward", [False, True])
@settings(max_examples=10, deadline=None)
@given(forest=LEARNED)
def test_a_teacher_says_of_each_entry_what_it_says_of_it_alone(folder, in_forward, forest):
    model, pack, places = filled(folder), forest.pack(), torch.tensor(forest.places)
    # The teacher's states depend on the place in the forest, which several entries may share.
    teaching = Teaching(Divergence("jsd", 0.3), TEACHER, torch.randn(sum(forest.sizes), 6)[places])
    own = weights(torch.empty(len(places)))

    def ahead(entries, *_):
        return torch.zeros_like(own[entries]), None, own[entries]

    found = []
    for shared in (True, False):
        model.zero_grad()
        if shared:
            divergences = model(pack, 0.9, False, ahead if in_forward else None, teaching=teaching)[2]
        else:
            states = pack.of_entries(model.predicting_states(pack, None))
            divergences = model.head(states, pack.of_entries(pack.targets), 0.9, teaching=teaching)[2]
        (divergences * own).sum().backward()
        found.append([divergences.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    assert_near(*found)


@given(FORESTS, st.integers(2, 4))
def test_ranks_that_share_a_forest_ask_the_teacher_about_their_own_targets(forest, size):
    pack = forest.pack()
    everything = torch.arange(len(pack.targets)) if pack.entry is None else pack.entry
    for rank in range(size):
        share, places = pack.share(SequenceGroup(rank, size, None))
        asked = _response_of_target(share, places)
        assert torch.equal(pack.targets[everything[asked]], share.targets)
        if share.entry is not None:
            assert torch.equal(everything[asked[share.entry]], everything[places])


@pytest.mark.parametrize("options", [BlockOptions(), BlockOptions(recompute=True, prune=True)], ids=["plain", "pruned"])
def test_a_long_conversation_gives_the_log_probs_and_gradients_of_rows_alone(folder, alone, options):
    forest = agent(turns=12, answers=2)
    assert_near(together(filled(folder, options=options), forest), alone(forest))


@pytest.fixture(
    scope="module",
    params=[("qwen3_moe", 0.05), ("glm4_moe", 0.05), ("gemma4_text", 0.05), ("qwen3_5_moe_text", 0.03)],
    ids=lambda param: param[0],
)
def experts(request, tmp_path_factory):
    """Gives a folder with experts, a forest, and the results of its rows alone."""
    kind, deviation = request.param
    shape = TinyShape(kind, num_heads=6, num_kv_heads=3, initializer_range=deviation, experts_beside=kind == "gemma4_text")
    folder, forest = make_tiny_model(tmp_path_factory.mktemp(kind), shape, seed=3), agent(turns=6, answers=2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.set_experts_implementation("eager")  # the other one refuses fp64
    return folder, forest, rows_alone(model, forest)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_experts_in_a_long_conversation_give_the_log_probs_and_gradients_of_rows_alone(experts, options):
    folder, forest, expected = experts
    assert_near(together(filled(folder, options=options), forest), expected)
