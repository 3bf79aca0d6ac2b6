"""The pytest plugin of the suite: settings for a small machine, and the outcome of each test as a line of JSON."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_memopt import api

DEFAULTS = json.loads(os.environ.get("TRL_SUITE_SETTINGS", "{}"))
"""Settings of every run that a test does not set itself."""
OUTCOMES = os.environ.get("TRL_SUITE_OUTCOMES")
"""File that gets a line of JSON for each test."""

_load = api.Call.load


def _with_defaults(call: api.Call) -> Any:
    return _load(dataclasses.replace(call, settings={**DEFAULTS, **call.settings}))


api.Call.load = _with_defaults  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a trainer without ``output_dir`` write where the test does."""
    monkeypatch.chdir(tmp_path)
    yield
    logging.getLogger("verl_memopt").propagate = True  # for caplog


_began: dict[str, float] = {}


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    _began[nodeid] = time.monotonic()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    result = yield
    report = result.get_result()  # type: ignore[attr-defined]
    if OUTCOMES is None or (report.when != "call" and report.outcome == "passed"):
        return
    if report.when == "teardown":
        return
    reason = ""
    if call.excinfo is not None:
        reason = f"{call.excinfo.typename}: {call.excinfo.value}"
    row = {
        "test": "::".join([item.path.name, *([item.cls.__name__] if item.cls else []), re.sub(r"/\S*/", "", item.name)]),
        "outcome": report.outcome, "xfail": hasattr(report, "wasxfail"),
        "seconds": round(time.monotonic() - _began[item.nodeid], 1), "reason": reason,
    }  # fmt: skip
    with Path(OUTCOMES).open("a") as file:
        file.write(json.dumps(row) + "\n")
