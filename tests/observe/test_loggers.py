import sys
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from verl_memopt.errors import ConfigError
from verl_memopt.observe.console import RunConsole
from verl_memopt.observe.files import read_rows
from verl_memopt.observe.loggers import JsonlLogger, LoggingPlace, StepLoggers, WandbLogger, build_loggers
from verl_memopt.observe.run_folder import RunFolder
from verl_memopt.observe.samples import Sample


@pytest.fixture
def place(tmp_path):
    folder = RunFolder(tmp_path)
    with RunConsole(10, console=Console(file=StringIO(), width=80)) as console:
        yield LoggingPlace(folder, console, "project", "experiment", None)


def test_one_name_may_stand_alone(place):
    assert [type(each) for each in build_loggers("jsonl", place).loggers] == [JsonlLogger]
    assert [type(each) for each in build_loggers("console", place).loggers] == [JsonlLogger, RunConsole]


@pytest.mark.parametrize("names", ["console", ["console", "tensorboard"], []])
def test_the_record_is_written_whatever_else_is_asked_for_and_can_be_read_while_the_run_goes_on(place, names):
    loggers = build_loggers(names, place)
    loggers.log(1, {"critic/score/mean": 0.5})
    assert read_rows(place.folder.metrics) == [{"step": 1, "run_id": place.folder.run_id, "critic/score/mean": 0.5}]
    loggers.close()


def test_tensorboard_forgets_the_steps_a_resumed_run_makes_again(place):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = build_loggers("tensorboard", place)
    for step in (1, 2, 3):
        first.log(step, {"critic/score/mean": float(step), "text": "not a number"})
    first.close()
    resumed = build_loggers("tensorboard", LoggingPlace(place.folder, place.console, "p", "e", resumed_step=1))
    resumed.log(2, {"critic/score/mean": 20.0})
    resumed.close()
    events = EventAccumulator(str(place.folder.tensorboard)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("critic/score/mean")] == [(1, 1.0), (2, 20.0)]


class WandbError(Exception):
    """What wandb raises, for example without an API key."""


class TrackedRun:
    """Records what a run of wandb or SwanLab is told. Neither is among the packages of the tests."""

    def __init__(self, **arguments):
        self.arguments = arguments
        self.logged: list[Any] = []
        self.axes: dict[str, Any] = {}
        self.end: Any = None

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, values, step=None):
        assert self.end is None, "the run is finished"
        self.logged.append(values if step is None else (step, values))

    def finish(self, exit_code=None, state="success", error=None):
        self.end = state if exit_code is None else exit_code


def starting(runs):
    """Return what starts a run, and adds it to ``runs``."""
    return lambda **arguments: runs.append(TrackedRun(**arguments)) or runs[-1]


@pytest.fixture
def wandb_runs(monkeypatch, place):
    """The wandb runs that were started."""
    started: list[TrackedRun] = []
    table = lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data]  # noqa: E731
    stand_in = SimpleNamespace(init=starting(started), Table=table, errors=SimpleNamespace(Error=WandbError))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    place.folder.begin("trainer: {device: cpu}\nactor_rollout_ref: {actor: {optim: {lr: 1.0e-06}}}\n", None)
    return started


def resumed_at(place, step):
    return LoggingPlace(place.folder, place.console, place.project_name, place.experiment_name, resumed_step=step)


