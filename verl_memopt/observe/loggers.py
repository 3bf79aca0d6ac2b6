"""Loggers for the metrics of each step, by name. The package of a tracking service is imported only if its logger is used."""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any, Protocol

import yaml

from verl_memopt.errors import ConfigError
from verl_memopt.observe.console import RunConsole
from verl_memopt.observe.files import append_rows, replace_text
from verl_memopt.observe.run_folder import RunFolder
from verl_memopt.observe.samples import Sample

logger = logging.getLogger(__name__)

STEP = "training/global_step"
"""Metric that wandb uses as the x axis of all other metrics."""
SAMPLES = "val/generations"
"""Name of the table of validation samples in wandb and SwanLab."""
SAMPLE_COLUMNS = ("step", "data_source", "input", "output", "ground_truth", "score")
"""Columns of the table of validation samples."""


class StepLogger(Protocol):
    """Records one flat dictionary of metrics per step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, failed: bool = False) -> None: ...


@dataclass(frozen=True)
class LoggingPlace:
    folder: RunFolder
    console: RunConsole
    project_name: str
    experiment_name: str
    resumed_step: int | None
    """The step after which the run continues. None = a new run."""


@dataclass(frozen=True)
class JsonlLogger:
    """Appends ``{"step": ..., "run_id": ..., <metrics>}`` to metrics.jsonl and passes it to the operating system at once."""

    folder: RunFolder

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        append_rows(self.folder.metrics, [{"step": step, "run_id": self.folder.run_id, **metrics}])

    def close(self, failed: bool = False) -> None:
        """Do nothing: every row is written when it is logged."""


class TensorBoardLogger:
    """Writes scalars to ``tensorboard/``. After a resume TensorBoard drops the steps that follow ``resumed_step``.

    ``resumed_step``: None = a new run.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if resumed_step is None else resumed_step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if isinstance(value, Number):
                self._writer.add_scalar(name, value, step)
        # Flushed at each step, so that a run that is killed keeps its curve.
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        self._writer.close()


