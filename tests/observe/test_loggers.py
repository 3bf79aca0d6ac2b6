"""Loggers by name."""

import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from verl_memopt.errors import ConfigError
from verl_memopt.observe.console import RunConsole
from verl_memopt.observe.files import read_rows
from verl_memopt.observe.loggers import LOGGERS, LoggingPlace, build_loggers, check_loggers
from verl_memopt.observe.run_folder import RunFolder


@pytest.fixture
def place(tmp_path: Path) -> Iterator[LoggingPlace]:
    folder = RunFolder(tmp_path)
    with RunConsole(10, console=Console(file=StringIO(), width=80)) as console:
        yield LoggingPlace(folder, console, "project", "experiment", None)


def test_an_unknown_logger_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.logger=mlflow: .*console, jsonl, tensorboard, wandb"):
        check_loggers(["jsonl", "mlflow"])


def test_one_name_may_stand_alone() -> None:
    assert check_loggers("jsonl") == ["jsonl"]


def test_jsonl_rows_can_be_read_while_the_run_goes_on(place: LoggingPlace) -> None:
    loggers = build_loggers(["jsonl", "console"], place)
    loggers.log(1, {"critic/score/mean": 0.5})
    assert read_rows(place.folder.metrics) == [{"step": 1, "run_id": place.folder.run_id, "critic/score/mean": 0.5}]
    loggers.close()


def test_tensorboard_forgets_the_steps_a_resumed_run_makes_again(place: LoggingPlace) -> None:
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


def test_wandb_that_is_not_installed_is_a_config_error(place: LoggingPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        build_loggers("wandb", place)


def test_wandb_gets_the_settings_that_the_folder_records(place: LoggingPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **arguments: started.append(arguments)))
    place.folder.begin("trainer: {device: cpu}\nactor_rollout_ref: {actor: {optim: {lr: 1.0e-06}}}\n", None)
    build_loggers("wandb", place)
    assert [arguments["config"] for arguments in started] == [
        {"trainer": {"device": "cpu"}, "actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6}}}}
    ]


def test_no_logger_is_imported_before_it_is_used() -> None:
    import subprocess

    code = (
        "import sys, verl_memopt.observe.report, verl_memopt.observe.loggers;"
        "print(sorted({'matplotlib', 'tensorboard', 'wandb', 'vllm', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert set(LOGGERS) == {"console", "jsonl", "tensorboard", "wandb"}
