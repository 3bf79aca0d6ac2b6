"""Groups of two workers on one small cluster, and whole drivers that end badly."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl_memopt.errors import ConfigError, RolloutError, WorkerError
from verl_memopt.workers.ray_cluster import Connection, Request
from verl_memopt.workers.ray_group import start_ray_group

GONE_SECONDS = 15


class Worker:
    """Answers, raises, waits for ever or dies, as told."""

    def __init__(self, placement):
        self.placement = placement
        self.threads = os.environ["OMP_NUM_THREADS"]
        self.torch_came_first = "torch" in sys.modules

    def place(self):
        return self.placement

    def environment(self):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        return [os.environ[name] for name in names], self.threads, self.torch_came_first

    def gpus(self):
        import ray

        return os.environ.get("CUDA_VISIBLE_DEVICES"), ray.get_runtime_context().get_accelerator_ids()["GPU"]

    def process(self):
        return os.getpid()

    def tell(self, *values, **named):
        return self.placement.rank, values, named

    def tell_slowly(self):
        time.sleep(0.5 * (1 - self.placement.rank))
        return self.placement.rank

    def rank_1_raises(self, error):
        if self.placement.rank == 1:
            raise error
        time.sleep(1000)

    def rank_1_is_killed(self):
        if self.placement.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    def rank_0_blames_its_peer_when_rank_1_is_killed(self):
        if self.placement.rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("connection closed by peer")


def refuses(placement):
    raise RolloutError(f"rank {placement.rank} of {placement.world_size} has no engine")


def start(factory=Worker, devices=2, timeout_seconds=60):
    return start_ray_group(factory, 1, devices, "cpu", timeout_seconds, {}, num_threads=3)


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    from ray import cloudpickle

    # The test module has no name a worker process could import it by.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    connection = Connection({"num_cpus": 5}, Request(1, 2, gpu=False))
    yield
    connection.close()


@pytest.fixture(scope="module")
def group():
    group = start()
    yield group
    group.shutdown()


@pytest.fixture
def doomed():
    """A group whose test ends it, and the processes it had."""
    group = start()
    processes = [psutil.Process(pid) for pid in group.all("process")]
    yield group
    assert psutil.wait_procs(processes, timeout=GONE_SECONDS)[1] == []
    group.shutdown()


def test_results_come_in_rank_order_whoever_answers_first(group):
    assert group.world_size == 2
    assert group.all("tell_slowly") == [0, 1]
    assert group.all("tell", "a", key="b") == [(rank, ("a",), {"key": "b"}) for rank in (0, 1)]
    assert group.each("tell", [("a",), (1, 2)]) == [(0, ("a",), {}), (1, (1, 2), {})]


def test_members_are_processes_of_their_own_that_know_their_place(group):
    first, second = group.all("place")
    assert [(p.rank, p.world_size, p.local_rank, p.device) for p in (first, second)] == [(0, 2, 0, "cpu"), (1, 2, 1, "cpu")]
    assert (first.master_addr, first.master_port) == (second.master_addr, second.master_port)
    assert len({os.getpid(), *group.all("process")}) == 3


def test_the_environment_is_set_before_the_factory_is_imported(group):
    port = group.all("place")[0].master_port
    for rank, (variables, threads, torch_came_first) in enumerate(group.all("environment")):
        assert variables == [str(rank), "2", str(rank), "2", "127.0.0.1", str(port), "3"]
        assert threads == "3"
        assert not torch_came_first


def test_a_member_of_a_cpu_run_asks_for_no_gpu_and_sees_none(group):
    assert group.all("gpus") == [("", [])] * 2


def test_a_tensor_makes_the_trip_unchanged_and_writable(group):
    import torch

    sent = torch.arange(1000, dtype=torch.float32)
    for _, (received,), _ in group.all("tell", sent):
        assert torch.equal(received, sent)
        received += 1


def test_a_member_that_raises_ends_the_group_with_its_rank_and_its_own_traceback(doomed):
    with pytest.raises(WorkerError) as error:
        doomed.all("rank_1_raises", ZeroDivisionError("seven over nothing"))
    message = str(error.value)
    assert message.startswith("worker 1 (pid ")
    assert "in rank_1_raises" in message
    assert "ZeroDivisionError: seven over nothing" in message
    with pytest.raises(AssertionError, match="ended with an earlier error"):
        doomed.all("process")


def test_an_error_meant_for_the_user_comes_back_as_it_was_raised(doomed):
    with pytest.raises(RolloutError) as error:
        doomed.all("rank_1_raises", RolloutError("max_logprob_diff=0.5: it is 3.1. Check the sync."))
    assert type(error.value) is RolloutError
    assert str(error.value) == "max_logprob_diff=0.5: it is 3.1. Check the sync."


def test_a_member_that_is_killed_is_named_by_rank_and_pid_and_the_other_does_not_hang(doomed):
    pid = doomed.all("process")[1]
    with pytest.raises(WorkerError, match=rf"worker 1 \(pid {pid} on .*\) died: Worker exit type: SYSTEM_ERROR"):
        doomed.all("rank_1_is_killed")


def test_a_death_is_reported_before_the_broken_connection_it_causes(doomed):
    with pytest.raises(WorkerError, match=r"worker 1 \(pid .*died"):
        doomed.all("rank_0_blames_its_peer_when_rank_1_is_killed")


def test_shutdown_ends_the_processes_and_may_be_called_again(doomed):
    doomed.shutdown()
    doomed.shutdown()


def test_a_factory_that_raises_for_the_user_comes_back_as_it_was_raised_and_frees_its_room():
    with pytest.raises(RolloutError, match="rank 0 of 1 has no engine"):
        start(refuses, devices=1)


def test_a_request_the_cluster_can_never_hold_fails_at_once_with_both_sides_and_the_keys():
    with pytest.raises(ConfigError) as error:
        start(devices=64, timeout_seconds=10_000)
    message = str(error.value)
    assert "trainer.n_gpus_per_node=64 asks for 64 CPU on each node" in message
    assert "5 CPU and 0 GPU" in message
    assert "ray_kwargs.ray_init.num_cpus" in message
    with pytest.raises(ConfigError, match="2 CPU and 2 GPU"):
        start_ray_group(Worker, 1, 2, "gpu", 10_000, {}, 1)


def test_a_request_without_room_gives_up_after_the_timeout_and_says_what_is_free(group):
    with pytest.raises(WorkerError, match="free now: 3 CPU and 0 GPU of 5 CPU and 0 GPU"):
        start(devices=4, timeout_seconds=1)


DRIVER = """
import os, signal, sys, time
from verl_memopt.workers.ray_group import start_ray_group

