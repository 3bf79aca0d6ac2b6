import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.tensors import Operations
from verl_memopt.memory.sequence_parallel_torch import SequenceGroup
from verl_memopt.model.packing import pack_groups, pack_prompt, pack_rows, pack_suffixes
from verl_memopt.model.prefix_layout import PrefixLayout, PrefixSpan, SegmentRun

ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=9)
"""Rows as (group, tokens of the response)."""


def flat(rows):
    return torch.tensor([token for row in rows for token in row], dtype=torch.int64)


def packed(prompts, responses, groups=None):
    arguments = flat(prompts), list(map(len, prompts)), flat(responses), list(map(len, responses))
    return pack_rows(*arguments) if groups is None else pack_groups(*arguments, groups)


def facts(layout):
    """Gives what a layout says on the host."""
    return layout.segments, layout.spans, layout.trees, layout.stops.tolist(), layout.query_places.tolist()


def is_of(layout, groups, skipped=None):
    return facts(layout) == facts(PrefixLayout.of(groups, skipped))


def test_a_pack_holds_prompts_and_responses_without_their_last_tokens():
    pack = packed([[1, 2], [3]], [[7], [8, 9]])
    assert pack.input_ids.tolist() == [[1, 2, 3, 8]]
    assert pack.position_ids.tolist() == [[0, 1, 0, 1]]
    assert is_of(pack.layout, ((2, ()), (2, ())))
    assert pack.predicts.tolist() == [1, 2, 3]
    assert pack.targets.tolist() == [7, 8, 9]
    assert pack.row.tolist() == [0, 1, 1]
    assert pack.row_lengths.tolist() == [1, 2]


def test_a_row_without_a_response_costs_no_token_and_keeps_its_place():
    pack = packed([[1, 2], [3]], [[], [8, 9]])
    assert pack.input_ids.tolist() == [[3, 8]]
    assert pack.row.tolist() == [1, 1]
    assert pack.row_lengths.tolist() == [0, 2]


def test_a_group_holds_its_prompt_once_and_its_responses_behind_it():
    pack = packed([[1, 2], [1, 2], [1, 2]], [[7, 8, 9], [4, 5], [6]], [0, 0, 0])
    assert pack.input_ids.tolist() == [[1, 2, 7, 8, 4]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert is_of(pack.layout, ((2, (2, 1)),))
    # The prompt's last token predicts every response's first.
    assert pack.predicts.tolist() == [1, 2, 3, 1, 4, 1]
    assert pack.targets.tolist() == [7, 8, 9, 4, 5, 6]
    assert pack.row.tolist() == [0, 0, 0, 1, 1, 2]
    assert pack.row_lengths.tolist() == [3, 2, 1]


def test_rows_of_a_group_need_not_be_neighbours():
    pack = packed([[1], [2, 3], [1], [2, 3]], [[4, 5], [6, 7], [8, 9], [10, 11]], [5, 2, 5, 2])
    assert pack.input_ids.tolist() == [[1, 4, 8, 2, 3, 6, 10]]
    assert is_of(pack.layout, ((1, (1, 1)), (2, (1, 1))))
    assert pack.predicts.tolist() == [0, 1, 4, 5, 0, 2, 4, 6]
    assert pack.targets.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert pack.row.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("responses", "input_ids", "groups", "predicts"),
    [
        ([[], [7, 8, 9], []], [1, 2, 7, 8], ((4, ()),), [1, 2, 3]),  # one response: a plain row
        ([[7], [8], []], [1, 2], ((2, ()),), [1, 1]),  # responses of one token have no suffix
        ([[], [], [4]], [3], ((1, ()),), [0]),  # a group without a response costs no token
    ],
)
def test_a_group_is_as_short_as_its_responses_allow(responses, input_ids, groups, predicts):
    pack = packed([[1, 2], [1, 2], [3]], responses, [0, 0, 1])
    assert is_of(pack.layout, groups)
    assert (pack.input_ids.tolist(), pack.predicts.tolist()) == ([input_ids], predicts)
    assert pack.row_lengths.tolist() == list(map(len, responses))


def test_prompts_of_different_lengths_are_not_shared():
    with pytest.raises(AssertionError, match="share a prompt"):
        packed([[1, 2], [1]], [[7], [8]], [0, 0])


def test_an_empty_micro_batch_is_one_token_that_predicts_nothing():
    for groups in (None, []):
        pack = packed([], [], groups)
        assert pack.input_ids.shape == (1, 1)
        assert pack.predicts.numel() == pack.targets.numel() == pack.num_rows == 0


