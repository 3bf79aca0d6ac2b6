"""What every test starts from: one thread a process, no network, a tiny model made once a session."""

import fcntl
import gc
import logging
import os
import signal
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads for a few short texts take longer than the texts
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
from hypothesis import settings

# Under nohup hanging up is ignored, and in the background of a script Ctrl-C as well, by everything that is started too.
# The tests that send these signals mean them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
settings.register_profile("no_clock", deadline=None)
settings.load_profile("no_clock")


LONGEST_FIRST = (
    *("test_api.py", "test_session.py", "end_to_end", "faults", "trl", "benchmarks", "virtual_gpu", "agents", "rollout"),
    *("worker", "rewards", "docs", "ladder", "trainer", "plan", "recipe", "gpu", "memory", "model", "config", "architecture"),
)  # fmt: skip
"""Rooms and files that take longest. What is handed out last should be short, or one process ends minutes after the other."""


def pytest_collection_modifyitems(items):
    """Put the rooms that take longest first; within a room the order stays.

    Before them comes a long file without the toy task, so that one process makes the task while the other need not wait for it.
    """
    order = {room: number for number, room in enumerate(LONGEST_FIRST)}
    tests = Path(__file__).parent
    without_toy = tests / "end_to_end" / "test_combinations.py"
    items.sort(key=lambda item: (item.path != without_toy, order.get(item.path.relative_to(tests).parts[0], len(order))))


MANY_MODULES = 100
"""A file of tests that has imported so many has left a heap that is worth freezing."""

_modules_when_frozen = 0
_is_thawed = False
_unfreeze = gc.unfreeze


def _freeze():
    """Keep what is there out of every later garbage collection, which would look at millions of objects each time."""
    global _modules_when_frozen, _is_thawed
    gc.collect()
    gc.freeze()
    _modules_when_frozen, _is_thawed = len(sys.modules), False


def _thaw():
    """Thaw the heap as vLLM asks, and remember it. ``gc.get_freeze_count`` would count all objects before each test."""
    global _is_thawed
    _unfreeze()
    _is_thawed = True


def pytest_collection_finish():
    gc.unfreeze = _thaw
    _freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Undo what an earlier test left for the whole process: the level of our log, and a heap that is not frozen.

    The heap is frozen again where vLLM's shutdown has thawed it, and between two files where many modules were imported.
    """
    logging.getLogger("verl_memopt").setLevel(logging.NOTSET)  # `fit`, run in this process, lets only errors through
    first_of_file = _files[-1:] != [item.path]
    _files[:] = [item.path]
    if _is_thawed or (first_of_file and len(sys.modules) > _modules_when_frozen + MANY_MODULES):
        _freeze()


_files = []
"""The file of the test that ran last."""


def pytest_terminal_summary(terminalreporter):
    """Return in which folders a run of many tests has spent its time."""
    seconds = Counter()
    for report in (each for some in terminalreporter.stats.values() for each in some if hasattr(each, "duration")):
        seconds["/".join(report.nodeid.split("/")[: 3 if "memory/" in report.nodeid else 2]).partition(".py")[0]] += (
            report.duration
        )
    if seconds.total() > 60:
        terminalreporter.section("slowest groups, seconds of one process")
        for group, spent in seconds.most_common(10):
            terminalreporter.line(f"{spent:7.0f}  {group}")


def pytest_unconfigure():
    gc.unfreeze = _unfreeze
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny Qwen3 with tied embeddings."""
    from verl_memopt.model.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tied", seed=1)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory):
    """A tiny Qwen3 whose head is a tensor of its own."""
    from verl_memopt.model.tiny import TinyShape, make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "untied", TinyShape(tie_embeddings=False), seed=2)


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """The toy task as `verl-memopt toy` makes it, warm-up included. The processes of one session share it."""
    from verl_memopt.cli import main

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with open(shared / "toy.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["toy", str(shared / "toy"), "--seed", "0"]) == 0
    return shared / "toy"


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """A wider model with the toy's tokenizer."""
    from verl_memopt.data.toy import SHAPE
    from verl_memopt.model.tiny import TinyShape, make_tiny_model

    shape = TinyShape(hidden_size=96, num_layers=3, vocab_size=SHAPE.vocab_size, initializer_range=0.06, tie_embeddings=False)
    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "model", shape, seed=8)


@pytest.fixture
def one_rank():
    """The mesh of a world of one, in a process group that lasts for one test."""
    from verl_memopt.distributed.device import join_process_group, leave_process_group, training_mesh

    leave_process_group()
    join_process_group(torch.device("cpu"), 0, 1, "", 0, 60)
    yield training_mesh("cpu", 1, -1)
    leave_process_group()


@pytest.fixture
def made(tiny_folder):
    """Build workers of a tiny model, each in a process group of its own; one ends before the next begins."""
    from tests.worker.test_worker import place, plan_of
    from verl_memopt.distributed.device import leave_process_group
    from verl_memopt.worker.worker import Worker

    workers = []

    def build(more=None, folder=tiny_folder, **plan):
        close()
        workers.append(Worker(plan_of(folder, more, **plan), place()))
        return workers[-1]

    def close():
        while workers:
            workers.pop().close()
        leave_process_group()

    build.close = close
    close()
    yield build
    close()
