"""What the ladder records of one rung, and the whole ladder as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from verl_memopt.errors import DeviceMemoryError
from verl_memopt.knobs.index import knob_named
from verl_memopt.knobs.knob import Claim
from verl_memopt.knobs.shapes import Shapes
from verl_memopt.ladder.plan import BRANCHES, Work

HOST = "host buffers"
"""Stands for the bytes in host buffers where a claim names a kind."""

OK = "ok"
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Saving:
    """One claim of a rung's knob beside what was measured, in bytes.

    measured_bytes: None where the rung or the rung below it ran out of memory, so that nothing can be compared.
    """

    phase: str
    kind: str
    formula_bytes: int
    measured_bytes: int | None


@dataclass(frozen=True)
class OutOfMemory:
    """Where a rung ran out of device memory. Bytes; None for a figure that the error does not have.

    phase: the phase of the update, ``init`` for loading the model. asked_bytes: size of the allocation that was refused.
    held_bytes: bytes held at that moment. limit_bytes: the limit that was passed.
    """

    phase: str
    asked_bytes: int | None
    held_bytes: int | None
    limit_bytes: int | None

    @classmethod
    def of(cls, error: DeviceMemoryError) -> OutOfMemory:
        """Return the figures of an error. Nothing here keeps the error, whose traceback holds the tensors of the rung."""
        return cls(error.phase, error.asked_bytes, error.held_bytes, error.limit_bytes)


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder. Bytes are peaks of live tensors on the device, and the most that lay in host buffers.

    A rung that ran out of memory has the peaks of the phases that ended before, and None for every figure of the whole.
    kinds: at the moment of the peak. phase_kinds: the most each kind held in each phase; the moments differ.
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
    """The rung below."""
    out_of_memory: OutOfMemory | None = None

    @property
    def status(self) -> str:
        """Return ``ok`` or ``out of memory``."""
        return OK if self.out_of_memory is None else OUT_OF_MEMORY


def with_savings(rung: Rung, base: Rung, before: Shapes, after: Shapes) -> Rung:
    """Return a rung with what its knob's formula says it saves on its base, beside what it does."""
    savings = [
        Saving(
            claim.phase,
            claim.kind,
            formula_bytes=round(claim.num_bytes(before, after)),
            measured_bytes=_measured(rung, base, claim),
        )
        for claim in knob_named(rung.knob).claims
    ]
    return replace(rung, savings=tuple(savings), base=base.knob)


def _measured(rung: Rung, base: Rung, claim: Claim) -> int | None:
    if rung.out_of_memory or base.out_of_memory:
        return None
    return _held(base, claim) - _held(rung, claim)


def _held(rung: Rung, claim: Claim) -> int:
    return rung.phase_kinds[claim.phase].get(claim.kind, 0)


def as_json(rungs: Sequence[Rung], work: Work, model: str) -> dict[str, Any]:
    """Return a ladder as plain values: ``rungs`` first all off, last all on; ``branches``, each beside the rung ``base``."""
    climbed, branches = split(rungs)
    return {
        "schema": 3,
        "model": model,
        "work": asdict(work),
        "rungs": _plain(climbed),
        "branches": _plain(branches),
    }


def _plain(rungs: Iterable[Rung]) -> list[dict[str, Any]]:
    return [{"knob": rung.knob, "status": rung.status, **asdict(rung)} for rung in rungs]


def split(rungs: Sequence[Rung]) -> tuple[list[Rung], list[Rung]]:
    """Return the rungs of the climb, and the branches."""
    return [rung for rung in rungs if rung.knob not in BRANCHES], [rung for rung in rungs if rung.knob in BRANCHES]
