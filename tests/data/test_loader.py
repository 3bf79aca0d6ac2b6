"""Order of the prompts, across epochs and across a resume."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.config.schema import CustomSampler
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.prompts import StepLoader, load_sampler
from verl_memopt.errors import DataError


def rows(count: int) -> Any:
    return [PromptRow(i, str(i), "s", None, {}, f"a:{i + 1}") for i in range(count)]


def take(loader: StepLoader, steps: int) -> list[list[int]]:
    return [[row.index for row in loader.next_step()] for _ in range(steps)]


@given(st.integers(1, 30), st.integers(1, 30), st.booleans(), st.integers(0, 2**31), st.integers(0, 12), st.integers(0, 12))
def test_a_resumed_loader_goes_on_exactly_as_the_uninterrupted_one(
    num_rows: int, batch_size: int, shuffle: bool, seed: int, before: int, after: int
) -> None:
    batch_size = min(batch_size, num_rows)
    whole = take(StepLoader(rows(num_rows), batch_size, shuffle, seed), before + after)
    first = StepLoader(rows(num_rows), batch_size, shuffle, seed)
    take(first, before)
    resumed = StepLoader(rows(num_rows), batch_size, shuffle, seed=seed + 1)
    resumed.load_state_dict(first.state_dict())
    assert take(resumed, after) == whole[before:]


@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(0, 100))
def test_an_epoch_shows_no_row_twice_and_drops_only_what_fills_no_batch(
    num_rows: int, batch_size: int, shuffle: bool, seed: int
) -> None:
    batch_size = min(batch_size, num_rows)
    loader = StepLoader(rows(num_rows), batch_size, shuffle, seed)
    assert loader.steps_per_epoch == num_rows // batch_size
    for epoch in range(2):
        shown = [index for step in take(loader, loader.steps_per_epoch) for index in step]
        assert loader.epoch == epoch
        assert len(set(shown)) == len(shown) == num_rows - num_rows % batch_size


def test_the_seed_decides_the_order_and_every_epoch_has_its_own() -> None:
    first, same, other = (StepLoader(rows(50), 50, True, seed) for seed in (1, 1, 2))
    epochs = take(first, 3)
    assert take(same, 3) == epochs
    assert take(other, 3) != epochs
    assert epochs[0] != epochs[1] != epochs[2]


def test_without_shuffle_the_rows_come_as_they_stand() -> None:
    assert take(StepLoader(rows(5), 2, False, 0), 3) == [[0, 1], [2, 3], [0, 1]]


def test_a_batch_larger_than_the_dataset_is_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match=r"data\.train_batch_size=9: an epoch has only 8 rows"):
        StepLoader(rows(8), 9, True, 0)
    with pytest.raises(DataError, match=r"data\.gen_batch_size=9: an epoch has only 8 rows"):
        StepLoader(rows(8), 9, True, 0, key="data.gen_batch_size")


def test_a_state_of_another_dataset_is_refused_with_both_numbers() -> None:
    state = StepLoader(rows(8), 2, True, 0).state_dict()
    with pytest.raises(DataError, match="written with 8 rows, but there are 9 now"):
        StepLoader(rows(9), 2, True, 0).load_state_dict(state)


def test_a_state_is_plain_integers() -> None:
    loader = StepLoader(rows(8), 3, True, 5)
    take(loader, 3)
    assert loader.state_dict() == {"seed": 5, "epoch": 1, "position": 3, "num_rows": 8}


def test_a_sampler_of_the_users_own_gets_rows_seed_and_epoch(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, num_rows, seed, epoch):\n        self.order = [(i + seed + epoch) % num_rows for i in range(4)]\n"
        "    def __iter__(self):\n        return iter(self.order)\n"
    )
    sampler = load_sampler(CustomSampler(class_path=str(tmp_path / "mine.py"), class_name="Mine"))
    loader = StepLoader(rows(8), 2, True, 1, sampler)
    assert loader.steps_per_epoch == 2
    assert take(loader, 4) == [[1, 2], [3, 4], [2, 3], [4, 5]]
    assert load_sampler(CustomSampler()) is None


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("def __init__(self): pass", r"__init__\(8, 0, 0\) of .*mine\.py raised TypeError: .*"),
        ("def __init__(self, *numbers): raise KeyError('seed')", r"__init__\(8, 0, 0\) .*KeyError: 'seed' in .*mine\.py:2"),
        ("def __init__(self, *numbers): pass", r"__iter__ of .*mine\.py raised TypeError: 'Mine' object is not iterable in .*"),
    ],
)
def test_a_fault_of_a_sampler_is_one_line_with_class_method_and_file(tmp_path: Path, body: str, what: str) -> None:
    (tmp_path / "mine.py").write_text(f"class Mine:\n    {body}\n")
    sampler = load_sampler(CustomSampler(class_path=str(tmp_path / "mine.py"), class_name="Mine"))
    with pytest.raises(DataError, match=rf"^data\.sampler\.class_name=Mine: {what}\. Correct it\.$"):
        StepLoader(rows(8), 2, True, 0, sampler)


@pytest.mark.parametrize("indices", [[0, 8], [-1, 0], [0.0, 1.0], ["0", "1"]])
def test_a_sampler_that_gives_what_is_no_row_is_refused(indices: list[Any]) -> None:
    def sampler(num_rows: int, seed: int, epoch: int) -> Iterable[int]:
        return indices

    with pytest.raises(DataError, match=r"data\.sampler: epoch 0 has an index outside of 0\.\.7"):
        StepLoader(rows(8), 2, True, 0, sampler)
