import torch

from recipe.rloo.memory_study.timeline import TimelineTracker, thinned


def points_of(*levels):
    return [(float(place), live, None) for place, live in enumerate(levels)]


def test_every_step_of_a_stair_stays_and_what_repeats_it_goes():
    kept = thinned(points_of(0, 100, 100, 100, 400, 400, 1000, 1000, 0))
    assert [live for _, live, _ in kept] == [0, 100, 400, 1000, 0]


def test_the_highest_level_stays_however_small_its_step_is():
    kept = thinned(points_of(0, 1000, 1001, 1000, 999, 0))
    assert [live for _, live, _ in kept] == [0, 1000, 1001, 0]


def test_a_tracker_notes_every_level_in_order():
    with TimelineTracker() as tracker:
        first = torch.zeros(1000)
        second = torch.zeros(2000)
        del first
        third = torch.zeros(10)
    levels = [live for _, live in tracker.changes]
    assert levels == [4000, 12_000, 8040]
    moments = [moment for moment, _ in tracker.changes]
    assert moments == sorted(moments)
    assert tracker.peaks["device"].bytes == max(levels)
    assert second.numel() + third.numel() == 2010
