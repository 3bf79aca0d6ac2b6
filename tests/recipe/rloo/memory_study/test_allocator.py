import random

import pytest

from recipe.rloo.memory_study.cells import MIB
from recipe.rloo.memory_study.fake_device import CachingAllocator, NoRoom


def after(*steps):
    """Return an allocator after steps: (key, MiB) allocates, and a key alone frees."""
    allocator = CachingAllocator()
    for step in steps:
        allocator.free(step) if isinstance(step, str) else allocator.allocate(step[0], round(step[1] * MIB))
    return allocator


@pytest.mark.parametrize(
    ("size", "live", "segment"),
    [
        (1, 512, 2 * MIB), (513, 1024, 2 * MIB), (MIB, MIB, 2 * MIB), (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB, 10 * MIB), (11 * MIB + 1, 12 * MIB, 12 * MIB),
    ],
)  # fmt: skip
def test_a_size_is_rounded_up_and_lies_in_a_segment_of_its_kind(size, live, segment):
    allocator = CachingAllocator()
    allocator.allocate("a", size)
    assert (allocator.live, allocator.reserved) == (live, segment)


@pytest.mark.parametrize(
    ("steps", "live", "reserved"),
    [
        ([("a", 100), "a"], 0, 100),  # a freed block stays cached
        ([("a", 100), "a", ("b", 60), ("c", 40)], 100, 100),  # and is taken again
        ([("a", 100), "a", ("b", 200)], 200, 300),  # unless it is too small
        ([("a", 12), "a", ("b", 11)], 12, 12),  # a small remainder is not split off
        ([("a", 60), "a", ("b", 20), ("c", 20), ("d", 20), "b", "d", "c", ("e", 60)], 60, 60),  # free neighbours merge
    ],
)
def test_blocks_are_cached_split_and_merged(steps, live, reserved):
    allocator = after(*steps)
    assert (allocator.live // MIB, allocator.reserved // MIB) == (live, reserved)


def test_the_smallest_block_that_fits_is_taken():
    allocator = after(("a", 300), ("b", 100), ("c", 200), *"abc", ("d", 150))
    allocator.empty_cache()
    assert allocator.reserved == 200 * MIB  # what is left of it is part of a segment in use


def test_emptying_the_cache_returns_segments_from_the_smallest_on():
    allocator = after(("a", 400), ("b", 200), ("c", 30), *"abc")
    allocator.changes.clear()
    allocator.empty_cache()
    assert [held // MIB for _, _, held in allocator.changes] == [600, 400, 0]


def test_the_cache_is_returned_before_a_request_fails():
    allocator = CachingAllocator(limit_bytes=300 * MIB)
    allocator.allocate("a", 200 * MIB)
    allocator.free("a")
    allocator.allocate("b", 300 * MIB)
    with pytest.raises(NoRoom) as refusal:
        allocator.allocate("c", 100 * MIB)
    assert (refusal.value.requested_bytes, refusal.value.held_bytes) == (100 * MIB, 300 * MIB)


def test_a_thousand_random_blocks_leave_nothing_behind():
    draw, allocator, used = random.Random(0), CachingAllocator(), {}
    for key in range(1000):
        size = draw.choice([draw.randrange(1, MIB), draw.randrange(MIB, 50 * MIB)])
        allocator.allocate(key, size)
        used[key] = size
        assert sum(used.values()) <= allocator.live <= allocator.reserved
        if draw.random() < 0.6:
            gone = draw.choice(list(used))
            del used[gone]
            allocator.free(gone)
    for key in used:
        allocator.free(key)
    allocator.empty_cache()
    assert (allocator.live, allocator.reserved) == (0, 0)
