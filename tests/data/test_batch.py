import pytest
import torch

from verl_memopt.config.schema import Actor
from verl_memopt.data.batch import Ragged, RolloutBatch, rollout_batch, scatter_tokens, shares_prompts


def batch():
    return RolloutBatch(
        prompts=Ragged.from_rows([[1, 2], [3], [4, 5, 6]], torch.int64),
        responses=Ragged.from_rows([[7], [], [8, 9]], torch.int64),
        group=torch.tensor([0, 0, 1]),
        advantages=torch.tensor([0.1, 0.2, 0.3]),
        batch_size=[],
    )


def test_computed_tokens_leave_out_the_last_response_token_and_rows_without_a_response():
    assert batch().row_tokens().each() == [2, 0, 4]


def test_response_row_names_the_row_of_each_response_token():
    assert batch().response_row().tolist() == [0, 2, 2]


def test_select_takes_the_token_fields_along():
    chosen = batch().select([2, 0])
    assert [row.tolist() for row in chosen.responses.rows()] == [[8, 9], [7]]
    assert chosen.group.tolist() == [1, 0]
    torch.testing.assert_close(chosen.advantages, torch.tensor([0.2, 0.3, 0.1]), rtol=0, atol=0)
    assert chosen.old_log_probs is None


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
