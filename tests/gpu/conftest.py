"""Chooses the machine, and says in one line what was not covered.

``pytest -m gpu`` runs all of this folder on a GPU, and skips it where there is none. Without ``gpu`` in the expression the same
bodies run on the CPU: those marked ``rehearsed`` with the other tests, the rest with the slow ones.
"""

import logging
import os
from pathlib import Path

import pytest
import torch

from tests.gpu import machine

HERE = Path(__file__).parent
WHOLE = "everything that needs a GPU"


def _asks_for_gpu(config):
    words = str(config.option.markexpr).replace("(", " ").replace(")", " ").split()
    return any(word == "gpu" and (place == 0 or words[place - 1] != "not") for place, word in enumerate(words))


def pytest_configure(config):
    config.addinivalue_line("markers", "rehearsed: of tests/gpu, runs on the CPU with every test run")
    # Torch reads it once, at the process's first product on a GPU; deterministic mode refuses to multiply without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    machine.choose(os.environ.get(machine.VARIABLE) or ("cuda" if _asks_for_gpu(config) else "cpu"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    own = [item for item in items if HERE in Path(item.path).parents]
    lacks = machine.missing()
    if not torch.cuda.is_available():
        # Tests of other folders that name a GPU themselves.
        for item in items:
            if item not in own and item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason=f"{WHOLE}: no CUDA device is visible"))
    for item in own:
        if _asks_for_gpu(config):
            item.add_marker(pytest.mark.gpu)
        elif item.get_closest_marker("rehearsed") is None:
            item.add_marker(pytest.mark.slow)
        if lacks is not None:
            item.add_marker(pytest.mark.skip(reason=f"{WHOLE}: {lacks}"))


def pytest_terminal_summary(terminalreporter):
    reasons = {}
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if report.nodeid.startswith("tests/gpu/") or reason.startswith(WHOLE):
            reasons[reason] = reasons.get(reason, 0) + 1
    if reasons:
        told = "; ".join(f"{reason} ({count} {'test' if count == 1 else 'tests'})" for reason, count in sorted(reasons.items()))
        terminalreporter.write_line(f"not covered here: {told}")


@pytest.fixture(autouse=True)
def quiet():
    """Log only errors, and start without a process group of another test."""
    from verl_memopt.distributed.device import leave_process_group

    leave_process_group()
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    leave_process_group()


@pytest.fixture
def device():
    return machine.device()


@pytest.fixture
def one_rank():
    """The mesh of a world of one on the device."""
    with machine.one_rank() as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def exact_products():
    """Compute products in fp32 with full precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
