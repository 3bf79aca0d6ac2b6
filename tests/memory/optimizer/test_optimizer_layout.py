import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.memory.optimizers import SHAPES, parameters
from verl_memopt.distributed.device import leave_process_group, training_mesh
from verl_memopt.memory.bucketed_adamw_torch import BucketedAdamW
from verl_memopt.memory.optimizer_offload_torch import (
    SectionMember,
    aligned,
    count,
    cut_buckets,
    entries,
    local,
    sections,
    shard_place,
)


def members(sizes):
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [SectionMember(torch.empty(0), start, size) for start, size in zip(starts, sizes, strict=True)]


@given(st.lists(st.integers(0, 300), max_size=8), st.sampled_from([1, 32, 64]), st.integers(1, 5))
def test_buckets_walk_every_element_once_in_order_and_none_is_over_its_size(sizes, cut, units):
    own, most = members(sizes), units * cut
    buckets = cut_buckets(own, most, cut)
    walked = [part.member.start + at for bucket in buckets for part in bucket for at in range(part.first, part.last)]
    assert walked == list(range(sum(sizes)))
    assert all(0 < count(bucket) <= most for bucket in buckets)
    assert all(part.first % cut == 0 for bucket in buckets for part in bucket)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.sampled_from([32, 64]), st.integers(2, 5))
def test_all_but_the_last_bucket_are_full_up_to_one_cut(sizes, cut, units):
    for bucket in cut_buckets(members(sizes), units * cut, cut)[:-1]:
        assert count(bucket) > (units - 1) * cut


def test_a_bucket_ends_where_a_parameter_is_left_out():
    own = members([10, 10, 10])
    buckets = cut_buckets([own[0], own[2]], 100, 1)
    assert [[part.member for part in bucket] for bucket in buckets] == [[own[0]], [own[2]]]


def test_parameters_are_in_sections_by_dtype_and_block():
    params = [*parameters(), torch.nn.Parameter(torch.zeros(4, 96, dtype=torch.bfloat16))]
    found = sections([{"params": params}], "int8")
    names = [(section.dtype, section.format.block, [member.numel for member in section.members]) for section in found]
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    assert names == [
        (torch.float32, 96, [sizes[0]]),
        (torch.float32, 70, [sizes[1]]),
        (torch.float32, 1, [sizes[2], sizes[3]]),
        (torch.float32, 128, [sizes[4]]),
        (torch.float32, 160, [sizes[5]]),
        (torch.bfloat16, 96, [384]),
    ]
    assert all(section.cut % section.format.block == 0 and section.cut >= 64 for section in found)


def test_the_entries_of_a_bucket_are_its_blocks():
    section = sections([{"params": parameters()}], "int4")[0]
    bucket = cut_buckets(section.members, 192, section.cut)[1]
    assert entries(section, bucket) == {
        "exp_avg_int4": slice(96, 192),
        "exp_avg_int4_scale": slice(2, 4),
        "exp_avg_sq_int4": slice(96, 192),
        "exp_avg_sq_int4_scale": slice(2, 4),
    }


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_parts_of_the_buffer_begin_at_whole_vectors(size, expected):
    assert aligned(size) == expected


def test_state_is_shown_in_the_shape_of_its_parameter():
    weight = torch.nn.Parameter(torch.zeros(6, 4, 64))
    state = BucketedAdamW([weight], lr=1e-2, state_dtype="int4").state[weight]
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
    assert shapes == {
        "step": ((), torch.float32),
        "exp_avg_int4": ((6, 128), torch.uint8),
        "exp_avg_int4_scale": ((6, 2), torch.float32),
        "exp_avg_sq_int4": ((6, 128), torch.uint8),
        "exp_avg_sq_int4_scale": ((6, 2), torch.float32),
    }


@pytest.fixture
def second_of_two():
    leave_process_group()
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    leave_process_group()


def test_a_shard_shows_its_rows_and_replicas_are_at_one_place(second_of_two):
    places = []
    for size in (1, -1):
        layer = torch.nn.Linear(64, 5, bias=False)
        fully_shard(layer, mesh=training_mesh("cpu", 2, size))
        places.append(shard_place(layer.weight))
    assert places == [(0,), (1,)]
    # On one device a model is sharded or not by how it is computed with, and is rounded alike.
    assert shard_place(torch.nn.Linear(64, 5).weight) == (0,)
    state = BucketedAdamW([layer.weight], lr=1e-2, state_dtype="int8").state[layer.weight]
    assert all(isinstance(value, DTensor) for name, value in state.items() if name != "step")
    shown = {name: (tuple(value.shape), tuple(local(value).shape)) for name, value in state.items()}
    assert shown["exp_avg_int8"] == ((5, 64), (2, 64))
    assert shown["exp_avg_sq_int8_scale"] == ((5, 1), (2, 1))