class Worker:
    def __init__(self, placement):
        self.rank = placement.rank
    def process(self):
        return os.getpid()
    def wait(self):
        time.sleep(1000)
    def fail(self):
        if self.rank == 1:
            raise ValueError("no luck")
        time.sleep(1000)

interrupts = []
signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
group = start_ray_group(Worker, 1, 2, "cpu", 60, {}, 1)
print("ready", flush=True)
while not interrupts:
    time.sleep(0.01)
time.sleep(0.5)
print("after", *group.all("process"), flush=True)
group.all(sys.argv[1])
"""


@pytest.fixture
def driver(tmp_path):
    """Starts a driver with a cluster of its own, in a session of its own, as a terminal would."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    started = []

    def start_driver(then):
        root = Path(__file__).parents[2]
        process = subprocess.Popen(
            [sys.executable, str(script), then],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        return process

    yield start_driver
    for process in started:
        process.kill()
        process.communicate()


def test_ctrl_c_reaches_the_driver_alone_and_a_killed_driver_leaves_nothing_behind(driver):
    process = driver("wait")
    os.killpg(process.pid, signal.SIGINT)
    word, *pids = process.stdout.readline().split()
    assert word == "after"
    assert len(pids) == 2
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert {int(pid) for pid in pids} <= {child.pid for child in descendants}
    process.kill()
    assert psutil.wait_procs(descendants, timeout=GONE_SECONDS)[1] == []


def test_a_driver_that_ends_with_a_worker_error_exits_non_zero_and_leaves_nothing_behind(driver):
    process = driver("fail")
    descendants = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "WorkerError: worker 1 (pid" in errors
    assert "ValueError: no luck" in errors
    assert psutil.wait_procs(descendants, timeout=GONE_SECONDS)[1] == []