class WandbLogger:
    """Sends metrics, settings and validation samples to Weights & Biases. ``WANDB_MODE=offline`` keeps them in the run folder.

    A resumed run continues the same wandb run, whose id is stored in the run folder. The x axis is the training step and not
    wandb's own counter: wandb drops rows whose counter goes back, and a resumed run repeats the steps after its checkpoint.
    """

    def __init__(self, place: LoggingPlace) -> None:
        self._wandb = wandb = installed("wandb")
        try:
            self._run = wandb.init(
                project=place.project_name,
                name=place.experiment_name,
                config=yaml.safe_load(place.folder.config.read_text(encoding="utf-8")),
                dir=str(place.folder.path),
                id=stored_id(place, "wandb", lambda: uuid.uuid4().hex[:16]),
                # If a run with this id exists, wandb continues it. Otherwise wandb starts a new run.
                resume="allow",
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"trainer.logger=wandb: wandb cannot start ({error}). Run `wandb login`, or set WANDB_MODE=offline to keep "
                "the record in the run folder."
            ) from error
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, STEP: step})

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        table = self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=sample_rows(step, samples))
        self._run.log({SAMPLES: table, STEP: step})

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class TrackioLogger:
    """Sends metrics and settings to Trackio, which keeps them in ``TRACKIO_DIR``, or in a Space if ``TRACKIO_SPACE_ID`` is set.

    A resumed run continues the run of the same name.
    """

    def __init__(self, place: LoggingPlace) -> None:
        trackio = installed("trackio")
        self._run: Any = trackio.init(
            project=place.project_name,
            name=place.experiment_name,
            config=yaml.safe_load(place.folder.config.read_text(encoding="utf-8")),
            resume="never" if place.resumed_step is None else "allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool = False) -> None:
        self._run.finish()


class SwanlabLogger:
    """Sends metrics, settings and validation samples to SwanLab. ``SWANLAB_MODE=offline`` keeps them in the run folder.

    A resumed run continues the same SwanLab run, whose id is stored in the run folder. ``SWANLAB_LOG_DIR`` sets another folder
    for SwanLab's files, as in verl.
    """

    def __init__(self, place: LoggingPlace) -> None:
        self._swanlab = swanlab = installed("swanlab")
        folder = os.environ.get("SWANLAB_LOG_DIR") or str(place.folder.path / "swanlog")
        Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            self._run = swanlab.init(
                project=place.project_name,
                experiment_name=place.experiment_name,
                config=yaml.safe_load(place.folder.config.read_text(encoding="utf-8")),
                logdir=folder,
                id=stored_id(place, "swanlab", lambda: uuid.uuid4().hex[:21]),
                # If a run with this id exists, SwanLab continues it. Otherwise SwanLab starts a new run.
                resume="allow",
            )
        except (RuntimeError, OSError, ValueError, swanlab.exceptions.AuthenticationError) as error:
            raise ConfigError(
                f"trainer.logger=swanlab: SwanLab cannot start ({_first_line(error)}). Run `swanlab login`, or set "
                "SWANLAB_MODE=offline to keep the record in the run folder."
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in metrics.items() if isinstance(value, Number)}, step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        table = self._swanlab.echarts.Table()
        table.add(headers=SAMPLE_COLUMNS, rows=sample_rows(step, samples))
        self._run.log({SAMPLES: table}, step=step)

    def close(self, failed: bool = False) -> None:
        if failed:
            self._run.finish(state="crashed", error="see console.log in the folder of the run")
        else:
            self._run.finish()


class MlflowLogger:
    """Sends metrics and settings to the MLflow server at ``MLFLOW_TRACKING_URI``, or to ``mlflow.db`` in the run folder.

    A resumed run continues the same MLflow run, whose id is stored in the run folder. MLflow does not accept "@" in a name, so
    ``mean@1`` becomes ``mean_at_1``, as in verl. Any other character that MLflow does not accept becomes "_". If the server stops
    answering, the run continues: one warning says so, and nothing more is sent.
    """

    def __init__(self, place: LoggingPlace) -> None:
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{place.folder.path.resolve() / 'mlflow.db'}"
        mlflow = installed("mlflow")
        self._entities: Any = mlflow.entities
        self._refusals, self._is_lost = (mlflow.exceptions.MlflowException, OSError), False
        try:
            # A client of its own, because mlflow's module functions have one address and one active run for the whole process.
            self._client: Any = mlflow.MlflowClient(address)
            self._run_id = stored_id(place, "mlflow", lambda: self._create(place))
            self._client.update_run(self._run_id, status="RUNNING")
        except self._refusals as error:
            raise ConfigError(
                f"trainer.logger=mlflow: MLflow cannot start at {address} ({_first_line(error)}). Set MLFLOW_TRACKING_URI to a "
                "server that answers, or remove mlflow from trainer.logger."
            ) from error

    def _create(self, place: LoggingPlace) -> str:
        experiment = self._client.get_experiment_by_name(place.project_name)
        number = self._client.create_experiment(place.project_name) if experiment is None else experiment.experiment_id
        run_id = self._client.create_run(number, run_name=place.experiment_name).info.run_id
        settings = yaml.safe_load(place.folder.config.read_text(encoding="utf-8"))
        texts = [self._entities.Param(key, str(value)[:MLFLOW_LONGEST]) for key, value in _flat(settings)]
        for first in range(0, len(texts), MLFLOW_BATCH):
            self._client.log_batch(run_id, params=texts[first : first + MLFLOW_BATCH])
        return str(run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_")): value for name, value in metrics.items()}
        numbers = [(name, value) for name, value in named.items() if isinstance(value, Number)]
        sent = [self._entities.Metric(*pair, now, step) for pair in numbers]
        self._send(lambda: self._client.log_batch(self._run_id, metrics=sent))

    def close(self, failed: bool = False) -> None:
        self._send(lambda: self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED"))

    def _send(self, call: Callable[[], Any]) -> None:
        # MLflow retries each call for minutes, so after one refusal no further call is made.
        try:
            if not self._is_lost:
                call()
        except self._refusals as error:
            self._is_lost = True
            logger.warning(
                "MLflow does not answer (%s). The run goes on without it, and metrics.jsonl has all figures.", _first_line(error)
            )


MLFLOW_LONGEST, MLFLOW_BATCH = 500, 100
"""Largest number of characters per parameter, and of parameters per call, that every MLflow server accepts."""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def sample_rows(step: int, samples: Sequence[Sample]) -> list[list[Any]]:
    return [[step, sample.data_source, sample.input, sample.output, str(sample.gts), sample.score] for sample in samples]


def installed(name: str) -> Any:
    """Import the package of a tracking service.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"trainer.logger={name}: {name} is not installed. Run `pip install {name}`, or remove it from trainer.logger."
        ) from error


def stored_id(place: LoggingPlace, name: str, create: Callable[[], str]) -> str:
    # The id of the run at a tracking service. It is stored in the run folder, so that a resumed run finds it.
    id_file = place.folder.path / f"{name}_id.txt"
    if place.resumed_step is None or not id_file.exists():
        replace_text(id_file, create())
    return id_file.read_text(encoding="utf-8")


LOGGERS: dict[str, Callable[[LoggingPlace], StepLogger]] = {
    "console": lambda place: place.console,
    "jsonl": lambda place: JsonlLogger(place.folder),
    "tensorboard": lambda place: TensorBoardLogger(place.folder.tensorboard, place.resumed_step),
    "wandb": WandbLogger,
    "swanlab": SwanlabLogger,
    "mlflow": MlflowLogger,
    "trackio": TrackioLogger,
}


@dataclass(frozen=True)
class StepLoggers:
    loggers: Sequence[StepLogger]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for step_logger in self.loggers:
            step_logger.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for step_logger in self.loggers:
            if isinstance(step_logger, WandbLogger | SwanlabLogger):
                step_logger.log_samples(step, samples)

    def close(self, failed: bool = False) -> None:
        # All loggers are closed, even if one of them raises.
        with ExitStack() as closing:
            # An exit stack calls the last callback first, so the loggers are added in reverse and closed in order.
            for step_logger in reversed(self.loggers):
                closing.callback(step_logger.close, failed)


def build_loggers(names: str | Sequence[str], place: LoggingPlace) -> StepLoggers:
    # One object for all loggers of ``trainer.logger``, in that order. The jsonl logger comes first: every run has it.
    return StepLoggers(
        [LOGGERS[name](place) for name in dict.fromkeys(("jsonl", *([names] if isinstance(names, str) else names)))]
    )
