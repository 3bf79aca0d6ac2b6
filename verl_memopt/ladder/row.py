"""What the ladder records of one row, and the whole ladder as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from verl_memopt.errors import DeviceMemoryError
from verl_memopt.knobs.knob import Claim, knob_named
from verl_memopt.knobs.shapes import Shapes
from verl_memopt.ladder.plan import ALTERNATIVES, Work

HOST = "host buffers"
"""Stands for the bytes in host buffers where a claim names a kind."""

OK = "ok"
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Saving:
    """One saving that a row's knob promises, beside the measured one.

    Attributes:
        phase: Phase of the update.
        kind: Kind of bytes, such as activations.
        formula_bytes: Bytes that the knob's formula gives.
        measured_bytes: None where the row or the one it is compared with ran out of memory.
    """

    phase: str
    kind: str
    formula_bytes: int
    measured_bytes: int | None


@dataclass(frozen=True)
class OutOfMemory:
    """Where a row ran out of device memory. A figure is None where the error does not have it.

    Attributes:
        phase: Phase of the update, or ``init`` while the model was loaded.
        asked_bytes: Size of the allocation that failed.
        held_bytes: Bytes in use at that moment.
        limit_bytes: The limit that the allocation passed.
    """

    phase: str
    asked_bytes: int | None
    held_bytes: int | None
    limit_bytes: int | None

    @classmethod
    def of(cls, error: DeviceMemoryError) -> OutOfMemory:
        """Return the figures of an error. The error itself is not kept: its traceback holds the tensors of the row."""
        return cls(error.phase, error.asked_bytes, error.held_bytes, error.limit_bytes)


@dataclass(frozen=True)
class Row:
    """One measured row of the ladder. A row that ran out of memory has None for every figure of the whole update.

    Attributes:
        knob: That the row switches on.
        overrides: All settings of the row, as ``key=value``.
        phases: Phase -> peak of live tensor bytes on the device, for each phase that ended.
        kinds: Kind -> bytes at the moment of the highest peak.
        peak_device_bytes: The highest peak.
        host_bytes: The most that was in host buffers.
        seconds: Seconds of the whole update.
        loss: Loss of the update.
        grad_norm: Before clipping.
        phase_kinds: Phase -> kind -> the most bytes of that kind. The kinds of a phase peak at different moments.
        savings: Promised and measured.
        base: Knob of the row that this one is compared with.
        out_of_memory: Where the row ran out of memory. None = it fits.
    """

    knob: str
    overrides: tuple[str, ...]
    phases: dict[str, int]
    kinds: dict[str, int] = field(default_factory=dict)
    peak_device_bytes: int | None = None
    host_bytes: int | None = None
    seconds: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    phase_kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    savings: tuple[Saving, ...] = ()
    base: str = ""
    out_of_memory: OutOfMemory | None = None

    @property
    def status(self) -> str:
        """Return ``ok`` or ``out of memory``."""
        return OK if self.out_of_memory is None else OUT_OF_MEMORY


def with_savings(row: Row, base: Row, before: Shapes, after: Shapes) -> Row:
    """Return a row with its savings over ``base``: what the knob's formulas promise and what was measured.

    Args:
        row: The measured row.
        base: The row that it is compared with.
        before: Sizes that the formulas read, under the settings of ``base``.
        after: The same, under the settings of ``row``.
    """
    savings = [
        Saving(
            claim.phase,
            claim.kind,
            formula_bytes=round(claim.num_bytes(before, after)),
            measured_bytes=_measured_bytes(row, base, claim),
        )
        for claim in knob_named(row.knob).claims
    ]
    return replace(row, savings=tuple(savings), base=base.knob)


def _measured_bytes(row: Row, base: Row, claim: Claim) -> int | None:
    if row.out_of_memory or base.out_of_memory:
        return None
    return _peak_of_kind(base, claim) - _peak_of_kind(row, claim)


def _peak_of_kind(row: Row, claim: Claim) -> int:
    return row.phase_kinds[claim.phase].get(claim.kind, 0)


def as_json(rows: Sequence[Row], work: Work, model: str) -> dict[str, Any]:
    """Return a ladder as plain values.

    Key ``rungs`` has the rows of the ablation, from all off to all on; ``branches`` has the alternatives.
    """
    ablation, alternatives = split(rows)
    return {
        "schema": 3,
        "model": model,
        "work": asdict(work),
        "rungs": _plain(ablation),
        "branches": _plain(alternatives),
    }


def _plain(rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [{"knob": row.knob, "status": row.status, **asdict(row)} for row in rows]


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows of the ablation, and the alternatives."""
    return [row for row in rows if row.knob not in ALTERNATIVES], [row for row in rows if row.knob in ALTERNATIVES]
