import random

import pytest

from tests.model.test_forest import lengths, path_to, random_rows, sequences
from verl_memopt.memory.pass_order import Close, Open, Run, common_word, schedule
from verl_memopt.model.forest import build_forest
from verl_memopt.model.open_path import computed_tokens, in_pieces


def word(steps):
    """`(` opens, `m` is a pass, `)` closes."""
    return "".join({Open: "(", Run: "m", Close: ")"}[type(step)] for step in steps)


def walk(steps, need, parent):
    """The tokens of each step and the open tokens in it. Checks that what a step needs is open."""
    open_nodes, found = [], []
    below = {node: [child for child in range(len(need)) if parent[child] == node] for node in range(len(need))}

    def subtree(node):
        return need[node] + sum(map(subtree, below[node]))

    for step in steps:
        is_open = {node for trunk in open_nodes for node in trunk} | {-1}
        if isinstance(step, Open):
            trunks = [trunk for trunk in open_nodes if trunk]
            assert not step.nodes or parent[step.nodes[0]] == (trunks[-1][-1] if trunks else -1)
            assert all(parent[node] == above for above, node in zip(step.nodes, step.nodes[1:], strict=False))
            open_nodes.append(step.nodes)
            found.append((sum(need[node] for node in step.nodes), 0))
        elif isinstance(step, Close):
            open_nodes.pop()
        else:
            assert {parent[root] for root in step.roots} <= is_open
            found.append((sum(map(subtree, step.roots)), sum(need[node] for node in is_open - {-1})))
    assert not open_nodes
    return found


def random_forest(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 14)
    return [draw.randint(0, 9) for _ in range(count)], [draw.randint(-1, node - 1) for node in range(count)]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("part", [1, 2, 4, 16])
def test_every_token_is_computed_once_and_the_longest_path_to_the_end_of_a_large_subtree_is_open(seed, part):
    need, parent = random_forest(seed)
    budget = max(sum(need) // part, *need, 1)
    found = walk(schedule((need, parent), budget), need, parent)
    assert sum(tokens for tokens, _ in found) == sum(need)
    assert all(tokens <= budget for tokens, _ in found)

    def total(node):
        return need[node] + sum(total(child) for child in range(len(need)) if parent[child] == node)

    def path(node):
        return need[node] + (path(parent[node]) if parent[node] >= 0 else 0)

    expected = max((path(node) for node in range(len(need)) if total(node) > budget), default=0)
    assert max((tokens for _, tokens in found), default=0) == expected


@pytest.mark.parametrize(
    ("need", "parent", "budget", "steps"),
    [
        ([3, 2, 2], [-1, 0, 0], 7, "m"),
        # A prompt that both answers read.
        ([3, 2, 2], [-1, 0, 0], 4, "(m)"),
        ([3, 2, 2], [-1, 0, 0], 3, "(mm)"),
        # A row of four times the budget.
        ([3, 3, 3, 3], [-1, 0, 1, 2], 3, "(((m)))"),
        # Two nodes of one trunk, and two that are none together. A subtree waits for a pass with room.
        ([2, 2, 1, 3, 1], [-1, 0, 1, 1, 0], 5, "(m)"),
        ([3, 3, 1, 3, 1], [-1, 0, 1, 1, 0], 5, "((m))"),
        # Two large subtrees of one root.
        ([1, 3, 3, 3, 3, 3, 3], [-1, 0, 0, 1, 1, 2, 2], 6, "((m)(m))"),
    ],
)
def test_schedules_of_small_forests(need, parent, budget, steps):
    assert word(schedule((need, parent), budget)) == steps


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("budget", [1, 2, 5])
def test_pieces_of_long_nodes_hold_the_same_tokens_at_the_same_places(seed, budget):
    rows = random_rows(seed)
    forest = build_forest(rows, merge_cost=0)
    forest = forest.select(forest.place.new_tensor(range(len(forest.place))))
    cut = in_pieces(forest, budget)
    assert max(cut.sizes.tolist(), default=0) <= budget
    assert [path_to(cut, place) for place in cut.place.tolist()] == sequences(rows)
    # The tokens before sampled ones.
    paths = forest.paths(lengths(rows))
    most = {}
    for node, tokens in (pair for path in paths for pair in path):
        most[node] = max(most.get(node, 0), tokens)
    assert sum(computed_tokens(cut)) == sum(computed_tokens(forest)) == sum(most.values())


def test_ranks_open_and_close_together_and_each_computes_its_nodes():
    # A row of three times the budget, two answers that share a prompt, and nothing.
    forests = ([2, 2, 2], [-1, 0, 1]), ([2, 1, 1], [-1, 0, 0]), ([], [])
    assert [word(schedule(nodes, 2)) for nodes in forests] == ["((m))", "(m)", ""]
    shared = common_word(forests, 2)
    assert shared == "((m))"
    steps = [schedule(nodes, 2, shared) for nodes in forests]
    assert [word(each) for each in steps] == [shared] * 3
    assert [each[1] for each in steps] == [Open((1,)), Open(()), Open(())]
    # The second rank runs both answers at once, behind the prompt that it opened two letters before.
    assert [each[2] for each in steps] == [Run((2,)), Run((1, 2)), Run(())]


def test_a_rank_computes_what_waits_where_others_have_more_passes():
    # The first rank has three answers that need a pass each, behind a prompt. The second has two rows that need no prompt.
    forests = ([2, 2, 2, 2], [-1, 0, 0, 0]), ([2, 2], [-1, -1])
    shared = common_word(forests, 2)
    assert shared == "(mmm)"
    assert schedule(forests[1], 2, shared) == [Open(()), Run((0,)), Run((1,)), Run(()), Close()]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_have_one_word_and_each_its_tokens_once(seed, ranks):
    forests = [random_forest(100 * seed + rank) for rank in range(ranks)]
    budget = max(max(max(need), sum(need) // 5, 1) for need, _ in forests)
    shared = common_word(forests, budget)
    for need, parent in forests:
        steps = schedule((need, parent), budget, shared)
        assert word(steps) == shared
        assert sum(tokens for tokens, _ in walk(steps, need, parent)) == sum(need)


def test_a_word_that_leaves_out_nodes_is_an_error_and_no_hang():
    with pytest.raises(AssertionError, match="leaves out"):
        schedule(([2, 2], [-1, -1]), 2, "m")
