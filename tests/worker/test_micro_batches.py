import dataclasses

import torch

from tests.worker.test_policy import batch
from verl_memopt.worker.trained_model import micro_batch


def test_a_micro_batch_holds_the_fields_of_its_rows_in_order():
    whole = batch(rows=4)
    whole.selected = whole.advantages > 0
    micro = micro_batch(whole, [3, 1])
    sizes = whole.responses.sizes()
    assert micro.pack.row_lengths.tolist() == [sizes[3], sizes[1]]
    for name in ("old_log_probs", "ref_log_probs", "advantages", "selected"):
        rows = getattr(whole, name).split(sizes)
        assert torch.equal(getattr(micro, name), torch.cat([rows[3], rows[1]]))


def test_a_micro_batch_moves_with_what_it_has():
    whole = batch(rows=2)
    whole.ref_log_probs = None
    whole.selected = whole.advantages > 0
    moved = micro_batch(whole, [0, 1]).to(torch.device("meta"))
    assert moved.ref_log_probs is None
    fields = [getattr(moved.pack, field.name) for field in dataclasses.fields(moved.pack)]
    assert {
        tensor.device.type for tensor in [*fields, moved.old_log_probs, moved.selected] if isinstance(tensor, torch.Tensor)
    } == {"meta"}