def test_wandb_gets_the_settings_and_a_resumed_run_continues_the_same_run(place, wandb_runs):
    for step in (None, 4, 8, None):
        build_loggers("wandb", resumed_at(place, step)).close()
    first, second, third, new = (run.arguments["id"] for run in wandb_runs)
    assert first == second == third != new
    assert {run.arguments["resume"] for run in wandb_runs} == {"allow"}
    given = wandb_runs[0].arguments
    assert given["config"] == {"trainer": {"device": "cpu"}, "actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6}}}}
    assert (given["project"], given["name"], given["dir"]) == ("project", "experiment", str(place.folder.path))


def test_steps_that_a_resumed_run_repeats_are_not_dropped_by_wandb(place, wandb_runs):
    logger = build_loggers("wandb", place)
    for step in (1, 2, 3, 2):
        logger.log(step, {"critic/score/mean": float(step)})
    (run,) = wandb_runs
    assert run.axes == {"training/global_step": None, "*": "training/global_step"}
    assert [(row["training/global_step"], row["critic/score/mean"]) for row in run.logged] == [(1, 1), (2, 2), (3, 3), (2, 2)]


def test_validation_samples_are_a_table_of_wandb_and_pass_other_loggers_by(place, wandb_runs):
    loggers = build_loggers(["jsonl", "console", "wandb"], place)
    loggers.log_samples(5, [Sample("u", "toy", "1+1=", "3", "2", 0.0, [1], [2])])
    (run,) = wandb_runs
    assert run.logged == [
        {
            "val/generations": [
                {"step": 5, "data_source": "toy", "input": "1+1=", "output": "3", "ground_truth": "2", "score": 0.0}
            ],
            "training/global_step": 5,
        }
    ]
    assert not place.folder.metrics.exists()


def test_a_wandb_run_says_whether_the_run_failed_even_where_another_logger_cannot_close(place, wandb_runs):
    class Broken:
        def log(self, step, metrics):
            """Record nothing."""

        def close(self, failed=False):
            raise OSError("the disk is full")

    build_loggers("wandb", place).close(True)
    with pytest.raises(OSError, match="the disk is full"):
        StepLoggers([Broken(), WandbLogger(place)]).close()
    assert [run.end for run in wandb_runs] == [1, 0]


class SwanlabTable:
    def add(self, headers, rows):
        self.rows = [dict(zip(headers, row, strict=True)) for row in rows]


@pytest.fixture
def swanlab_runs(monkeypatch, place):
    """The SwanLab runs that were started."""
    started: list[TrackedRun] = []
    errors = SimpleNamespace(AuthenticationError=WandbError)
    stand_in = SimpleNamespace(init=starting(started), echarts=SimpleNamespace(Table=SwanlabTable), exceptions=errors)
    monkeypatch.setitem(sys.modules, "swanlab", stand_in)
    monkeypatch.delenv("SWANLAB_LOG_DIR", raising=False)
    place.folder.begin("trainer: {device: cpu}\n", None)
    return started


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow"])
def test_a_tracker_that_is_not_installed_is_a_config_error(place, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"^trainer.logger={name}: .*pip install {name}"):
        build_loggers(name, place)


def test_swanlab_gets_settings_steps_and_samples_and_how_the_run_ended(place, swanlab_runs, monkeypatch):
    for failed in (False, True):
        loggers = build_loggers(["console", "swanlab"], place)
        loggers.log(3, {"critic/score/mean": 0.5, "text": "no number"})
        loggers.log_samples(3, [Sample("u", "toy", "1+1=", "3", "2", 0.0, [1], [2])])
        loggers.close(failed)
    first, second = swanlab_runs
    assert (first.arguments["project"], first.arguments["experiment_name"]) == ("project", "experiment")
    assert first.arguments["config"] == {"trainer": {"device": "cpu"}}
    assert first.arguments["logdir"] == str(place.folder.path / "swanlog")
    assert first.logged[0] == (3, {"critic/score/mean": 0.5})
    (step, table), sample = first.logged[1], {"step": 3, "data_source": "toy", "input": "1+1=", "output": "3"}
    assert (step, table["val/generations"].rows) == (3, [{**sample, "ground_truth": "2", "score": 0.0}])
    assert [first.end, second.end] == ["success", "crashed"]
    monkeypatch.setenv("SWANLAB_LOG_DIR", str(place.folder.path / "elsewhere"))
    build_loggers("swanlab", place)
    assert swanlab_runs[-1].arguments["logdir"] == str(place.folder.path / "elsewhere")


def test_a_resumed_run_continues_the_same_swanlab_run_and_a_new_one_does_not(place, swanlab_runs):
    for step in (None, 4, None):
        build_loggers("swanlab", resumed_at(place, step)).close()
    first, second, new = (run.arguments["id"] for run in swanlab_runs)
    assert first == second != new
    assert {(run.arguments["resume"], len(run.arguments["id"])) for run in swanlab_runs} == {("allow", 21)}


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_tracker_that_cannot_start_is_a_config_error(place, wandb_runs, swanlab_runs, name):
    def refuse(**arguments):
        raise WandbError("no API key")

    sys.modules[name].init = refuse
    with pytest.raises(ConfigError, match=rf"(?i){name} cannot start \(no API key\).*{name.upper()}_MODE=offline"):
        build_loggers(name, place)


class MlflowStore:
    """Keeps what MLflow's client is told, as MLflow does, which is not among the packages of the tests."""

    def __init__(self):
        self.addresses: list[str] = []
        self.runs: list[dict[str, Any]] = []

    def client(self, address):
        if address.startswith("http"):
            raise MlflowError("connection refused\nat length")
        self.addresses.append(address)
        return SimpleNamespace(
            get_experiment_by_name=lambda name: SimpleNamespace(experiment_id="7") if self.runs else None,
            create_experiment=lambda name: "7",
            create_run=self.create,
            update_run=lambda run_id, status: self.runs[int(run_id)].update(status=status),
            set_terminated=lambda run_id, status: self.runs[int(run_id)].update(status=status),
            log_batch=self.log,
        )

    def create(self, experiment, run_name):
        self.runs.append({"experiment": experiment, "name": run_name, "status": "RUNNING", "params": {}, "metrics": []})
        return SimpleNamespace(info=SimpleNamespace(run_id=str(len(self.runs) - 1)))

    def log(self, run_id, metrics=(), params=()):
        self.runs[int(run_id)]["params"].update(params)
        self.runs[int(run_id)]["metrics"] += [(name, value, step) for name, value, _, step in metrics]


class MlflowError(Exception):
    """What MLflow raises."""


@pytest.fixture
def mlflow(monkeypatch, place):
    store = MlflowStore()
    entities = SimpleNamespace(Metric=lambda *each: each, Param=lambda *each: each)
    errors = SimpleNamespace(MlflowException=MlflowError)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=store.client, entities=entities, exceptions=errors))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    place.folder.begin("trainer: {device: cpu}\ndata: {seed: null}\n", None)
    return store


