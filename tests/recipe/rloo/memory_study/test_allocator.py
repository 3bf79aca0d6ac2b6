import random

import pytest

from recipe.rloo.memory_study.cells import MIB
from recipe.rloo.memory_study.fake_device import CachingAllocator, NoRoom


def test_a_size_is_rounded_up_to_512_bytes():
    allocator = CachingAllocator()
    allocator.allocate("a", 1)
    assert (allocator.live, allocator.reserved) == (512, 2 * MIB)
    allocator.allocate("b", 513)
    assert (allocator.live, allocator.reserved) == (512 + 1024, 2 * MIB)


@pytest.mark.parametrize(
    ("size", "segment"),
    [(MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB), (11 * MIB + 1, 12 * MIB)],
)
def test_a_segment_has_the_size_that_its_request_calls_for(size, segment):
    allocator = CachingAllocator()
    allocator.allocate("a", size)
    assert allocator.reserved == segment


def test_a_freed_block_stays_cached_and_is_taken_again():
    allocator = CachingAllocator()
    allocator.allocate("a", 100 * MIB)
    allocator.free("a")
    assert (allocator.live, allocator.reserved) == (0, 100 * MIB)
    allocator.allocate("b", 60 * MIB)
    allocator.allocate("c", 40 * MIB)
    assert (allocator.live, allocator.reserved) == (100 * MIB, 100 * MIB)


def test_a_cached_block_that_is_too_small_is_of_no_use():
    allocator = CachingAllocator()
    allocator.allocate("bf16", 100 * MIB)
    allocator.free("bf16")
    allocator.allocate("fp32", 200 * MIB)
    assert (allocator.live, allocator.reserved) == (200 * MIB, 300 * MIB)


def test_the_smallest_block_that_fits_is_taken():
    allocator = CachingAllocator()
    for key, size in (("a", 300), ("b", 100), ("c", 200)):
        allocator.allocate(key, size * MIB)
    for key in "abc":
        allocator.free(key)
    allocator.allocate("d", 150 * MIB)
    allocator.empty_cache()
    assert allocator.reserved == 200 * MIB  # what is left of it is part of a segment in use


def test_a_small_remainder_of_a_large_block_is_not_split_off():
    allocator = CachingAllocator()
    allocator.allocate("a", 12 * MIB)
    allocator.free("a")
    allocator.allocate("b", 11 * MIB)
    assert allocator.live == 12 * MIB


def test_free_neighbours_merge():
    allocator = CachingAllocator()
    allocator.allocate("whole", 60 * MIB)
    allocator.free("whole")
    for key in "abc":
        allocator.allocate(key, 20 * MIB)
    for key in "acb":
        allocator.free(key)
    allocator.allocate("whole again", 60 * MIB)
    assert allocator.reserved == 60 * MIB


def test_emptying_the_cache_returns_segments_from_the_smallest_on():
    allocator = CachingAllocator()
    for key, size in (("a", 400), ("b", 200), ("c", 30)):
        allocator.allocate(key, size * MIB)
    for key in "abc":
        allocator.free(key)
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
