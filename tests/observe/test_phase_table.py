"""The table of ``debug.mode=memory``."""

from verl_memopt.observe.console import phase_rows
from verl_memopt.observe.phase import MIB, PhaseMemory, combine

TRACKED = PhaseMemory("update_actor", 1.0, 5 * MIB, 3 * MIB, None, None, 70 * MIB, entered_bytes=2 * MIB)
ON_GPU = PhaseMemory("gen", 1.0, 9 * MIB, 4 * MIB, 16 * MIB, 20 * MIB, 80 * MIB, entered_bytes=MIB)
UNTRACKED = PhaseMemory("old_log_prob", 1.0, None, None, None, None, 60 * MIB)


def test_a_row_has_the_bytes_at_both_ends_the_peak_and_the_host():
    assert phase_rows(7, [TRACKED, UNTRACKED]) == [
        {
            "step": 7, "phase": "update_actor", "enter_bytes": 2 * MIB, "peak_bytes": 5 * MIB, "exit_bytes": 3 * MIB,
            "reserved_bytes": None, "host_bytes": 70 * MIB,
        },
        {
            "step": 7, "phase": "old_log_prob", "enter_bytes": None, "peak_bytes": None, "exit_bytes": None,
            "reserved_bytes": None, "host_bytes": 60 * MIB,
        },
    ]  # fmt: skip


def test_of_several_processes_the_fullest_counts():
    other = PhaseMemory("gen", 1.0, 9 * MIB, 4 * MIB, 16 * MIB, 20 * MIB, 80 * MIB, entered_bytes=6 * MIB)
    assert combine([ON_GPU, other]).entered_bytes == 6 * MIB
