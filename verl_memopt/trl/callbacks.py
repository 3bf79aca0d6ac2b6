"""Transformers' callbacks in this training loop. A listener calls their events, and keeps the log history under TRL's names."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from verl_memopt.data.plugin import users_code
from verl_memopt.errors import ConfigError
from verl_memopt.trainer.listener import Listener, Progress
from verl_memopt.trl.logs import RewardNames, answer_log, evaluation_log, scored_rows, training_log

logger = logging.getLogger(__name__)

NEVER = (
    "on_epoch_begin", "on_epoch_end", "on_substep_end", "on_optimizer_step", "on_pre_optimizer_step", "on_prediction_step",
    "on_predict",
)  # fmt: skip
"""Events that never happen here, because micro-batches and optimizer steps run in the workers."""


NOTHING = dict.fromkeys(("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"))
"""Arguments of every event that are always None here: the model and the optimizer are in the workers."""


class Callbacks:
    """The callbacks of a trainer, with the ``TrainerState`` and the ``TrainerControl`` that each event receives.

    Args:
        given: Objects or classes of transformers' ``TrainerCallback``.
        args: Passed to each event as ``args``.
        functions: Names and weights of the reward functions.
        processing_class: The tokenizer, passed to each event.
    """

    def __init__(self, given: Iterable[Any], args: Any, functions: RewardNames, processing_class: Any) -> None:
        self.objects: list[Any] = []
        for callback in given:
            self.add(callback)
        self.args, self.functions = args, functions
        self.shared = {**NOTHING, "processing_class": processing_class}
        self.begin()

    def begin(self) -> None:
        """Reset the state and the control for a new run."""
        from transformers import TrainerControl, TrainerState

        self.state, self.control = TrainerState(), TrainerControl()
        self._answered: dict[str, float] = {}
        self._losses: list[float] = []
        self._began, self._tokens = time.monotonic(), 0

    def add(self, callback: Any) -> None:
        """Add a callback: an object, or a class, which is called without arguments.

        Raises:
            ConfigError: The callback is not a ``TrainerCallback``.
        """
        from transformers import TrainerCallback

        with users_code("callbacks", ConfigError):
            added = callback() if isinstance(callback, type) else callback
        if not isinstance(added, TrainerCallback):
            raise ConfigError(
                f"callbacks: {type(added).__name__} is no TrainerCallback. Derive it from transformers' TrainerCallback."
            )
        never_called = [name for name in NEVER if getattr(type(added), name) is not getattr(TrainerCallback, name)]
        if never_called:
            logger.warning("callbacks: %s of %s is never called here", ", ".join(never_called), type(added).__name__)
        self.objects.append(added)

    def remove(self, callback: Any) -> None:
        """Remove a callback, by its object or its class."""
        self.objects = [kept for kept in self.objects if kept is not callback and type(kept) is not callback]

    def evaluation(self, prefix: str, take: Callable[[dict[str, float]], None]) -> Listener:
        """Return a listener for a separate validation run. It passes the validation metrics to ``take``."""

        def listen(progress: Progress) -> None:
            if progress.validation is not None:
                metrics = self._validated(progress, prefix)
                take(metrics)
                self._call("on_evaluate", metrics=metrics)

        return listen

    def listen(self, progress: Progress) -> None:
        """Call the callbacks' event for this moment of the run, and pass on their requests to validate, save or stop."""
        state, control = self.state, self.control
        state.global_step, state.max_steps = progress.step, progress.total_steps
        if progress.moment == "begin":
            self._began, control.should_training_stop = time.monotonic(), False
            self._call("on_train_begin")
        elif progress.moment == "step_begin":
            state.global_step = progress.step - 1  # transformers counts finished steps
            control.should_save = control.should_evaluate = control.should_log = False
            self._call("on_step_begin")
        elif progress.moment == "step":
            assert progress.result is not None
            result = progress.result
            self._answered = answer_log(scored_rows(result.answers, result.results), self.functions)
            self._tokens += result.total_tokens
            self._call("on_step_end")
            progress.validate |= control.should_evaluate
        elif progress.moment == "validated":
            metrics = self._validated(progress, "eval")
            self._call("on_evaluate", metrics=metrics)
            self._note_best(metrics)  # after the event, in which early stopping compares with the previous best
        elif progress.moment == "logged":
            log = training_log(progress, {**self._answered, "num_tokens": float(self._tokens)})
            self._losses.append(log.get("loss", math.nan))
            self.log(log)
        elif progress.moment == "saved":
            self._call("on_save")
        else:
            self.log(self._at_the_end())
            self._call("on_train_end")
        progress.save |= control.should_save
        progress.stop |= control.should_training_stop

    def _validated(self, progress: Progress, prefix: str) -> dict[str, float]:
        assert progress.validation is not None
        rows = [row for answered in progress.validation.answers for row in scored_rows(*answered)]
        metrics = evaluation_log(rows, self.functions, prefix)
        self.log(metrics)
        return metrics

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the history, and call ``on_log``."""
        self.state.epoch = metrics.get("epoch", self.state.epoch)
        entry = {**metrics, "epoch": self.state.epoch, "step": self.state.global_step}
        self.state.log_history.append(entry)
        self._call("on_log", logs=entry)

    def _at_the_end(self) -> dict[str, float]:
        seconds = time.monotonic() - self._began
        losses = [loss for loss in self._losses if math.isfinite(loss)]
        if not losses:
            return {"train_runtime": seconds}
        last = next((dict(entry) for entry in reversed(self.state.log_history) if "reward" in entry), {})
        mean = sum(losses) / len(losses)
        return {**last, "train_loss": mean, "train_runtime": seconds, "train_steps_per_second": len(losses) / seconds}

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        name = getattr(self.args, "metric_for_best_model", None)
        value = None if name is None else metrics.get(name if name.startswith("eval_") else f"eval_{name}")
        if value is None:
            return
        more, best = bool(getattr(self.args, "greater_is_better", None)), self.state.best_metric
        if best is None or (value > best if more else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def _call(self, event: str, **values: Any) -> None:
        for callback in self.objects:
            # transformers lets a callback replace the control by returning one.
            returned = getattr(callback, event)(self.args, self.state, self.control, **self.shared, **values)
            self.control = self.control if returned is None else returned


def last_metrics(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of the whole run from the log history, in the form that TRL's ``train`` returns."""
    last = history[-1] if history else {}
    return {name: value for name, value in last.items() if name.startswith("train_") or name in ("epoch", "total_flos")}
