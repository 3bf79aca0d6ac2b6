"""Where the metrics of each step go: a dict of names, each imported on use."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any, Protocol

from verl_memopt.errors import ConfigError
from verl_memopt.observe.console import ConsoleLogger, RunConsole
from verl_memopt.observe.files import append_rows, replace_text
from verl_memopt.observe.run_folder import RunFolder


class StepLogger(Protocol):
    """Takes one flat dictionary a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class LoggingPlace:
    """What the loggers need to know of a run."""

    folder: RunFolder
    console: RunConsole
    project_name: str
    experiment_name: str
    config: Mapping[str, Any]
    """The resolved settings as a plain mapping."""
    resumed_step: int | None
    """The step the run goes on after; None for a fresh run."""


class JsonlLogger:
    """Appends ``{"step": ..., "run_id": ..., <metrics>}`` to metrics.jsonl and hands it to the operating system at once."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        append_rows(self._path, [{"step": step, "run_id": self._run_id, **metrics}])

    def close(self) -> None:
        """Does nothing: every row is written when it is logged."""


class TensorBoardLogger:
    """Writes scalars to ``tensorboard/``; on resume TensorBoard drops what lies beyond the step resumed from."""

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if resumed_step is None else resumed_step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if isinstance(value, Number):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Sends metrics to Weights & Biases. A resumed run continues the same wandb run, whose id its folder keeps."""

    def __init__(self, place: LoggingPlace) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "trainer.logger=wandb: wandb is not installed. Run `pip install wandb`, or leave it out."
            ) from error
        # The id is kept beside the metrics, so that a resumed run finds the one it began.
        kept = place.folder.path / "wandb_id.txt"
        if place.resumed_step is None or not kept.exists():
            replace_text(kept, uuid.uuid4().hex[:16])
        self._run = wandb.init(
            project=place.project_name,
            name=place.experiment_name,
            config=dict(place.config),
            dir=str(place.folder.path),
            id=kept.read_text(encoding="utf-8"),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


LOGGERS: dict[str, Callable[[LoggingPlace], StepLogger]] = {
    "console": lambda place: ConsoleLogger(place.console),
    "jsonl": lambda place: JsonlLogger(place.folder.metrics, place.folder.run_id),
    "tensorboard": lambda place: TensorBoardLogger(place.folder.tensorboard, place.resumed_step),
    "wandb": WandbLogger,
}


class StepLoggers:
    """Several loggers as one."""

    def __init__(self, loggers: Sequence[StepLogger]) -> None:
        self._loggers = loggers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for each in self._loggers:
            each.log(step, metrics)

    def close(self) -> None:
        for each in self._loggers:
            each.close()


def check_loggers(names: str | Sequence[str]) -> list[str]:
    """Gives the names of ``trainer.logger`` as a list, without building anything.

    Errors: ConfigError for a name that is unknown.
    """
    listed = [names] if isinstance(names, str) else list(names)
    for name in listed:
        if name not in LOGGERS:
            raise ConfigError(f"trainer.logger={name}: unknown logger. Use any of {', '.join(LOGGERS)}.")
    return listed


def build_loggers(names: str | Sequence[str], place: LoggingPlace) -> StepLoggers:
    """Gives the loggers of ``trainer.logger`` as one, in the order named.

    Errors: ConfigError for an unknown name, or for one whose package is not installed.
    """
    return StepLoggers([LOGGERS[name](place) for name in check_loggers(names)])
