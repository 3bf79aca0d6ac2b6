"""The controls of the comparison: equal ids, equal losses and gradient norms, and equal bytes between repeats.

A comparison of memory means something only where the arms computed the same thing. A cell that did not gets the outcome
``diverged``, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from recipe.rloo.memory_study.arms import LEGACY
from recipe.rloo.memory_study.records import COMPLETED, DEVICE_ALLOCATOR, DIVERGED, THIS_RUN, CellResult, Failure, UpdateRecord

FP32_TOLERANCE, BF16_TOLERANCE = 1e-5, 1e-2
"""Largest relative difference of losses and of gradient norms between arms with equal ids."""


@dataclass
class Controls:
    """What the controls found over all completed cells."""

    ids_groups: int = 0
    """Sets of updates that must have had the same ids: one for each group size, prompt handling and update."""
    values_groups: int = 0
    """Sets of cells whose losses and gradient norms were compared."""
    loss_error: float = 0.0
    """Largest relative difference of a loss from that of the first cell of its set."""
    grad_norm_error: float = 0.0
    """The same of gradient norms."""
    diverged: dict[str, str] = field(default_factory=dict)
    """Name of each cell that diverged, and why."""


def check(results: Sequence[CellResult]) -> tuple[list[CellResult], Controls]:
    """Compare the completed cells, and return all results with the outcome ``diverged`` where it applies, and the figures.

    The token-level arm with the published update is the first of each set. The others are compared with it.
    """
    controls = Controls()
    order = [result for result in results if result.outcome == COMPLETED]
    order.sort(key=lambda result: (result.cell.arm.update != LEGACY, result.cell.arm.expansion != "token", result.cell.name))
    _check_ids(order, controls)
    _check_values(order, controls)
    _check_repeats(order, controls)
    checked = [_diverged(result, controls.diverged.get(result.cell.name)) for result in results]
    return checked, controls


def _diverged(result: CellResult, reason: str | None) -> CellResult:
    if reason is None:
        return result
    return dataclasses.replace(result, outcome=DIVERGED, failure=Failure("Diverged", reason))


def _check_ids(results: Iterable[CellResult], controls: Controls) -> None:
    """Compare the ids of every update over all cells with the same prompts: whatever the expansion, the update, the repeat."""
    expected: dict[tuple[object, ...], tuple[str, str]] = {}
    for result in results:
        cell = result.cell
        for record in result.records:
            if not record.ids_sha256:
                continue
            key = (cell.arm.k, cell.arm.prompt, cell.seed, cell.shapes, record.update)
            first, name = expected.setdefault(key, (record.ids_sha256, cell.name))
            if record.ids_sha256 != first:
                reason = f"update {record.update}: ids {record.ids_sha256[:12]}, but {first[:12]} in {name}"
                controls.diverged.setdefault(cell.name, reason)
    controls.ids_groups = len(expected)


def _check_values(results: Iterable[CellResult], controls: Controls) -> None:
    """Compare loss and gradient norm of each update between the cells that had the same ids."""
    expected: dict[tuple[object, ...], tuple[UpdateRecord, str]] = {}
    for result in results:
        for record in {record.update: record for record in result.records if record.ids_sha256}.values():
            run = record.values_from.split(", ", 1)[-1]  # without its dtype
            key = (record.ids_sha256, record.update, result.cell.seed, run)
            first, name = expected.setdefault(key, (record, result.cell.name))
            loss, norm = _difference(record.loss, first.loss), _difference(record.grad_norm, first.grad_norm)
            controls.loss_error = max(controls.loss_error, loss)
            controls.grad_norm_error = max(controls.grad_norm_error, norm)
            if max(loss, norm) > tolerance(record, first):
                controls.diverged.setdefault(
                    result.cell.name,
                    f"update {record.update}: loss {record.loss}, gradient norm {record.grad_norm}, but {first.loss}, "
                    f"{first.grad_norm} in {name}",
                )
    controls.values_groups = len(expected)


def tolerance(first: UpdateRecord, second: UpdateRecord) -> float:
    """Return how far the values of two records may differ, relative to the second.

    Values that another run gave have the precision of that run, which ``values_from`` names.
    """
    precisions = (record.dtype if record.values_from == THIS_RUN else record.values_from for record in (first, second))
    return BF16_TOLERANCE if any("bfloat16" in precision for precision in precisions) else FP32_TOLERANCE


def _difference(value: float | None, expected: float | None) -> float:
    """Return the difference relative to the expected value: 0 where neither was measured, infinite where one was not."""
    if value is None or expected is None:
        return 0.0 if value is expected else float("inf")
    return 0.0 if value == expected else abs(value - expected) / max(abs(expected), 1e-30)


def _check_repeats(results: Iterable[CellResult], controls: Controls) -> None:
    """Compare the peaks of repeats. A tracker and a simulation count the same bytes each time; a real device need not."""
    peaks: dict[tuple[object, ...], tuple[list[int], str]] = {}
    for result in results:
        if not result.records or result.records[0].measured_by == DEVICE_ALLOCATOR:
            continue
        cell = result.cell
        key = (dataclasses.astuple(cell.arm), cell.seed, cell.shapes, cell.limit_bytes)
        figures = [record.allocated_peak for record in result.records]
        first, name = peaks.setdefault(key, (figures, cell.name))
        if figures != first:
            controls.diverged.setdefault(cell.name, f"its peaks are not those of {name}, though nothing but the repeat differs")
