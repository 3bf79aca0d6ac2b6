"""Listeners: functions that a run calls while it trains. They read its metrics, and can make it validate, save or stop.

``on_step`` of :func:`verl_memopt.train`, early stopping and TRL's callbacks are listeners. A listener runs in the driver process,
while the workers wait.
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
"""The moments at which a run calls its listener, in order: the run is ready; a step begins; the step has updated the weights; the
step is logged with its validation; held-out rows were answered; a checkpoint is complete; the run ends."""


@dataclass
class Progress:
    """The state of a run. A listener receives it, and may set ``stop``, ``save`` or ``validate`` to True."""

    moment: Moment
    step: int
    """Number of the last finished step; at ``step_begin`` number of the step that begins."""
    total_steps: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The step's metrics so far, under their names in ``metrics.jsonl``."""
    result: StepResult | None = None
    """Answers and rewards of the step. Set only at the moment ``step``."""
    validation: Validation | None = None
    """Answers and rewards of the held-out rows. Set only at the moment ``validated``."""
    stop: bool = False
    """End the run as if this were its last step."""
    save: bool = False
    """Save a checkpoint after this step. Read at the moments ``step``, ``logged`` and ``validated``."""
    validate: bool = False
    """Validate after this step. Read only at the moment ``step``. If ``on_step`` sets it, the next step is validated."""


Listener = Callable[[Progress], None]


def at_steps(on_step: Listener) -> Listener:
    """Return a listener that calls ``on_step`` after each step, when all metrics of the step are logged.

    The validation of the step has already run then. So if ``on_step`` sets ``progress.validate``, the next step is validated.
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
    """Ends a run when a validation metric stops improving. Pass an object of this class as ``on_step``.

    Args:
        metric: Name of a validation metric, such as ``val-core/openai/gsm8k/reward/mean@1``. Higher values are better, unless
            the name begins with ``min:``.
        patience: The run ends after this many validations in a row without a better value.
        min_delta: A value is better only if it improves by more than this.
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
