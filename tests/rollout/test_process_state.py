import logging
import os
import random
import signal
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from verl_memopt.rollout.engine import random_state_kept
from verl_memopt.rollout.vllm_process import (
    LEVEL_VARIABLE,
    NOISY_LOGGERS,
    default_group_kept,
    process_state_kept,
    quiet_start,
)

CPU = torch.device("cpu")


def draw():
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def seed_all():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def test_every_random_generator_goes_on_where_it_was():
    seed_all()
    expected = [draw(), draw()]
    seed_all()
    first = draw()
    with random_state_kept(CPU):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        draw()
    assert [first, draw()] == expected


def test_what_a_start_changes_is_given_back_even_after_an_error(monkeypatch):
    monkeypatch.setenv("KEPT", "old")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    before = (torch.get_num_threads(), torch.set_num_threads, torch.get_default_dtype(), torch.get_float32_matmul_precision())
    hook, handler, filters = sys.excepthook, signal.getsignal(signal.SIGTERM), list(warnings.filters)

    def disturb():
        with process_state_kept(CPU, own_prefix="ENGINE_"):
            torch.set_num_threads(before[0] + 1)
            torch.set_num_threads = print
            torch.set_default_dtype(torch.float64)
            torch.set_float32_matmul_precision("medium")
            sys.excepthook = print
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            warnings.simplefilter("error")
            os.environ.update(KEPT="new", LD_PRELOAD="x.so", ENGINE_OWN="stays")
            raise ValueError("start failed")

    with pytest.raises(ValueError, match="start failed"):
        disturb()
    after = (torch.get_num_threads(), torch.set_num_threads, torch.get_default_dtype(), torch.get_float32_matmul_precision())
    assert after == before
    assert (sys.excepthook, signal.getsignal(signal.SIGTERM), list(warnings.filters)) == (hook, handler, filters)
    assert os.environ["KEPT"] == "old"
    assert "LD_PRELOAD" not in os.environ
    assert os.environ.pop("ENGINE_OWN") == "stays"


@pytest.mark.parametrize("keep", [True, False])
def test_the_default_group_outlives_an_engines_clean_up_only_when_it_is_the_callers(keep, shared_vllm):
    shared_vllm.close()  # it may hold a default group of its own
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    own = dist.new_group([0])
    with default_group_kept(keep):
        dist.destroy_process_group(own)
        dist.destroy_process_group()
    assert dist.is_initialized() == keep
    if keep:
        dist.destroy_process_group()


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
