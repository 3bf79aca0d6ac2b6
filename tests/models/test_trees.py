import torch

from verl_memopt.models.trees import Fork, Run, Trees

SIZES = ((3, (2, 2, 4)), (4, ()), (4, ()), (1, (1,)))


def test_segments_lie_trunk_first_and_tree_after_tree():
    trees = Trees.of(SIZES)
    assert trees.segments == (3, 2, 2, 4, 4, 4, 1, 1)
    assert trees.starts.tolist() == [0, 3, 5, 7, 11, 15, 19, 20, 21]
    assert trees.starts.dtype == torch.int32


def test_neighbours_of_one_length_are_one_run():
    assert Trees.of(SIZES).runs == (Run(0, 1, 3), Run(3, 2, 2), Run(7, 3, 4), Run(19, 2, 1))


def test_a_fork_says_where_trunk_and_branches_of_a_tree_lie():
    assert Trees.of(SIZES).forks == (Fork(Run(0, 1, 3), Run(3, 1, 8)), Fork(Run(19, 1, 1), Run(20, 1, 1)))


def test_trees_with_branches_are_gathered_by_index():
    trees = Trees.of(SIZES)
    assert trees.branch_index.tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 20]
    assert trees.trunk_index.tolist() == [0, 1, 2, 19]
    assert trees.branch_starts.tolist() == [0, 8, 9]
    assert trees.trunk_starts.tolist() == [0, 3, 4]


def test_trees_without_branches_gather_nothing():
    trees = Trees.of(((3, ()), (2, ())))
    assert trees.branch_index.numel() == trees.trunk_index.numel() == 0
    assert trees.branch_starts.tolist() == trees.trunk_starts.tolist() == [0]
    assert trees.forks == ()


UNREAD = Trees.of(((1, (2, 2)), (3, ()), (4, ())), unread=(5, 0, 2))


def test_queries_of_trees_with_unread_tokens_lie_close_together():
    assert UNREAD.segments == (1, 2, 2, 3, 4)
    assert UNREAD.starts.tolist() == [0, 1, 3, 5, 8, 12]
    assert UNREAD.tokens == (10, 3, 6)
    assert UNREAD.read.tolist() == [*range(5, 10), *range(10, 13), *range(15, 19)]


def test_what_is_read_of_a_trunk_forks_from_what_is_not():
    first, branches, last = UNREAD.forks
    assert first == Fork(trunk=Run(0, 1, 5), branches=Run(0, 1, 1))
    assert branches == Fork(trunk=Run(0, 1, 6), branches=Run(1, 1, 4))
    assert last == Fork(trunk=Run(13, 1, 2), branches=Run(8, 1, 4))
    assert UNREAD.branch_index.tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 11]
    assert UNREAD.trunk_index.tolist() == [*range(5), *range(6), 13, 14]


def test_branches_of_a_trunk_that_is_not_read_at_all():
    trees = Trees.of(((0, (2, 1)), (3, ())), unread=(4, 0))
    assert trees.segments == (2, 1, 3)
    assert trees.forks == (Fork(trunk=Run(0, 1, 4), branches=Run(0, 1, 3)),)
    assert trees.read.tolist() == trees.read_places.tolist() == [4, 5, 6, 7, 8, 9]


def test_tensors_of_all_tokens_and_of_those_that_are_read():
    every = torch.arange(19.0)
    (read, nothing) = UNREAD.at_queries(every, None)
    assert read.tolist() == UNREAD.read.tolist()
    assert nothing is None
    back = UNREAD.at_keys(read, every)
    assert back.tolist() == [place if place in read.tolist() else 0 for place in range(19)]
    trees = Trees.of(SIZES)
    assert trees.read is None
    assert trees.at_queries(every)[0] is every
    assert trees.at_keys(every, every) is every


def test_moving_trees_moves_their_tensors_and_keeps_their_sizes():
    moved = Trees.of(SIZES).map(lambda tensor: tensor.to("meta"))
    assert moved.sizes == SIZES
    assert all(value.is_meta for value in vars(moved).values() if isinstance(value, torch.Tensor))
    assert moved.branch_index.shape == (9,)
