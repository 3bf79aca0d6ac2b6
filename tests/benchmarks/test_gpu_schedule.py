"""The simulated schedule of an update against schedules worked out by hand. One kernel of n FLOPs takes n seconds."""

import dataclasses

import pytest

from benchmarks.gpu_cost.schedule import (
    COMPUTE,
    COPIES,
    HOST,
    TO_DEVICE,
    TO_HOST,
    Launch,
    Machine,
    Mark,
    Python,
    Synchronize,
    Wait,
    Work,
    deepened,
    simulate,
)

MACHINE = Machine(
    peak=1.0, bandwidth=1.0, bus=1.0, product_fraction=1.0, attention_fraction=1.0, bandwidth_fraction=1.0, call_seconds=1.0,
    launch_seconds=0.0, replay_seconds=2.0, gap_seconds=0.0, pageable_fraction=0.5,
)  # fmt: skip


def kernel(seconds, lane="main", **more):
    return Launch(lane, COMPUTE, (Work(0, seconds),), **more)


def copy(seconds, lane="side", engine=TO_DEVICE, **more):
    return Launch(lane, engine, (Work(seconds),), **more)


def test_a_copy_on_a_stream_of_its_own_is_hidden_behind_kernels():
    found = simulate([copy(4), copy(3, "other side", TO_HOST), kernel(10)], MACHINE)
    assert (found.wall, found.kernels, found.copies, found.bare_copies) == (10, 10, 4 + 3, 0)


def test_two_copies_of_one_direction_take_turns():
    found = simulate([copy(4), copy(3, "other side")], MACHINE)
    assert found.wall == 7


def test_a_kernel_that_waits_for_a_copy_starts_after_it():
    found = simulate([kernel(1), copy(4), Mark("side", 1), Wait("main", 1), kernel(2, phase="backward")], MACHINE)
    assert found.wall == 4 + 2
    assert found.phases["backward"] == {COMPUTE: 2, COPIES: 3, HOST: 0}
    assert found.bare_copies == 3


def test_an_event_covers_only_what_its_stream_had_before():
    found = simulate([copy(2), Mark("side", 1), copy(5), Wait("main", 1), kernel(1)], MACHINE)
    assert (found.wall, found.phases[""][COPIES]) == (7, 2 + 4)


def test_a_host_that_is_slower_than_the_kernels_sets_the_time():
    found = simulate([Python(3), kernel(1)] * 4, MACHINE)
    assert found.wall == 4 * 3 + 1
    assert found.bound() == HOST
    assert (found.kernels, found.host) == (4, 12)


def test_a_host_that_is_faster_is_hidden_unless_it_waits_for_the_device():
    steps = [Python(1), kernel(3)]
    assert simulate(steps * 4, MACHINE).wall == 1 + 4 * 3
    assert simulate([*steps, Synchronize()] * 4, MACHINE).wall == 4 * (1 + 3)
    # The host waits for one stream, and not for the copy on the other.
    assert simulate([copy(9), kernel(3), Synchronize("main"), Python(1), kernel(3)], MACHINE).wall == 9


def test_a_copy_of_pageable_memory_is_slower_and_the_host_waits_for_it():
    steps = [copy(4, pageable=True, blocks=True), Python(1), kernel(1)]
    assert simulate(steps, MACHINE).wall == 8 + 1 + 1


def test_a_copy_that_is_ready_goes_before_one_that_is_issued_earlier_and_waits():
    late = [kernel(5), Mark("main", 1), Wait("side", 1), copy(2, "side"), copy(4, "other side")]
    assert simulate(late, MACHINE).wall == 7


def test_the_kernels_of_a_graph_cost_the_host_one_replay():
    one, other = ([kernel(1, graph=graph) for _ in range(5)] for graph in (1, 2))
    assert simulate(one, MACHINE).wall == 2 + 5
    # The second is replayed while the first runs.
    assert simulate([*one, *other], MACHINE).wall == 2 + 5 + 5


def test_no_schedule_becomes_slower_on_a_faster_machine():
    queued = [Python(2), copy(3), Mark("side", 1), kernel(4), Wait("main", 1), kernel(2)]
    steps = [*queued, Synchronize("main"), copy(1, engine=TO_HOST)]
    before = simulate(steps * 5, MACHINE).wall
    for name, value in {"peak": 2.0, "bus": 2.0, "call_seconds": 0.5}.items():
        faster = simulate(steps * 5, dataclasses.replace(MACHINE, **{name: value})).wall
        assert faster < before


def test_a_deep_model_takes_the_time_of_its_blocks_though_few_are_counted():
    # The head is bound by the host and the blocks by the device, so that no straight line leads from few blocks to many.
    head, block = [Python(30), kernel(1)], [Python(1, inside=True), kernel(5, inside=True)]

    def model(blocks):
        return [*head, *block * blocks]

    deep = deepened(model(2), model(4), (2, 4), 20, MACHINE)
    assert simulate(deep, MACHINE).wall == pytest.approx(simulate(model(20), MACHINE).wall, rel=0.05)
