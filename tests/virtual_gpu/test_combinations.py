"""Rows of knobs that between them hold every pair of values that may be set together, on the first of two ranks."""

import pytest

from tests.end_to_end.covering import covering_rows
from tests.virtual_gpu.life import live, misplaced

ROWS = [row for rows in covering_rows() for row in rows]


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_knobs_together_run_and_rest_where_they_say(number, on_virtual_gpu, folder):
    life = on_virtual_gpu(live, ROWS[number], folder, 2, whole=False)
    assert misplaced(ROWS[number], life) == []
