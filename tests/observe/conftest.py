"""A run folder as a trainer would fill it."""

import pytest

from verl_memopt.observe.files import append_rows
from verl_memopt.observe.phase import MIB, PhaseMemory, Span
from verl_memopt.observe.run_folder import RunFolder
from verl_memopt.observe.samples import Sample


def _log_step(folder, step, began, counted=True, validated=False):
    """Log a step of 3 seconds: generation 2, update 1. The update peaks at (10 + step) MiB."""
    spans = [Span("gen", began, 2.0), Span("update_actor", began + 2, 1.0), Span("step", began, 3.0)]
    peak = (10 + step) * MIB if counted else None
    memory = PhaseMemory(
        "update_actor", 1.0, peak, MIB if counted else None, None, None, 100 * MIB, {"params": peak} if peak else {}
    )
    folder.add_timeline(step, spans, {"update_actor": memory})
    folder.add_generations(step, [Sample("u", "toy", "1+1=", "2", "2", 1.0, [1], [2])])
    score = {"val-core/toy/reward/mean@1": step / 10} if validated else {}
    append_rows(folder.metrics, [{"step": step, "critic/score/mean": step / 20, **score}])


@pytest.fixture
def make_run(tmp_path):
    """Return a function that makes a run of some steps, by name."""

    def make(name="run", steps=3, counted=True, validated=True):
        folder = RunFolder(tmp_path / name)
        folder.begin("trainer: {}\n", resumed_step=None)
        if validated:
            append_rows(folder.metrics, [{"step": 0, "val-core/toy/reward/mean@1": 0.05}])
        for step in range(1, steps + 1):
            _log_step(folder, step, folder.began + 3 * (step - 1), counted, validated)
        return folder

    return make


@pytest.fixture
def log_step():
    return _log_step
