import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_memopt.models.pack import pack_rows


def test_a_pack_holds_prompts_and_responses_without_their_last_tokens():
    pack = pack_rows(torch.tensor([1, 2, 3]), [2, 1], torch.tensor([7, 8, 9]), [1, 2])
    assert pack.input_ids.tolist() == [[1, 2, 3, 8]]
    assert pack.position_ids.tolist() == [[0, 1, 0, 1]]
    assert pack.lengths == (2, 2)
    assert pack.starts.tolist() == [0, 2, 4]
    assert pack.predicts.tolist() == [1, 2, 3]
    assert pack.targets.tolist() == [7, 8, 9]
    assert pack.row.tolist() == [0, 1, 1]
    assert pack.row_lengths.tolist() == [1, 2]


def test_a_row_without_a_response_costs_no_token_and_keeps_its_place():
    pack = pack_rows(torch.tensor([1, 2, 3]), [2, 1], torch.tensor([8, 9]), [0, 2])
    assert pack.input_ids.tolist() == [[3, 8]]
    assert pack.row.tolist() == [1, 1]
    assert pack.row_lengths.tolist() == [0, 2]


def test_an_empty_micro_batch_is_one_token_that_scores_nothing():
    pack = pack_rows(torch.tensor([], dtype=torch.int64), [], torch.tensor([], dtype=torch.int64), [])
    assert pack.input_ids.shape == (1, 1)
    assert pack.predicts.numel() == pack.targets.numel() == pack.num_rows == 0


def test_packing_depends_on_no_token_value():
    with FakeTensorMode():
        pack = pack_rows(torch.zeros(5, dtype=torch.int64), [2, 3], torch.zeros(3, dtype=torch.int64), [1, 2])
    assert pack.input_ids.shape == (1, 6)
    assert pack.predicts.shape == (3,)
