"""What a worker answers to a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_memopt.observe.phase import PhaseMemory


@dataclass(frozen=True)
class Reply:
    """The result of a call and its memory.

    Attributes:
        value: The result.
        memory: Memory of the phase.
        budget_bytes: What the process may take of its device. None = there is no limit.
        cap_after_error: Tokens of a micro-batch after the last out-of-memory error that the call survived. None = there was none.
        retries: Number of such errors.
    """

    value: Any
    memory: PhaseMemory
    budget_bytes: int | None = None
    cap_after_error: int | None = None
    retries: int = 0
