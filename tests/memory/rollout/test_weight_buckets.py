import math
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from tests.memory import sharded as sharded_tests
from tests.ranks import run_ranks
from tests.rollout.tools import place_at
from verl_memopt.config.schema import Rollout
from verl_memopt.distributed.device import training_mesh
from verl_memopt.memory.weight_buckets_torch import MIB, WeightSlice, _Bucket, joined, weight_slices
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.byte_tracker import ByteTracker
from verl_memopt.rollout.hf_engine import HfEngine

WHOLE = {
    "wide": torch.randn(700, 1001, generator=torch.Generator().manual_seed(0)),
    "odd": torch.arange(15.0).view(5, 3) / 7,
    "one": torch.arange(4.0).view(1, 4) / 7,
    "vector": torch.arange(7.0) / 7,
    "deep": torch.randn(50, 30, 401, generator=torch.Generator().manual_seed(1)),
}
"""Two tensors of 2.7 and 2.3 MiB in fp32, and small ones that divide by no number of ranks."""


@pytest.fixture
def fake_ranks():
    """Gives a function that joins a fake world of some ranks; collectives do nothing, bytes are real."""

    def join(ranks):
        return stack.enter_context(sharded_tests.fake_ranks(ranks))

    with ExitStack() as stack:
        yield join


def sharded(mesh):
    return ((name, distribute_tensor(tensor, mesh, [Shard(0)])) for name, tensor in WHOLE.items())


def differences(stream, dtype):
    """Gives the names whose rows did not arrive once each and bit-equal, and the most bytes of a slice."""
    found = {name: torch.full(tensor.shape, math.nan, dtype=dtype) for name, tensor in WHOLE.items()}
    most = 0
    for part in stream:
        assert found[part.name][part.start : part.stop].isnan().all()
        found[part.name][part.start : part.stop] = part.tensor
        most = max(most, part.tensor.numel() * part.tensor.itemsize)
    return [name for name in WHOLE if not torch.equal(found[name], WHOLE[name].to(dtype))], most


def arrivals(rank, folder, buckets):
    """Gives what each stream got wrong and its largest slice, and whether an engine then holds the bits of its own stream."""
    mesh = training_mesh("cpu", 2, -1)
    found = {
        (dtype, bucket): differences(weight_slices(sharded(mesh), dtype, bucket), dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for bucket in buckets
    }
    engine = engine_of(folder, "fp32")
    torch.manual_seed(0)
    whole = {name: torch.randn(parameter.shape) for name, parameter in engine._model.named_parameters()}
    weights = ((name, distribute_tensor(tensor, mesh, [Shard(0)])) for name, tensor in whole.items())
    engine.load_weights(weight_slices(weights, torch.float32, 1))
    return found, all(torch.equal(parameter, whole[name]) for name, parameter in engine._model.named_parameters())


def test_two_ranks_get_every_row_once_and_bit_equal_whatever_the_bucket_and_so_does_an_engine(tmp_path):
    folder = make_tiny_model(tmp_path / "wide", TinyShape(vocab_size=6001))
    for found, engine_is_equal in run_ranks(arrivals, 2, folder, [1, 2, 3, 2048]):
        assert engine_is_equal
        for (_, bucket), (wrong, most) in found.items():
            assert wrong == []
            assert most <= bucket * MIB / 3


def test_one_rank_gets_views_of_its_own_tensors(one_rank):
    weights = dict(sharded(one_rank))
    for part in weight_slices(weights.items(), torch.bfloat16, 1):
        assert part.whole
        assert part.tensor.data_ptr() == weights[part.name].to_local().data_ptr()


def test_plain_tensors_keep_their_place_among_sharded_ones(fake_ranks):
    weights = list(sharded(fake_ranks(2)))
    weights.insert(2, ("plain", torch.ones(3)))
    names = list(dict.fromkeys(part.name for part in weight_slices(weights, torch.float32, 1)))
    assert names == [name for name, _ in weights]


@pytest.fixture
def sent(monkeypatch):
    """What this rank sends."""
    found, gather = [], dist.all_gather_into_tensor
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda out, own, **group: (found.append(own), gather(out, own, **group)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_sent_is_cast_before_it_is_gathered(fake_ranks, sent, ranks, dtype):
    list(weight_slices(sharded(fake_ranks(ranks)), dtype, 1))
    assert {own.dtype for own in sent} == {dtype}
    rows = {name: -(-tensor.shape[0] // ranks) * math.prod(tensor.shape[1:]) for name, tensor in WHOLE.items()}
    assert sum(own.numel() for own in sent) == sum(rows.values())
    assert all((ranks + 1) * own.numel() * dtype.itemsize <= MIB for own in sent)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sync_holds_one_bucket_beside_the_two_models_however_slow_the_receiver(fake_ranks, ranks):
    weights = list(sharded(fake_ranks(ranks)))
    with ByteTracker() as tracker:
        tracker.mark("params", (tensor for _, tensor in weights))
        before = tracker.total()
        tracker.enter("sync")
        held = None
        for part in weight_slices(weights, torch.bfloat16, 1):
            held = part.tensor
        assert held is not None
        peak = tracker.peaks["device"]
    # The buffer has room for as many elements of every rank and of the one that is sent as go into it.
    assert MIB - (ranks + 1) * 2 < peak.bytes - before <= MIB
    assert set(peak.kinds) == {"params", "sync bucket"}


@pytest.mark.parametrize(("limit", "lengths"), [(24, [8, 8]), (23, [4, 4, 4, 4]), (12, [4, 4, 4, 4]), (36, [12, 4])])
def test_rows_that_fill_a_bucket_to_the_last_element_are_sent_together_and_one_element_less_is_not_enough(
    fake_ranks, sent, limit, lengths
):
    """Two ranks hold two rows of four elements of each of two tensors; the limit is for both ranks' rows and the own ones."""
    mesh = fake_ranks(2)
    bucket = _Bucket(mesh.get_group(), 2, torch.float32, limit)
    for name in ("a", "b"):
        list(bucket.add(name, distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])))
    list(bucket.flush())
    assert [own.numel() for own in sent] == lengths


def test_a_model_smaller_than_the_bucket_takes_its_own_size(fake_ranks):
    weights = list(sharded(fake_ranks(2)))
    elements = sum(-(-tensor.shape[0] // 2) * math.prod(tensor.shape[1:]) for tensor in WHOLE.values())
    with ByteTracker() as tracker:
        tracker.mark("params", (tensor for _, tensor in weights))
        tracker.enter("sync")
        before = tracker.total()
        list(weight_slices(weights, torch.bfloat16, 2048))
        assert tracker.peaks["device"].bytes - before == 3 * elements * 2


def test_joining_slices_gives_whole_tensors_in_order():
    slices = [
        WeightSlice("a", torch.Size([4]), 2, torch.tensor([3.0, 4.0])),
        WeightSlice("a", torch.Size([4]), 0, torch.tensor([1.0, 2.0])),
        WeightSlice("b", torch.Size([1]), 0, torch.tensor([5.0])),
    ]
    assert {name: tensor.tolist() for name, tensor in joined(slices, torch.float32)} == {"a": [1, 2, 3, 4], "b": [5]}


def engine_of(folder, dtype="bfloat16"):
    rollout = Rollout(name="hf", prompt_length=8, response_length=8, dtype=dtype)
    return HfEngine(rollout, place_at(folder))
