import pytest

from verl_memopt.errors import UserError
from verl_memopt.observe.drawing import (
    KIND_COLOURS,
    PALETTE,
    colours,
    counted_by,
    figure,
    note,
    save,
    size_text,
    style,
    unit_of,
    whole_steps,
)

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


def test_more_names_than_colours_begin_the_palette_again():
    names = [str(number) for number in range(len(PALETTE) + 1)]
    assert colours(names, {})[names[-1]] == PALETTE[0]


def test_colours_of_a_chart_are_all_different():
    assert len(set(PALETTE)) == len(PALETTE)
    assert len(set(KIND_COLOURS.values())) == len(KIND_COLOURS)


def test_a_chart_says_who_counted_its_bytes():
    assert counted_by("allocator") == "live tensor bytes (allocator)"
    assert counted_by(None) == counted_by("") == "live tensor bytes"


def test_axes_get_their_words_and_a_step_axis_whole_numbers():
    axes = figure(3, 2).add_subplot()
    style(axes, "Title", "x words", "y words")
    whole_steps(axes)
    axes.set_xlim(0, 3)
    assert (axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()) == ("Title", "x words", "y words")
    assert all(tick == int(tick) for tick in axes.get_xticks())


def test_axes_with_nothing_to_show_say_so():
    axes = figure(3, 2).add_subplot()
    note(axes, "Nothing yet.")
    assert [text.get_text() for text in axes.texts] == ["Nothing yet."]
    assert list(axes.get_xticks()) == []


def test_a_chart_is_written_whole_over_the_one_before(tmp_path):
    path = tmp_path / "chart.png"
    path.write_text("old")
    assert save(figure(3, 2), path) == path
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_that_the_disk_refuses_is_named(tmp_path):
    with pytest.raises(UserError, match=r"bars\.png: cannot be written \(No such file or directory"):
        save(figure(2, 2), tmp_path / "missing" / "bars.png")
