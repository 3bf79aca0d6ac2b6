"""What can be said of a cluster without starting one; what it does is shown in test_ray_group.py."""

import socket
import subprocess
import time

import pytest

from verl_memopt.errors import ConfigError
from verl_memopt.workers.group import free_port
from verl_memopt.workers.ray_cluster import Connection, Request, _guard


def test_a_request_asks_for_a_cpu_and_where_it_is_one_a_gpu_per_device():
    assert Request(1, 2, gpu=False).bundle == {"CPU": 1.0}
    assert Request(1, 2, gpu=True).bundle == {"CPU": 1.0, "GPU": 1.0}
    assert str(Request(2, 4, gpu=True)) == "trainer.nnodes=2, trainer.n_gpus_per_node=4 asks for 4 CPU and 4 GPU on each node"


def test_several_nodes_without_an_address_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"trainer\.nnodes=2: a cluster started here has one node.*ray_init\.address"):
        Connection({}, Request(2, 1, gpu=False))


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_answers_is_refused_at_once(scheme):
    address = f"{scheme}127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(ConfigError, match=f"ray_kwargs.ray_init.address={address}: nothing answers there"):
        Connection({"address": address}, Request(1, 1, gpu=False))


def test_the_address_in_the_environment_is_told_in_the_same_way(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nothing answers here while it is held
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=f"{address}: nothing answers there.*RAY_ADDRESS"):
            Connection({}, Request(1, 1, gpu=False))


def test_a_guardian_kills_what_it_guards_once_its_pipe_closes():
    sleeper = subprocess.Popen(["sleep", "60"])
    guardian = _guard([sleeper.pid])
    assert sleeper.poll() is None
    guardian.stdin.close()
    assert sleeper.wait(timeout=20) == -9
    guardian.wait(timeout=20)


def test_a_guardian_that_is_ended_first_kills_nothing():
    sleeper = subprocess.Popen(["sleep", "60"])
    guardian = _guard([sleeper.pid])
    guardian.kill()
    guardian.communicate()
    time.sleep(0.1)
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()