def test_mlflow_continues_a_run_with_names_that_it_takes_and_a_new_run_is_another(place, mlflow):
    for step, failed in ((None, True), (4, False), (None, False)):
        logger = build_loggers("mlflow", resumed_at(place, step))
        logger.log((step or 0) + 1, {"val-core/toy/acc/mean@1": 0.5, "note": "no number"})
        logger.close(failed)
    assert mlflow.runs == [
        {
            "experiment": "7",
            "name": "experiment",
            "status": "FINISHED",
            "params": {"trainer.device": "cpu", "data.seed": "None"},
            "metrics": [("val-core/toy/acc/mean_at_1", 0.5, step) for step in steps],
        }
        for steps in ((1, 5), (1,))
    ]
    assert set(mlflow.addresses) == {f"sqlite:///{place.folder.path}/mlflow.db"}


def test_trackio_continues_the_run_of_a_name_and_one_that_is_missing_is_a_config_error(place, monkeypatch):
    place.folder.begin("trainer: {device: cpu}\n", None)
    started, logged = [], []
    run = SimpleNamespace(log=lambda metrics, step: logged.append((metrics, step)), finish=lambda: logged.append("end"))
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **given: started.append(given) or run))
    for step in (None, 4):
        logger = build_loggers("trackio", resumed_at(place, step))
        logger.log((step or 0) + 1, {"critic/score/mean": 0.5})
        logger.close()
    assert [(each["name"], each["resume"]) for each in started] == [("experiment", "never"), ("experiment", "allow")]
    assert started[0]["config"] == {"trainer": {"device": "cpu"}}
    assert logged == [({"critic/score/mean": 0.5}, 1), "end", ({"critic/score/mean": 0.5}, 5), "end"]
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match="pip install trackio"):
        build_loggers("trackio", place)


def test_an_mlflow_that_does_not_answer_is_a_config_error(place, mlflow, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:1")
    with pytest.raises(ConfigError, match=r"cannot start at http://localhost:1 \(connection refused\).*MLFLOW_TRACKING_URI"):
        build_loggers("mlflow", place)


def test_an_mlflow_that_stops_answering_is_told_once_and_the_run_goes_on(place, mlflow, caplog):
    logger, asked = build_loggers("mlflow", place), []

    def refuse(*_, **__):
        asked.append(1)
        raise MlflowError("the server is gone\nat length")

    logger.loggers[-1]._client.log_batch = refuse
    for step in (1, 2):
        logger.log(step, {"loss": 0.5})
    logger.close()
    assert len(asked) == len(caplog.messages) == 1
    assert "the server is gone)" in caplog.text
    assert mlflow.runs[0]["status"] == "RUNNING"
