import pickle
import random
from itertools import accumulate, pairwise

import pytest
import torch

from verl_memopt.model.forest import Turn, build_forest

CHAT = [
    # A conversation that goes on, with a tool's tokens (5, 6) between its outputs.
    [Turn([1, 2], [3, 4]), Turn([1, 2, 3, 4, 5, 6], [7])],
    # Its first output agrees in one token. Its second turn keeps only that one.
    [Turn([1, 2], [3, 8, 9]), Turn([1, 2, 3, 5], [7, 7])],
    [],
    # A sample equal to the first one.
    [Turn([1, 2], [3, 4])],
]


def random_rows(seed, vocabulary=3):
    draw = random.Random(seed)

    def ids(least):
        return [draw.randrange(vocabulary) for _ in range(draw.randint(least, 4))]

    rows = []
    for _ in range(draw.randint(1, 6)):
        seen, turns = ids(1), []
        for _ in range(draw.randint(0, 4)):
            turns.append(Turn(list(seen), ids(0)))
            whole = seen + turns[-1].output_ids
            # Go on, or go back to a token of the prompt or of the output.
            seen = whole[: draw.randint(1, len(whole))] + ids(0) if draw.random() < 0.4 else whole + ids(0)
        rows.append(turns)
    return rows


def sequences(rows):
    """All tokens up to each sampled token, that token included, in the order of the entries."""
    turns = [turn for row in rows for turn in row]
    return [(*t.prompt_ids, *t.output_ids[: count + 1]) for t in turns for count in range(len(t.output_ids))]


def lengths(rows):
    return [sum(len(turn.output_ids) for turn in row) for row in rows]


def path_to(forest, place):
    """The tokens from the root to a place."""
    ends = list(accumulate(forest.sizes.tolist(), initial=0))
    node = next(number for number, (first, end) in enumerate(pairwise(ends)) if first <= place < end)
    tokens = forest.tokens[ends[node] : place + 1].tolist()
    while (node := int(forest.parent[node])) >= 0:
        tokens = forest.tokens[ends[node] : ends[node + 1]].tolist() + tokens
    return tuple(tokens)


def prefixes(paths):
    return {path[:size] for path in paths for size in range(1, len(path) + 1)}


@pytest.mark.parametrize("seed", range(30))
def test_each_sampled_token_stands_behind_the_tokens_that_its_turn_saw(seed):
    rows = random_rows(seed)
    forest = build_forest(rows, merge_cost=0)
    assert [path_to(forest, place) for place in forest.place.tolist()] == sequences(rows)
    # Every different beginning has one place, and only forks end a node.
    outputs = [(*turn.prompt_ids, *turn.output_ids) for row in rows for turn in row if turn.output_ids]
    assert forest.tokens.numel() == int(forest.sizes.sum()) == len(prefixes(outputs))
    assert all(parent < number for number, parent in enumerate(forest.parent.tolist()))
    children = torch.bincount(forest.parent[forest.parent >= 0], minlength=len(forest.parent)).tolist()
    assert 1 not in children
    assert all(size > 0 for size in forest.sizes.tolist())


def test_a_conversation_that_goes_on_is_one_run_and_a_fork_keeps_what_was_left_out():
    forest = build_forest(CHAT)
    assert forest.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 7, 7]
    assert forest.sizes.tolist() == [3, 4, 2, 3]
    assert forest.parent.tolist() == [-1, 0, 0, 0]
    # The first and the last row sampled the same tokens.
    assert forest.place.tolist() == [2, 3, 6, 2, 7, 8, 10, 11, 2, 3]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("merge_cost", [0.3, 1.0, 5.0])
def test_copies_of_short_forks_leave_each_sampled_token_behind_the_tokens_that_its_turn_saw(seed, merge_cost):
    rows = random_rows(seed)
    forest = build_forest(rows, merge_cost=merge_cost)
    assert [path_to(forest, place) for place in forest.place.tolist()] == sequences(rows)
    least = build_forest(rows, merge_cost=0)
    assert forest.tokens.numel() >= least.tokens.numel()
    assert len(forest.sizes) <= len(least.sizes)


def test_a_fork_is_shared_if_that_spares_more_tokens_than_its_merges_cost():
    # A prompt of 4 tokens. All answers begin with the same token.
    rows = [[Turn([1, 2, 3, 4], [5, answer, answer])] for answer in (6, 7, 8)]
    # The first token: 2 copies are spared, 2 branches of 2 tokens are merged. All 5 tokens: 10 copies, and the same merges.
    assert build_forest(rows, merge_cost=2.5).sizes.tolist() == [5, 2, 2, 2]
    assert build_forest(rows, merge_cost=2.6).sizes.tolist() == [7, 7, 7]
    # With one prompt more that begins alike, its branch of 5 tokens is merged too.
    rows.append([Turn([1, 2, 9, 9, 9], [9, 9])])
    assert build_forest(rows, merge_cost=0.4).sizes.tolist() == [2, 3, 2, 2, 2, 5]
    assert build_forest(rows, merge_cost=0.5).sizes.tolist() == [5, 2, 2, 2, 7]


def test_rows_of_different_groups_share_nothing():
    assert build_forest(CHAT, [0, 1, 2, 3]).tokens.numel() == 7 + 8 + 4
    assert build_forest(CHAT, [0, 1, 0, 0]).tokens.numel() == 7 + 8


@pytest.mark.parametrize("seed", range(30))
def test_selected_rows_keep_their_tokens_and_no_others(seed):
    rows = random_rows(seed)
    chosen = random.Random(seed).sample(range(len(rows)), random.Random(seed).randint(0, len(rows)))
    sizes = lengths(rows)
    starts = list(accumulate(sizes, initial=0))
    entries = torch.tensor([starts[row] + place for row in chosen for place in range(sizes[row])], dtype=torch.int64)
    forest, own = build_forest(rows, merge_cost=0).select(entries), [rows[row] for row in chosen]
    assert [path_to(forest, place) for place in forest.place.tolist()] == sequences(own)
    assert forest.tokens.numel() == len(prefixes(sequences(own)))
    assert all(parent < number for number, parent in enumerate(forest.parent.tolist()))


@pytest.mark.parametrize("seed", range(30))
def test_rows_count_the_tokens_before_their_sampled_tokens_once(seed):
    rows = random_rows(seed)
    paths = build_forest(rows, merge_cost=0).paths(lengths(rows))
    chosen = range(0, len(rows), 1 + seed % 2)
    most: dict[int, int] = {}
    for node, tokens in (pair for row in chosen for pair in paths[row]):
        most[node] = max(most.get(node, 0), tokens)
    assert sum(most.values()) == len(prefixes([path[:-1] for path in sequences([rows[row] for row in chosen])]))


def test_no_conversations_are_an_empty_forest():
    for rows in ([], [[], [Turn([1], [])]]):
        forest = build_forest(rows)
        assert [tensor.numel() for tensor in (forest.tokens, forest.sizes, forest.parent, forest.place)] == [0, 0, 0, 0]
        assert forest.paths([0] * len(rows)) == ((),) * len(rows)
        assert forest.select(forest.place).tokens.numel() == 0


def test_a_sampled_token_that_nothing_predicts_is_refused():
    with pytest.raises(AssertionError, match="no prompt"):
        build_forest([[Turn([], [1])]])


def test_a_forest_arrives_whole_in_another_process():
    forest = build_forest(CHAT)
    arrived = pickle.loads(pickle.dumps(forest))
    assert torch.equal(arrived.place, forest.place)
    assert torch.equal(arrived.tokens, forest.tokens)
