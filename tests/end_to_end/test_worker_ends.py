"""A Ray worker that dies or raises ends its run with the worker's name, and leaves no process behind."""

import signal

import pytest

from tests.end_to_end.runs import family, metrics, start, survivors, wait_for_step

HF = "actor_rollout_ref.rollout.name=hf"
LONG = ["trainer.total_training_steps=100000", "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.val_before_train=false"]


@pytest.fixture
def started(toy, tmp_path):
    """Starts a run on Ray and gives it with its processes once it has taken a step; it is ended with the test."""
    processes = []

    def begin(*overrides):
        process = start(toy, tmp_path / "run", HF, *LONG, *overrides)
        processes.append(process)
        wait_for_step(process, tmp_path / "run", 0)
        return process, family(process)

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow  # tests/worker/test_ray_group.py kills one, and the test below ends a run, in every run of the tests
def test_a_worker_that_is_killed_in_the_middle_of_a_run_ends_it_and_is_named(started, tmp_path):
    process, relatives = started()
    (worker,) = [relative for relative in relatives if relative.name().startswith("ray::Member")]
    worker.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 1, output[-3000:]
    assert not survivors(relatives)
    (message,) = [line for line in output.splitlines() if line.startswith("WorkerError: ")]
    assert message.startswith(f"WorkerError: worker 0 (pid {worker.pid} on ")
    assert ") died: " in message
    assert "Traceback" not in output
    assert f"the record so far: {tmp_path / 'run'}" in output
    assert 1 in metrics(tmp_path / "run")


@pytest.mark.parametrize(
    ("part", "named"),
    [("gcs_server", "Ray's head process"), pytest.param("raylet", "Ray's node process", marks=pytest.mark.slow)],
)
def test_a_lost_ray_process_ends_the_run_with_one_sentence_and_leaves_nothing(started, tmp_path, part, named):
    process, relatives = started("trainer.save_freq=1")
    (lost,) = [relative for relative in relatives if relative.name() == part]
    lost.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=45)
    assert process.returncode == 1, output[-3000:]
    assert not survivors(relatives)
    (message,) = [line for line in output.splitlines() if line.startswith("WorkerError: ")]
    assert message.startswith(f"WorkerError: {named} ({part}) (pid {lost.pid}) died")
    assert "The same command resumes from the last checkpoint." in message
    assert "Traceback" not in output
