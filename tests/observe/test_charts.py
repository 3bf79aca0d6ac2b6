"""Charts of every shape of run. What they look like is for eyes; that they show the numbers is for tests."""

import pytest

from verl_memopt.errors import UserError
from verl_memopt.observe.charts import (
    WHOLE_UP_TO,
    draw_charts,
    draw_peaks,
    draw_reward,
    draw_timeline,
    figure,
    running_mean,
    save,
    validation_points,
)

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "run", [{"steps": 1}, {"steps": 3, "validated": False}, {"steps": 2, "counted": False}, {"steps": WHOLE_UP_TO}], ids=str
)
def test_every_shape_of_run_has_its_three_charts(make_run, run):
    folder = make_run(**run)
    paths = draw_charts(folder)
    assert [path.name for path in paths] == ["reward_and_validation.png", "peak_memory_by_phase.png", "memory_timeline.png"]
    assert all(path.read_bytes().startswith(PNG) for path in paths)
    assert not list(folder.path.glob(".*partial"))


def test_a_run_that_has_written_nothing_is_drawn_as_such(tmp_path):
    assert draw_reward([], tmp_path / "a.png").exists()
    assert draw_timeline([], tmp_path / "b.png").exists()
    assert draw_peaks({"phases": {}, "counter": None}, tmp_path / "c.png").exists()


def test_a_running_mean_uses_what_there_is_at_the_beginning():
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_validation_points_are_the_steps_that_were_validated():
    metrics = [{"step": 0, "val-core/toy/acc/mean@1": 0.1}, {"step": 1}, {"step": 2, "val-core/toy/acc/mean@1": 0.5}]
    assert validation_points(metrics) == ([0, 2], [0.1, 0.5])


MIB, GIB = 2**20, 2**30


def test_a_picture_that_the_disk_refuses_is_named(tmp_path):
    with pytest.raises(UserError, match=r"bars\.png: cannot be written \(No such file or directory"):
        save(figure(2, 2), tmp_path / "missing" / "bars.png")
