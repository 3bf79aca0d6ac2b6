import torch

from verl_memopt.model.packing import PrefixLayout, PrefixSpan, Run

SIZES = ((3, (2, 2, 4)), (4, ()), (4, ()), (1, (1,)))


def test_segments_lie_prefix_first_and_group_after_group():
    layout = PrefixLayout.of(SIZES)
    assert layout.segments == (3, 2, 2, 4, 4, 4, 1, 1)
    assert layout.cu_seqlens.tolist() == [0, 3, 5, 7, 11, 15, 19, 20, 21]
    assert layout.cu_seqlens.dtype == torch.int32


def test_neighbours_of_one_length_are_one_run():
    assert PrefixLayout.of(SIZES).runs == (Run(0, 1, 3), Run(3, 2, 2), Run(7, 3, 4), Run(19, 2, 1))


def test_a_prefix_span_says_where_prefix_and_suffixes_of_a_group_lie():
    first, last = PrefixSpan(Run(0, 1, 3), Run(3, 1, 8)), PrefixSpan(Run(19, 1, 1), Run(20, 1, 1))
    assert PrefixLayout.of(SIZES).prefix_spans == (first, last)


def test_groups_with_suffixes_are_gathered_by_index():
    layout = PrefixLayout.of(SIZES)
    assert layout.prefix_index_q.tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 20]
    assert layout.prefix_index_k.tolist() == [0, 1, 2, 19]
    assert layout.prefix_cu_seqlens_q.tolist() == [0, 8, 9]
    assert layout.prefix_cu_seqlens_k.tolist() == [0, 3, 4]


def test_groups_without_suffixes_gather_nothing():
    layout = PrefixLayout.of(((3, ()), (2, ())))
    assert layout.prefix_index_q.numel() == layout.prefix_index_k.numel() == 0
    assert layout.prefix_cu_seqlens_q.tolist() == layout.prefix_cu_seqlens_k.tolist() == [0]
    assert layout.prefix_spans == ()


SKIPPED = PrefixLayout.of(((1, (2, 2)), (3, ()), (4, ())), skipped=(5, 0, 2))


def test_queries_of_groups_with_skipped_tokens_lie_close_together():
    assert SKIPPED.segments == (1, 2, 2, 3, 4)
    assert SKIPPED.cu_seqlens.tolist() == [0, 1, 3, 5, 8, 12]
    assert SKIPPED.tokens == (10, 3, 6)
    assert SKIPPED.query_index.tolist() == [*range(5, 10), *range(10, 13), *range(15, 19)]


def test_the_queries_of_a_prefix_see_its_skipped_tokens():
    first, suffixes, last = SKIPPED.prefix_spans
    assert first == PrefixSpan(keys=Run(0, 1, 5), queries=Run(0, 1, 1))
    assert suffixes == PrefixSpan(keys=Run(0, 1, 6), queries=Run(1, 1, 4))
    assert last == PrefixSpan(keys=Run(13, 1, 2), queries=Run(8, 1, 4))
    assert SKIPPED.prefix_index_q.tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 11]
    assert SKIPPED.prefix_index_k.tolist() == [*range(5), *range(6), 13, 14]


def test_suffixes_of_a_prefix_that_is_skipped_whole():
    layout = PrefixLayout.of(((0, (2, 1)), (3, ())), skipped=(4, 0))
    assert layout.segments == (2, 1, 3)
    assert layout.prefix_spans == (PrefixSpan(keys=Run(0, 1, 4), queries=Run(0, 1, 3)),)
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
    assert moved.groups == SIZES
    assert all(value.is_meta for value in vars(moved).values() if isinstance(value, torch.Tensor))
    assert moved.prefix_index_q.shape == (9,)
