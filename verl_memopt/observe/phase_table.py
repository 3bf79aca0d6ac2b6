"""The memory of each phase of one step, as a table and as rows of a file: ``debug.mode=memory``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from verl_memopt.observe.phase import MIB, PhaseMemory

COLUMNS = {
    "enter": "entered_bytes",
    "peak": "peak_allocated_bytes",
    "exit": "allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "host": "host_rss_bytes",
}
"""Header -> figure of a phase. ``enter``, ``peak`` and ``exit`` are live tensors, without a sleeping engine's."""


def phase_rows(step: int, memories: Sequence[PhaseMemory]) -> list[dict[str, Any]]:
    """Return one row per phase: its step, its name, and the bytes of each column; None where the device has no such figure."""
    return [
        {"step": step, "phase": memory.name, **{f"{head}_bytes": getattr(memory, name) for head, name in COLUMNS.items()}}
        for memory in memories
    ]


def memory_table(step: int, memories: Sequence[PhaseMemory]) -> Table:
    """Return the phases of a step in the order in which they began, in MiB. A dash = the device has no such figure."""
    table = Table(title=f"memory of step {step}, MiB", box=box.SIMPLE_HEAD, title_justify="left", show_edge=False)
    table.add_column("phase", overflow="fold")
    for head in COLUMNS:
        table.add_column(head, justify="right", no_wrap=True)
    for memory in memories:
        sizes = [getattr(memory, name) for name in COLUMNS.values()]
        table.add_row(memory.name, *("-" if size is None else f"{size / MIB:,.1f}" for size in sizes))
    return table