def contexts(pack):
    """Gives, for each response token, the tokens seen by the one that predicts it, as the layout says; and its row."""
    ids, stops = pack.input_ids[0].tolist(), pack.layout.stops
    seen = [[ids[key] for key in range(place + 1) if place < stops[key]] for place in range(len(ids))]
    assert [len(context) - 1 for context in seen] == pack.position_ids[0].tolist()
    return [(seen[place], target, row) for place, target, row in zip(*map(list, _asked(pack)), strict=True)]


def _asked(pack):
    return pack.predicts.tolist(), pack.targets.tolist(), pack.row.tolist()


@given(ROWS)
def test_sharing_a_prompt_changes_nothing_that_is_asked_and_costs_each_token_once(rows):
    groups = [group for group, _ in rows]
    prompts = [list(range(100 * group, 100 * group + group + 1)) for group in groups]
    responses = [[1000 * (row + 1) + token for token in range(length)] for row, (_, length) in enumerate(rows)]
    shared = packed(prompts, responses, groups)
    expected = [
        (prompts[row] + response[:token], response[token], row)
        for row, response in enumerate(responses)
        for token in range(len(response))
    ]
    assert contexts(shared) == contexts(packed(prompts, responses)) == expected
    needed = {tuple(prompt) for prompt, response in zip(prompts, responses, strict=True) if response}
    tokens = sum(map(len, needed)) + sum(len(response) - 1 for response in responses if response)
    assert shared.input_ids.shape[1] == max(tokens, 1)


@given(ROWS)
def test_the_queries_of_the_last_block_are_what_predicts(rows):
    groups = [group for group, _ in rows]
    prompts = [list(range(7 * (group + 1))) for group in groups]
    for shared in (None, groups):
        pack = packed(prompts, [[1] * length for _, length in rows], shared)
        if pack.last_block is None:
            skipped = pack.input_ids.numel() - len(set(pack.predicts.tolist()))
            assert skipped < pack.input_ids.numel() / 8 or pack.num_rows == 0 or not pack.predicts.numel()
            continue
        query_index = pack.last_block.layout.query_index
        assert query_index.tolist() == sorted(set(pack.predicts.tolist()))
        assert torch.equal(query_index[pack.last_block.predicts], pack.predicts)
        assert pack.last_block.layout.stops.tolist() == pack.layout.stops.tolist()


def test_a_pack_of_fewer_tokens_than_ranks_is_computed_by_each_and_belongs_to_the_first():
    pack = packed([[5]], [[6, 7]])
    for size, shares in ((2, [([5], [6]), ([6], [7])]), (3, [([5, 6], [6, 7]), ([5, 6], []), ([5, 6], [])])):
        found = [pack.share(SequenceGroup(rank, size, None))[0] for rank in range(size)]
        assert [(share.input_ids.tolist()[0], share.targets.tolist()) for share in found] == shares
        assert [share.predicts_on_host.tolist() for share in found] == [share.predicts.tolist() for share in found]


@given(ROWS, st.integers(2, 4))
def test_ranks_that_share_a_pack_have_each_token_each_target_and_each_query_once(rows, size):
    groups = [group for group, _ in rows]
    prompts = [[100 * group + place for place in range(7 * (group + 1))] for group in groups]
    pack = packed(prompts, [[1000 * row + token for token in range(length)] for row, (_, length) in enumerate(rows)], groups)
    ranks = [SequenceGroup(rank, size, None) for rank in range(size)]
    shares, own = zip(*(pack.share(group) for group in ranks), strict=True)
    total = pack.input_ids.shape[1]
    assert torch.equal(torch.cat(own).sort().values, torch.arange(len(pack.targets)))
    for share, places in zip(shares, own, strict=True):
        assert torch.equal(share.targets, pack.targets[places])
        assert torch.equal(share.row, pack.row[places])
        assert torch.equal(share.row_lengths, torch.bincount(pack.row[places], minlength=len(rows)))
        assert torch.equal(share.input_ids[0, share.predicts], pack.input_ids[0, pack.predicts[places]])
        assert share.predicts_on_host.tolist() == share.predicts.tolist()
        assert torch.equal(share.position_ids, pack.position_ids)
    if total < size:  # nobody has tokens of its own
        assert all(torch.equal(share.input_ids, pack.input_ids) for share in shares)
        assert [len(places) for places in own] == [len(pack.targets)] + [0] * (size - 1)
        return
    sizes = tuple(share.input_ids.shape[1] for share in shares)
    assert torch.equal(torch.cat([share.input_ids for share in shares], 1), pack.input_ids)
    assert max(sizes) - min(sizes) <= 1
    assert {(share.layout.split.tokens, share.layout.split.queries, share.layout.split.rows) for share in shares} == {
        (sizes, sizes, None)
    }
    assert [share.layout.split.group for share in shares] == ranks
    if pack.last_block is None:
        assert {share.last_block for share in shares} == {None}
        return
    splits = [share.last_block.layout.split for share in shares]
    queries = [split.rows.index + split.own.start for split in splits]
    assert torch.equal(torch.cat(queries), pack.last_block.layout.query_index)
    assert {(split.tokens, split.queries) for split in splits} == {(sizes, tuple(map(len, queries)))}
    for share, split, at, places in zip(shares, splits, queries, own, strict=True):
        assert split.rows.places.tolist() == split.rows.index.tolist()
        assert torch.equal(at[share.last_block.predicts], pack.predicts[places])


