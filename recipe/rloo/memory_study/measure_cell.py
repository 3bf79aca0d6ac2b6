"""Measure a cell: the arm at the shapes that the cell names."""

from __future__ import annotations

import dataclasses

from recipe.rloo.memory_study.measure import measure_arm
from recipe.rloo.memory_study.records import Cell, UpdateRecord
from recipe.rloo.memory_study.shapes import SHAPES


def measure_cell(cell: Cell) -> list[UpdateRecord]:
    """Return the records of a cell.

    Raises:
        OutOfMemory: The device, or the limit of the cell, had no room.
    """
    shapes = dataclasses.replace(SHAPES[cell.shapes], documents=cell.documents)
    return measure_arm(cell.arm, shapes, cell.device, cell.limit_bytes, cell.seed)
