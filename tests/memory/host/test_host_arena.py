import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.memory.host_buffers import HostArena
from verl_memopt.observe.byte_tracker import DEVICE, HOST, ByteTracker

CPU = torch.device("cpu")
CHUNK = 4096


def arena():
    return HostArena(CPU, "activations", CHUNK)


def test_what_is_written_to_a_slot_is_read_from_it_also_across_chunks():
    home = arena()
    values = [torch.randint(256, (size,), dtype=torch.uint8) for size in (100, 3 * CHUNK, 5000, 1)]
    slots = [home.take(value.numel()) for value in values]
    assert [len(slot.parts) for slot in slots] == [1, 4, 2, 1]
    for slot, value in zip(slots, values, strict=True):
        for part, piece in zip(slot.parts, value.split([part.numel() for part in slot.parts]), strict=True):
            part.copy_(piece)
    for slot, value in zip(slots, values, strict=True):
        assert torch.equal(torch.cat(slot.parts), value)


@given(st.lists(st.tuples(st.integers(1, 3 * CHUNK), st.booleans()), max_size=30))
def test_slots_in_use_never_overlap(actions):
    home, slots = arena(), []
    for size, returns_one in actions:
        slots.append(home.take(size))
        if returns_one:
            home.give_back(slots.pop(size % len(slots)))
        taken = sorted((slot.start, slot.stop) for slot in slots)
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(taken))
        assert all(sum(part.numel() for part in slot.parts) <= slot.stop - slot.start for slot in slots)


def test_bytes_held_are_those_of_the_busiest_moment_rounded_up_to_a_chunk():
    home = arena()
    for sizes in ([1000, 3000, 9000], [9000, 3000], [13000], [512] * 25):
        slots = [home.take(size) for size in sizes]
        for slot in reversed(slots):
            home.give_back(slot)
        assert home.held_bytes == 4 * CHUNK  # 1,024 + 3,072 + 9,216 bytes
        assert home.used_bytes == 0


def test_shrinking_keeps_what_is_in_use():
    home = arena()
    first, second = home.take(CHUNK), home.take(2 * CHUNK)
    home.give_back(second)
    home.shrink()
    assert home.held_bytes == CHUNK
    home.give_back(first)
    home.shrink()
    assert home.held_bytes == 0


def test_its_bytes_are_of_the_host_tier():
    with ByteTracker() as tracker:
        home = arena()
        slot = home.take(CHUNK + 1)
        assert (tracker.kinds(HOST), tracker.total(DEVICE)) == ({"activations": 2 * CHUNK}, 0)
        home.give_back(slot)
        home.shrink()
        del slot
        assert tracker.total(HOST) == 0