def test_a_pack_of_some_targets_has_all_tokens_and_the_queries_of_these_targets():
    pack = packed([[1, 2, 3], [1, 2, 3]], [[7, 8, 9], [4, 5]], [0, 0])
    some = pack.with_targets(torch.tensor([1, 4]))
    assert torch.equal(some.input_ids, pack.input_ids)
    assert (some.targets.tolist(), some.row.tolist(), some.row_lengths.tolist()) == ([8, 5], [0, 1], [1, 1])
    assert some.predicts.tolist() == some.predicts_on_host.tolist() == pack.predicts[[1, 4]].tolist()
    assert torch.equal(some.last_block.layout.query_index[some.last_block.predicts], some.predicts)


def test_a_few_tokens_are_not_skipped():
    assert packed([[1, 1]], [[2] * 8]).last_block is None  # one of nine
    assert packed([[1, 1, 1]], [[2] * 8]).last_block is not None  # two of ten
    assert packed([[1]], [[2]]).last_block is None


def test_answers_to_a_prompt_that_lies_elsewhere():
    pack = pack_suffixes(10, torch.tensor([1, 2, 3, 4, 5, 6]), [3, 0, 1, 2])
    assert pack.input_ids.tolist() == [[1, 2, 5]]
    assert pack.position_ids.tolist() == [[10, 11, 10]]
    assert is_of(pack.layout, ((0, (2, 1)),), (10,))
    assert pack.predicts.tolist() == [0, 1, 2, 0, 0, 3]  # 0 is the prompt's end
    assert pack.targets.tolist() == [1, 2, 3, 4, 5, 6]
    assert pack.row.tolist() == [0, 0, 0, 2, 3, 3]
    assert pack.row_lengths.tolist() == [3, 0, 1, 2]


def test_packing_depends_on_no_token_value():
    def zeros(count):
        return torch.zeros(count, dtype=torch.int64)

    with FakeTensorMode():
        rows, groups = pack_rows(zeros(5), [2, 3], zeros(3), [1, 2]), pack_groups(zeros(4), [2, 2], zeros(5), [3, 2], [1, 1])
    assert (rows.input_ids.shape, rows.predicts.shape) == ((1, 6), (3,))
    assert (groups.input_ids.shape, groups.predicts.shape) == ((1, 5), (5,))


