"""Every knob alone, through a worker's whole life on the virtual GPU."""

import importlib.util

import pytest

from tests.end_to_end.covering import FOUR_RANKS, all_off, options, pair_row
from tests.virtual_gpu.life import live, misplaced

ALONE = [option for option in options() if pair_row(frozenset([option])) != all_off()]
NEEDS_PACKAGE = {("optimizer", "torchao"): "torchao"}


@pytest.fixture(scope="module")
def plain(on_virtual_gpu, folder):
    return on_virtual_gpu(live, all_off(), folder)


def test_a_run_with_every_knob_off_leaves_nothing_unknown_on_the_device(plain):
    assert misplaced(all_off(), plain) == []


@pytest.mark.parametrize("option", ALONE, ids=" ".join)
def test_a_knob_alone_runs_its_whole_life_and_rests_where_it_says(option, on_virtual_gpu, folder):
    package = NEEDS_PACKAGE.get(option)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    row = pair_row(frozenset([option]))
    life = on_virtual_gpu(live, row, folder, 4 if option in FOUR_RANKS else 1)
    assert misplaced(row, life) == []


def test_an_update_waits_for_the_device_once_for_its_metrics_and_once_for_its_log_probs(plain):
    # Two updates, the second of which gives log-probs as well; the probe of each phase waits around them.
    assert len([op for op in plain.waits if "synchronize" not in op]) == 3
