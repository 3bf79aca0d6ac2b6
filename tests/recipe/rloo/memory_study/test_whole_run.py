import dataclasses

import pytest

from recipe.rloo.memory_study.shapes import PUBLISHED, SMALL
from recipe.rloo.memory_study.whole_run import measure_whole_run

PHASES = ["gen", "old_log_prob", "ref", "update_actor", "update_weights"]


def test_every_phase_of_a_step_is_counted_with_every_model():
    run = measure_whole_run(dataclasses.replace(SMALL, epochs=1), 2)
    assert [memory.name for memory in run.phases] == PHASES
    assert run.dropped == 0
    weights = 2 * 151_669 * 8 * 4  # embedding and head
    policy_reference_engine = 3 * weights
    assert all(memory.peak_allocated_bytes > policy_reference_engine for memory in run.phases)
    assert run.peak_bytes == max(memory.peak_allocated_bytes for memory in run.phases)


@pytest.mark.slow
def test_a_whole_step_with_eight_answers_stays_under_a_gigabyte():
    run = measure_whole_run(PUBLISHED, 8)
    assert run.dropped == 0
    assert run.peak_bytes < 10**9
