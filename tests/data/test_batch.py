import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.config.schema import Actor
from verl_memopt.data.batch import (
    Ragged,
    RolloutBatch,
    SharedRows,
    prompt_rows,
    rollout_batch,
    scatter_tokens,
    shares_prompts,
    token_index,
)
from verl_memopt.memory.token_packing import RowTokens, pack_groups_under
from verl_memopt.model.forest import Turn, build_forest


def batch():
    return RolloutBatch(
        prompts=Ragged.from_rows([[1, 2], [3], [4, 5, 6]], torch.int64),
        responses=Ragged.from_rows([[7], [], [8, 9]], torch.int64),
        group=torch.tensor([0, 0, 1]),
        advantages=torch.tensor([0.1, 0.2, 0.3]),
        batch_size=[],
    )


def test_computed_tokens_leave_out_the_last_response_token_and_rows_without_a_response():
    assert batch().row_tokens().row_lengths() == [2, 0, 4]


def test_response_row_names_the_row_of_each_response_token():
    assert batch().response_row().tolist() == [0, 2, 2]


def test_select_takes_the_token_fields_along():
    chosen = batch().select([2, 0])
    assert [row.tolist() for row in chosen.responses.rows()] == [[8, 9], [7]]
    assert chosen.group.tolist() == [1, 0]
    torch.testing.assert_close(chosen.advantages, torch.tensor([0.2, 0.3, 0.1]), rtol=0, atol=0)
    assert chosen.old_log_probs is None


def test_selected_conversations_keep_the_tokens_of_their_turns():
    rows = [[Turn([1, 2], [7]), Turn([1, 2, 7, 3], [8])], [Turn([1, 2], [9])], [Turn([5], [6, 6])]]
    responses = Ragged.from_rows([[token for turn in row for token in turn.output_ids] for row in rows], torch.int64)
    prompts = Ragged.from_rows([row[0].prompt_ids for row in rows], torch.int64)
    made = rollout_batch(prompts, responses, torch.tensor([0, 0, 1]), Actor(), forest=build_forest(rows))
    for chosen in ([2, 0], [1], [0, 1, 2], []):
        batch = made.select(chosen)
        assert torch.equal(batch.forest.tokens[batch.forest.place], batch.responses.flat)
    assert made.select([1]).forest.tokens.tolist() == [1, 2, 9]
    arrived = pickle.loads(pickle.dumps(made))
    assert torch.equal(arrived.forest.parent, made.forest.parent)


def answered(system, own=20, answer=30, groups=4, samples=3):
    """Groups of answers whose prompts begin with the same ``system`` tokens."""
    generator = torch.Generator().manual_seed(0)

    def ids(length):
        return torch.randint(1000, (length,), generator=generator).tolist()

    begin = ids(system)
    prompts = [row for _ in range(groups) for row in [begin + ids(own)] * samples]
    responses = Ragged.from_rows([ids(answer) for _ in prompts], torch.int64)
    return prompt_rows(prompts), responses, torch.arange(len(prompts)) // samples


@pytest.mark.parametrize("system", [0, 63, 64, 500])
@pytest.mark.parametrize("shared", [True, False])
def test_prompts_that_begin_alike_are_a_forest_if_that_saves_enough(system, shared):
    batch = rollout_batch(*answered(system), Actor(use_prefix_grouper=shared))
    assert (batch.forest is not None) == (shared and system >= 64)
    tokens = batch.row_tokens()
    assert tokens.row_lengths() == [system + 20 + 29] * 12
    prompts = system + 4 * 20 if batch.forest is not None else (4 if shared else 12) * (system + 20)
    assert tokens.cost(range(12)) == prompts + 12 * 29


def test_a_beginning_that_saves_less_than_a_tenth_is_not_shared():
    # 3 x 70 tokens of 4 x 90 + 12 x (answer - 1).
    for answer, saves in ((145, True), (147, False)):
        batch = rollout_batch(*answered(70, answer=answer), Actor(use_prefix_grouper=True))
        assert (batch.forest is not None) == saves


