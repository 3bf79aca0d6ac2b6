from itertools import count
from types import SimpleNamespace

from benchmarks.tree_update import Talk, beginning_alike, branching, packs, straight, thinking

SIZE = Talk(prompt=20, answer=8, tool=5)


def different():
    """Draws ids that are all different, so that nothing agrees by chance."""
    ids = count()
    return SimpleNamespace(randrange=lambda _: next(ids))


def tokens(rows):
    return {name: pack.input_ids.shape[1] for name, pack in packs(rows).items()}


def test_what_contestants_compute_of_conversations_that_go_on():
    found = tokens(straight(different(), SIZE, conversations=3, turns=2))
    # The second turn of each has the prompt, an answer, what the tool said, and an answer without its last token.
    alone = 3 * (20 + 7) + 3 * (20 + 8 + 5 + 7)
    assert found == {"rows alone": alone, "shared prompts": alone - 2 * 20, "forest": 20 + 3 * (8 + 5 + 7)}


def test_what_the_forest_computes_of_conversations_that_fork():
    # The first answers without their last token, then the last two tokens of each answer again, with what the tool said.
    found = tokens(thinking(different(), SIZE, conversations=3, turns=2))
    assert found["forest"] == 20 + 3 * (7 + 2 + 5 + 7)
    found = tokens(branching(different(), SIZE, turns=3, answers=2))
    # In each turn but the last, one answer goes on and is computed whole.
    assert found["forest"] == 20 + 2 * (8 + 7 + 5) + 2 * 7
    assert found["shared prompts"] == 20 + 33 + 46 + 6 * 7


def test_only_the_forest_computes_once_what_different_prompts_begin_with():
    found = tokens(beginning_alike(different(), SIZE, conversations=3, turns=2, common=100))
    alone = 3 * (100 + 20 + 7) + 3 * (100 + 20 + 8 + 5 + 7)
    assert found == {"rows alone": alone, "shared prompts": alone, "forest": 100 + 3 * (20 + 8 + 5 + 7)}
