import logging
import os

import pytest

from verl_memopt.rollout.vllm_engine import LEVEL_VARIABLE, NOISY_LOGGERS, quiet_start


class VllmFormatter(logging.Formatter):
    __module__ = "vllm.logging_utils.formatter"


@pytest.fixture
def handlers():
    """A handler of vLLM's own and one of another library, both on vLLM's logger; all levels are put back."""
    loggers = [logging.getLogger(name) for name in ("vllm", *NOISY_LOGGERS)]
    before = [logger.level for logger in loggers]
    own, other = logging.NullHandler(), logging.NullHandler()
    own.setFormatter(VllmFormatter())
    other.setFormatter(logging.Formatter())
    for handler in (own, other):
        handler.setLevel(logging.INFO)
        loggers[0].addHandler(handler)
    yield own, other
    for handler in (own, other):
        loggers[0].removeHandler(handler)
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def test_vllm_shows_errors_alone_while_it_starts_and_warnings_afterwards(handlers, monkeypatch):
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    own, other = handlers
    with quiet_start():
        assert os.environ[LEVEL_VARIABLE] == "ERROR"
        assert logging.getLogger("vllm").level == own.level == logging.ERROR
    assert LEVEL_VARIABLE not in os.environ
    assert logging.getLogger("vllm").level == own.level == logging.WARNING
    assert other.level == logging.INFO
    assert {logging.getLogger(name).level for name in NOISY_LOGGERS} == {logging.ERROR}


def test_levels_are_put_back_after_a_start_that_fails(handlers, monkeypatch):
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="no engine"), quiet_start():
        raise ValueError("no engine")
    assert LEVEL_VARIABLE not in os.environ
    assert handlers[0].level == logging.WARNING


def test_a_level_that_the_user_sets_stays(handlers, monkeypatch):
    monkeypatch.setenv(LEVEL_VARIABLE, "DEBUG")
    level = logging.getLogger("vllm").level
    with quiet_start():
        assert (os.environ[LEVEL_VARIABLE], handlers[0].level) == ("DEBUG", logging.INFO)
    assert (logging.getLogger("vllm").level, handlers[0].level) == (level, logging.INFO)
