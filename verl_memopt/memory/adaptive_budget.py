"""A token budget that learns from the peaks that it causes, below the cap that the user set.

After each pass the next cap is ``cap x min(1.25, 0.95 x budget / peak)``. ``budget`` is what the process may take of the device,
``peak`` is what the pass took at most. A peak is ``a + b x cap`` bytes: a part that does not depend on the cap, and a part that
does. So one step multiplies the distance to the fixed point by ``a / (a + b x cap)``, which lies between 0 and 1, and the cap
approaches it from one side.

Bytes saved: those by which a pass would exceed the budget. The result does not change, since losses are divided by global counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GROWTH = 1.25
"""Most that a cap grows from one pass to the next."""
HEAD_ROOM = 0.95
"""Share of the budget that a pass may take."""


@dataclass(frozen=True)
class PassFigures:
    """What a pass took of the devices, over all ranks."""

    peak_bytes: int | None = None
    """Largest peak of live tensors. None = it was not measured."""
    budget_bytes: int | None = None
    """Least that a process may take of its device. None = there is no limit to compare with."""
    cap_after_error: int | None = None
    """Lowest cap to which a rank went down after out-of-memory errors. None = there was none."""
    retries: int = 0
    """Out-of-memory errors after which the pass went on, summed over ranks."""


@dataclass
class LearnedBudget:
    """The cap of one pass. The driver has it and cuts the micro-batches of all ranks by it, so they always agree."""

    maximum: int
    """The cap of the settings: the first cap, and the largest."""
    cap: int = 0
    """Tokens of a micro-batch in the next pass. A longer row goes alone."""
    retries: int = 0
    """Out-of-memory errors since the metrics were last read."""
    too_high: tuple[int, int] | None = None
    """(tokens, peak) of the pass before the cap was last lowered. None = the last peak was within the budget."""

    def __post_init__(self) -> None:
        """Start at the maximum."""
        self.cap = self.cap or self.maximum

    def tokens(self, longest: int) -> int:
        """Return the limit for rows of which the longest has ``longest`` tokens: the cap, but room for that row.

        The maximum is hard: a row beyond it is refused where rows are packed.
        """
        return min(max(self.cap, longest), self.maximum)

    def learn(self, fullest: int, figures: PassFigures) -> None:
        """Choose the cap of the next pass.

        A pass that did not fill its micro-batches says little about larger ones. So a cap never grows beyond what the fullest
        micro-batch supports, and a peak over the budget lowers the cap from the fullest micro-batch. A peak that smaller
        micro-batches left as it was is not theirs (the optimizer step may have it), and lowers nothing more. ``fullest`` is in
        tokens.
        """
        self.retries += figures.retries
        if figures.cap_after_error is not None:
            # The ranks have already gone on with this cap. The peak of a pass that failed says nothing about a fitting one.
            self.cap = min(self.cap, figures.cap_after_error)
            return
        if not figures.peak_bytes or figures.budget_bytes is None or not fullest:
            return
        ratio = min(GROWTH, HEAD_ROOM * figures.budget_bytes / figures.peak_bytes)
        target = max(int(fullest * ratio), 1)
        if ratio >= 1:
            self.too_high = None
            self.cap = min(max(self.cap, target), self.maximum)
        elif self.too_high is None or fullest >= self.too_high[0] or figures.peak_bytes < self.too_high[1]:
            self.too_high = fullest, figures.peak_bytes
            self.cap = min(self.cap, target)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"cap": self.cap, "too_high": self.too_high}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned. The maximum of the settings holds."""
        self.cap, self.too_high = min(state["cap"], self.maximum), state["too_high"]


def budget_metrics(budgets: Mapping[str, LearnedBudget]) -> dict[str, float]:
    """Return ``perf/token_budget/PHASE`` and ``perf/token_budget/PHASE_retries`` of each phase, and count retries anew."""
    metrics: dict[str, float] = {}
    for phase, budget in budgets.items():
        metrics[f"perf/token_budget/{phase}"] = float(budget.cap)
        metrics[f"perf/token_budget/{phase}_retries"] = float(budget.retries)
        budget.retries = 0
    return metrics
