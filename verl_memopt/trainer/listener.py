"""What a run tells its caller while it goes on, and what the caller may ask of it.

``on_step`` of :func:`verl_memopt.train`, early stopping and TRL's callbacks are listeners. A listener runs in the process of the
loop, between two steps of the workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from verl_memopt.errors import ConfigError

if TYPE_CHECKING:
    from verl_memopt.trainer.step import StepResult
    from verl_memopt.trainer.validate import Validation

Moment = Literal["begin", "step_begin", "step", "logged", "validated", "saved", "end"]
"""In their order: the run is ready; a step begins; it has updated the weights; it is logged, with its validation; held-out rows
were answered; a checkpoint is whole; the run ends."""


@dataclass
class Progress:
    """Where a run is. What a listener sets to True is done after this step."""

    moment: Moment
    step: int
    """The last step that is done; at ``step_begin`` the one that begins."""
    total_steps: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The step's metrics so far, under their names in ``metrics.jsonl``."""
    result: StepResult | None = None
    """Answers and rewards of the step, at ``step``."""
    validation: Validation | None = None
    """Answers and rewards of the held-out rows, at ``validated``."""
    stop: bool = False
    """End the run as if this were its last step."""
    save: bool = False
    """Write a checkpoint."""
    validate: bool = False
    """Answer the held-out rows, if this is set by ``step`` at the latest. What ``on_step`` sets holds for the next step."""


Listener = Callable[[Progress], None]


def at_steps(on_step: Listener) -> Listener:
    """Return the listener that calls a function after each step, when everything about the step is logged.

    The step's own validation has run by then. If the function sets ``progress.validate``, the next step is validated.
    """
    validates_next = False

    def listen(progress: Progress) -> None:
        nonlocal validates_next
        if progress.moment == "step":
            progress.validate = validates_next
        elif progress.moment == "logged":
            on_step(progress)
            validates_next = progress.validate

    return listen


class EarlyStopping:
    """An ``on_step`` that ends a run whose validation no longer gets better.

    Args:
        metric: A metric of the validation, such as ``val-core/openai/gsm8k/reward/mean@1``. More is better; with ``min:`` in
            front, less is.
        patience: Validations without a better value after which the run ends.
        min_delta: A value must be better by more than this.
    """

    def __init__(self, metric: str, patience: int = 3, min_delta: float = 0.0) -> None:
        self.name, self.sign = metric.removeprefix("min:").removeprefix("max:"), -1.0 if metric.startswith("min:") else 1.0
        if patience < 1:
            raise ConfigError(f"patience={patience}: give at least 1.")
        self.patience, self.min_delta = patience, min_delta
        self.best, self.without = -math.inf, 0

    def __call__(self, progress: Progress) -> None:
        if self.name not in progress.metrics:
            if names := [name for name in progress.metrics if name.startswith("val")]:
                raise ConfigError(f"metric={self.name}: the validation has no such metric. It has {', '.join(names)}.")
            return
        value = self.sign * progress.metrics[self.name]
        better = value > self.best + self.min_delta
        self.best, self.without = (value, 0) if better else (self.best, self.without + 1)
        progress.stop |= self.without >= self.patience
