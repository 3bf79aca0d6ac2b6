import pytest

from verl_memopt.errors import UserError
from verl_memopt.observe.charts import figure, save

MIB, GIB = 2**20, 2**30


def test_a_chart_is_written_whole_over_the_one_before(tmp_path):
    path = tmp_path / "chart.png"
    path.write_text("old")
    assert save(figure(3, 2), path) == path
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_that_the_disk_refuses_is_named(tmp_path):
    with pytest.raises(UserError, match=r"bars\.png: cannot be written \(No such file or directory"):
        save(figure(2, 2), tmp_path / "missing" / "bars.png")
