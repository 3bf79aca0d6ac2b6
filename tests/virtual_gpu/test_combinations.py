"""Rows of knobs that between them hold every pair of values that may be set together; lossy ones are run by `make proofs`."""

import pytest

from tests.end_to_end.covering import covering_rows
from tests.virtual_gpu.life import live, misplaced

EXACT, OTHERS = covering_rows()


@pytest.mark.parametrize("number", range(len(EXACT)))
def test_knobs_together_on_the_first_of_two_ranks_run_and_rest_where_they_say(number, on_virtual_gpu, folder):
    life = on_virtual_gpu(live, EXACT[number], folder, 2, whole=False)
    assert misplaced(EXACT[number], life) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_lossy_knobs_together_run_and_rest_where_they_say(number, on_virtual_gpu, folder):
    life = on_virtual_gpu(live, OTHERS[number], folder, whole=False)
    assert misplaced(OTHERS[number], life) == []
