"""The comparison of packed rows on the virtual GPU. A worker leaves it out there, for fake tensors have no values to compare."""

import pytest

from tests.end_to_end.covering import all_off
from tests.virtual_gpu.life import compare_packed_rows


@pytest.mark.parametrize(("shared", "world_size"), [("off", 1), ("on", 2)])
def test_packed_rows_of_every_model_are_compared_on_the_device(shared, world_size, on_virtual_gpu, folder):
    row = all_off() | {"shared prompt": shared, "batching": "tokens"}
    differences = on_virtual_gpu(compare_packed_rows, row, folder, world_size)
    assert [(each.mixing, each.packing) for each in differences] == [(0, 0)] * 3, "what is read of the device is 0"