def test_answers_to_a_prompt_over_the_budget_still_reuse_its_keys_and_values():
    batch = rollout_batch(*answered(100, own=100, answer=51, samples=4), Actor(use_prefix_grouper=True))
    tokens, names = batch.row_tokens(), [str(row) for row in range(16)]
    assert batch.forest is not None
    plain = RowTokens(tokens.prompts, tokens.answers, tokens.groups)
    assert pack_groups_under(tokens, 300, names) == pack_groups_under(plain, 300, names)
    # Under a larger budget two groups share their beginning.
    assert [tokens.cost(rows) for rows in pack_groups_under(tokens, 700, names)] == [700, 700]
    assert len(pack_groups_under(plain, 700, names)) == 4


def test_rows_without_tokens_share_nothing():
    none = Ragged.from_rows([], torch.int64)
    assert rollout_batch(none, none, torch.zeros(0, dtype=torch.int64), Actor(use_prefix_grouper=True)).forest is None


def test_scattered_tokens_come_back_in_batch_order():
    parts = [([2, 0], torch.tensor([1.0, 2.0, 3.0])), ([1], torch.tensor([]))]
    assert scatter_tokens(parts, [1, 0, 2]).tolist() == [3.0, 1.0, 2.0]


def test_scattered_tokens_are_fp32_whatever_torch_makes_by_default():
    torch.set_default_dtype(torch.float64)
    try:
        nothing, one = scatter_tokens([], []), scatter_tokens([([0], torch.ones(1, dtype=torch.float32))], [1])
    finally:
        torch.set_default_dtype(torch.float32)
    assert (nothing.shape, nothing.dtype) == ((0,), torch.float32)
    assert (one.tolist(), one.dtype) == ([1.0], torch.float32)


def test_rows_share_a_prompt_by_group_and_only_where_prompts_are_shared():
    for shared, groups in ((True, (0, 0, 1)), (False, (0, 1, 2))):
        rows = batch()
        made = rollout_batch(rows.prompts, rows.responses, rows.group, Actor(use_prefix_grouper=shared), rows.advantages)
        assert (made.row_tokens().groups, made.group.tolist(), made.prompt_group.dtype) == (groups, [0, 0, 1], torch.int64)
        assert (made.prompts.sizes(), made.responses.sizes()) == ([2, 1, 3], [1, 0, 2])
        assert torch.equal(made.rollout_log_probs, rows.advantages)
        assert made.select([2, 0]).prompt_groups() == [groups[2], groups[0]]


def test_rows_of_a_batch_that_says_nothing_compute_their_own_prompts():
    assert batch().row_tokens().groups == (0, 1, 2)
    assert batch().select([2, 0]).prompt_group is None


def test_a_batch_with_a_prompt_too_many_is_refused():
    torn = batch()
    torn.prompts = Ragged.from_rows([[1], [2], [3], [4]], torch.int64)
    with pytest.raises(ValueError, match="zip"):
        torn.row_tokens()


def test_kept_sizes_count_the_tokens_of_each_row_that_no_correction_rejects():
    assert batch().kept_sizes() == [1, 0, 2]
    corrected = batch()
    corrected.kept = torch.tensor([False, True, True])
    assert corrected.kept_sizes() == [0, 0, 2]


def test_a_batch_without_rows_has_groups_of_integers():
    empty = Ragged.from_rows([], torch.int64)
    assert rollout_batch(empty, empty, torch.zeros(0, dtype=torch.int64), Actor()).prompt_group.dtype == torch.int64


def test_no_rows_can_be_selected():
    none = batch().select([])
    assert (none.num_rows, none.responses.num_rows, none.advantages.numel()) == (0, 0, 0)


def test_rows_share_their_prompt_unless_the_settings_switch_it_off():
    assert [shares_prompts(Actor(use_prefix_grouper=shared)) for shared in (True, False)] == [True, False]


ROWS = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=6)


def lists(ragged):
    return [row.tolist() for row in ragged.rows()]


@given(ROWS)
def test_rows_come_back_as_they_went_in(rows):
    assert lists(Ragged.from_rows(rows, torch.int64)) == rows


@given(ROWS, st.data())
def test_select_gives_the_chosen_rows_in_the_order_chosen(rows, data):
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if rows else []
    assert lists(Ragged.from_rows(rows, torch.int64).select(chosen)) == [rows[index] for index in chosen]


def test_nothing_is_padded():
    ragged = Ragged.from_rows([[1], [2, 3, 4], []], torch.int64)
    assert ragged.flat.tolist() == [1, 2, 3, 4]
    assert ragged.num_rows == 3


