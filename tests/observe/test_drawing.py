import pytest

from verl_memopt.errors import UserError
from verl_memopt.observe.charts import KIND_COLOURS, PALETTE, colours, figure, save, size_text, unit_of

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("sizes", "unit"),
    [([], "MiB"), ([None], "MiB"), ([5], "MiB"), ([2 * GIB - 1], "MiB"), ([None, 2 * GIB, 1], "GiB")],
)
def test_the_unit_suits_the_largest_size(sizes, unit):
    assert unit_of(sizes) == ({"MiB": MIB, "GiB": GIB}[unit], unit)


@pytest.mark.parametrize(("size", "text"), [(1234.5, "1,234"), (100, "100"), (12.34, "12.3"), (1, "1.0"), (0.0456, "0.046")])
def test_a_size_has_about_three_figures(size, text):
    assert size_text(size) == text


def test_known_names_keep_their_colour_and_others_take_the_palette_in_order():
    found = colours(["b", "params", "a", "b"], KIND_COLOURS)
    assert found["params"] == KIND_COLOURS["params"]
    assert (found["b"], found["a"]) == PALETTE[:2]


def test_a_chart_is_written_whole_over_the_one_before(tmp_path):
    path = tmp_path / "chart.png"
    path.write_text("old")
    assert save(figure(3, 2), path) == path
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_that_the_disk_refuses_is_named(tmp_path):
    with pytest.raises(UserError, match=r"bars\.png: cannot be written \(No such file or directory"):
        save(figure(2, 2), tmp_path / "missing" / "bars.png")
