"""Measure a cell: the arm at the shapes that the cell names, or a whole step of this project."""

from __future__ import annotations

import dataclasses

from recipe.rloo.memory_study.arms import WHOLE_RUN
from recipe.rloo.memory_study.measure import measure_arm
from recipe.rloo.memory_study.records import BYTE_TRACKER, DEVICE_ALLOCATOR, Cell, UpdateRecord
from recipe.rloo.memory_study.shapes import SHAPES, Shapes
from recipe.rloo.memory_study.whole_run import measure_whole_run


def measure_cell(cell: Cell) -> list[UpdateRecord]:
    """Return the records of a cell.

    Raises:
        OutOfMemory: The device, or the limit of the cell, had no room.
    """
    shapes = dataclasses.replace(SHAPES[cell.shapes], documents=cell.documents)
    if cell.arm.update == WHOLE_RUN:
        return _whole_run(cell, shapes)
    return measure_arm(cell.arm, shapes, cell.device, cell.limit_bytes, cell.seed)


def _whole_run(cell: Cell, shapes: Shapes) -> list[UpdateRecord]:
    """Return a record for each phase of a whole step. It samples its answers, so it has no ids to compare with other arms."""
    rows = cell.arm.k
    run = measure_whole_run(shapes, rows, cell.seed, cell.device)
    return [
        UpdateRecord(
            update=0,
            phase=memory.name,
            rows=rows,
            prompt_len=shapes.prompt,
            response_len=shapes.response,
            total_tokens=rows * (shapes.prompt + shapes.response),
            dropped_tokens=run.dropped,
            vocab=shapes.model.vocab_size,
            dtype="float32",
            ids_sha256="",
            allocated_enter=memory.allocated_bytes or 0,
            allocated_peak=memory.peak_allocated_bytes or 0,
            allocated_exit=memory.allocated_bytes or 0,
            reserved_peak=memory.peak_reserved_bytes,
            loss=None,
            grad_norm=None,
            seconds=memory.seconds,
            measured_by=BYTE_TRACKER if cell.device == "cpu" else DEVICE_ALLOCATOR,
        )
        for memory in run.phases
    ]