def test_a_ragged_tensor_survives_pickling():
    ragged = pickle.loads(pickle.dumps(Ragged.from_rows([[1, 2], []], torch.int64)))
    assert lists(ragged) == [[1, 2], []]


def test_token_index_points_at_the_tokens_of_the_chosen_rows():
    assert token_index([2, 0, 3], [2, 0]).tolist() == [2, 3, 4, 0, 1]


def test_rows_get_the_dtype_that_was_asked_for():
    for rows in ([[1], [2]], [[]], [torch.tensor([1, 2]), torch.tensor([3.0])]):
        assert Ragged.from_rows(rows, torch.float64).flat.dtype == torch.float64


PROMPTS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=4)


def shared_and_own(prompts, n):
    shared = prompt_rows([ids for ids in prompts for _ in range(n)])
    own = prompt_rows([list(ids) for ids in prompts for _ in range(n)])
    assert isinstance(own, Ragged)
    return shared, own


def assert_same(shared, own):
    assert torch.equal(shared.flat, own.flat)
    assert torch.equal(shared.lengths, own.lengths)
    assert (shared.sizes(), shared.num_rows) == (own.sizes(), own.num_rows)


@given(PROMPTS, st.integers(1, 4), st.data())
def test_shared_rows_answer_as_rows_of_their_own(prompts, n, data):
    shared, own = shared_and_own(prompts, n)
    assert_same(shared, own)
    chosen = data.draw(st.lists(st.integers(0, own.num_rows - 1), min_size=1, max_size=9))
    assert_same(shared.select(chosen), own.select(chosen))
    again = data.draw(st.lists(st.integers(0, len(chosen) - 1), min_size=1, max_size=5))
    assert_same(shared.select(chosen).select(again), own.select(chosen).select(again))


def test_a_selection_holds_the_prompts_of_its_rows_alone():
    shared, _ = shared_and_own([[1, 2], [3], [4, 5, 6]], 2)
    assert shared.select([5, 4]).stored.flat.tolist() == [4, 5, 6]
    assert shared.select([5, 0]).stored.flat.tolist() == [1, 2, 4, 5, 6]


def num_bytes(rows):
    tensors = [rows.flat, rows.lengths] if isinstance(rows, Ragged) else [rows.stored.flat, rows.stored.lengths, rows.index]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize(("k", "kib"), [(2, 24), (4, 71), (8, 165)])
def test_a_prompt_of_3015_tokens_is_held_once_in_place_of_k_times(k, kib):
    shared, own = shared_and_own([list(range(3015))], k)
    assert own.flat.nbytes - shared.stored.flat.nbytes == (k - 1) * 3015 * 8
    assert num_bytes(own) - num_bytes(shared) == (k - 1) * 3015 * 8 - 8
    assert round((k - 1) * 3015 * 8 / 1024) == kib


def test_the_bytes_saved_follow_the_formula_for_several_prompts_of_unequal_lengths():
    prompts = [[1] * 5, [2] * 700, [3] * 80]
    shared, own = shared_and_own(prompts, 4)
    assert num_bytes(own) - num_bytes(shared) == sum((4 - 1) * len(ids) * 8 - 8 for ids in prompts)


def test_a_process_that_gets_shared_rows_gets_each_prompt_once():
    shared, own = shared_and_own([list(range(3015))], 8)
    sent = pickle.dumps(shared)
    assert_same(pickle.loads(sent), own)
    assert len(pickle.dumps(own)) - len(sent) >= 7 * 3015 * 8 - 2048  # a few names and shapes more
    lists, copies = [list(range(3015))] * 8, [list(range(3015)) for _ in range(8)]
    assert 7 * len(pickle.dumps(lists)) < len(pickle.dumps(copies))


def test_rows_are_shared_by_identity_and_not_by_value():
    assert isinstance(prompt_rows([[1, 2], [1, 2]]), Ragged)
    one = [1, 2]
    assert isinstance(prompt_rows([one, one]), SharedRows)


def test_no_rows_are_plain_rows():
    empty = prompt_rows([])
    assert isinstance(empty, Ragged)
    assert (empty.num_rows, empty.flat.dtype) == (0, torch.int64)