def test_every_tensor_of_a_pack_is_moved():
    pack = packed([[1, 1], [1, 1]], [[2, 3], [4, 5]], [0, 0]).to(torch.device("meta"))
    layouts = pack.layout, pack.last_block.layout
    parts = (pack, pack.last_block, *layouts, *(some for layout in layouts for some in layout.rounds))
    tensors = [value for part in parts for value in vars(part).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6 + 1 + 2 + 1 + 2 * 4
    assert all(tensor.is_meta for tensor in tensors)


def test_a_prompt_alone_asks_for_nothing_and_the_state_of_its_last_token_is_read():
    pack = pack_prompt(torch.tensor([5, 6, 7]))
    assert pack.input_ids.tolist() == [[5, 6, 7]]
    assert pack.position_ids.tolist() == [[0, 1, 2]]
    assert is_of(pack.layout, ((3, ()),))
    assert pack.predicts.tolist() == [2]
    assert is_of(pack.last_block.layout, ((1, ()),), (2,))
    for asked in (pack.targets, pack.row, pack.row_lengths):
        assert (asked.tolist(), asked.dtype) == ([], torch.int64)


def test_no_answers_to_a_prompt_that_lies_elsewhere_are_an_empty_pack():
    pack = pack_suffixes(10, flat([]), [])
    assert (pack.input_ids.shape, pack.predicts.numel(), pack.num_rows) == ((1, 0), 0, 0)


def test_the_copies_of_a_pack_do_not_wait():
    pack, waits = packed([[1]], [[2]]), []

    def look(func, args, kwargs):
        if func is torch.ops.aten._to_copy.default:
            waits.append(not kwargs.get("non_blocking", False))

    with Operations(look):
        moved = pack.to(torch.device("meta"))
    assert moved.last_block is None
    assert len(waits) >= 6
    assert not any(waits)


SIZES = ((3, (2, 2, 4)), (4, ()), (4, ()), (1, (1,)))


def test_segments_lie_prefix_first_and_group_after_group_and_neighbours_of_one_length_are_one_run():
    layout = PrefixLayout.of(SIZES)
    assert layout.segments == (3, 2, 2, 4, 4, 4, 1, 1)
    assert layout.cu_seqlens.tolist() == [0, 3, 5, 7, 11, 15, 19, 20, 21]
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.runs == (SegmentRun(0, 1, 3), SegmentRun(3, 2, 2), SegmentRun(7, 3, 4), SegmentRun(19, 2, 1))


def test_groups_with_suffixes_have_spans_and_are_gathered_by_index():
    layout = PrefixLayout.of(SIZES)
    first, last = PrefixSpan(SegmentRun(0, 1, 3), SegmentRun(3, 1, 8)), PrefixSpan(SegmentRun(19, 1, 1), SegmentRun(20, 1, 1))
    (only,) = layout.rounds
    assert only.spans == (first, last)
    assert only.index_q.tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 20]
    assert only.index_k.tolist() == [0, 1, 2, 19]
    assert only.cu_seqlens_q.tolist() == [0, 8, 9]
    assert only.cu_seqlens_k.tolist() == [0, 3, 4]
    assert not layout.sums_many


def test_groups_without_suffixes_gather_nothing():
    assert PrefixLayout.of(((3, ()), (2, ()))).rounds == ()


SKIPPED = PrefixLayout.of(((1, (2, 2)), (3, ()), (4, ())), skipped=(5, 0, 2))


def test_queries_of_groups_with_skipped_tokens_lie_close_together():
    assert SKIPPED.segments == (1, 2, 2, 3, 4)
    assert SKIPPED.cu_seqlens.tolist() == [0, 1, 3, 5, 8, 12]
    assert SKIPPED.trees == (10, 3, 6)
    assert SKIPPED.query_index.tolist() == [*range(5, 10), *range(10, 13), *range(15, 19)]


def test_the_queries_of_a_prefix_see_its_skipped_tokens():
    (only,) = SKIPPED.rounds
    first, suffixes, last = only.spans
    assert first == PrefixSpan(keys=SegmentRun(0, 1, 5), queries=SegmentRun(0, 1, 1))
    assert suffixes == PrefixSpan(keys=SegmentRun(0, 1, 6), queries=SegmentRun(1, 1, 4))
    assert last == PrefixSpan(keys=SegmentRun(13, 1, 2), queries=SegmentRun(8, 1, 4))
    assert only.index_q.tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 11]
    assert only.index_k.tolist() == [*range(5), *range(6), 13, 14]
    assert not SKIPPED.sums_many


def test_suffixes_of_a_prefix_that_is_skipped_whole():
    layout = PrefixLayout.of(((0, (2, 1)), (3, ())), skipped=(4, 0))
    assert layout.segments == (2, 1, 3)
    assert layout.spans == (PrefixSpan(keys=SegmentRun(0, 1, 4), queries=SegmentRun(0, 1, 3)),)
    assert layout.query_index.tolist() == layout.query_places.tolist() == [4, 5, 6, 7, 8, 9]


def test_tensors_of_all_tokens_and_of_queries():
    every = torch.arange(19.0)
    (queries, nothing) = SKIPPED.at_queries(every, None)
    assert queries.tolist() == SKIPPED.query_index.tolist()
    assert nothing is None
    back = SKIPPED.at_keys(queries, every)
    assert back.tolist() == [place if place in queries.tolist() else 0 for place in range(19)]
    layout = PrefixLayout.of(SIZES)
    assert layout.query_index is None
    assert layout.at_queries(every)[0] is every
    assert layout.at_keys(every, every) is every


def test_moving_groups_moves_their_tensors_and_keeps_their_sizes():
    moved = PrefixLayout.of(SIZES).map(lambda tensor: tensor.to("meta"))
    assert is_of(moved, SIZES)
    tensors = [value for part in (moved, *moved.rounds) for value in vars(part).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 5
    assert all(tensor.is_meta for tensor in tensors)
