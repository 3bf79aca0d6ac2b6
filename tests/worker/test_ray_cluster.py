"""What can be said of a cluster without starting one; what it does is shown in test_ray_group.py."""

import os
import signal
import socket
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl_memopt.errors import ConfigError, WorkerError
from verl_memopt.run.process_tree import STOP_SIGNALS
from verl_memopt.worker.nodes import free_port
from verl_memopt.worker.ray_cluster import (
    SOCKET_BYTES,
    Connection,
    Request,
    own_folder,
    remove_old_sessions,
    stop_signals_blocked,
)


def test_a_request_asks_for_a_cpu_and_where_it_is_one_a_gpu_per_device():
    assert Request(1, 2, gpu=False).bundle == {"CPU": 1.0}
    assert Request(1, 2, gpu=True).bundle == {"CPU": 1.0, "GPU": 1.0}
    assert str(Request(2, 4, gpu=True)) == "trainer.nnodes=2, trainer.n_gpus_per_node=4 needs 4 CPU and 4 GPU on each node"


def test_several_nodes_without_an_address_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"trainer\.nnodes=2: a cluster started here has one node.*ray_init\.address"):
        Connection({}, Request(2, 1, gpu=False))


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_answers_is_refused_at_once(scheme):
    address = f"{scheme}127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(ConfigError, match=f"ray_kwargs.ray_init.address={address}: nothing answers there"):
        Connection({"address": address}, Request(1, 1, gpu=False))


OTHERS = {
    "something else": lambda link: link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "closes": lambda link: link.close(),
    "timed out": lambda link: None,
}


@pytest.mark.parametrize("answer", OTHERS)
def test_an_address_of_another_program_or_of_a_stopped_one_is_refused_at_once(answer, monkeypatch):
    """Ray would try again for a quarter of an hour."""
    monkeypatch.setattr("verl_memopt.worker.ray_cluster.CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        links = []

        def serve():
            link, _ = listener.accept()
            links.append(link)
            if answer == "closes":
                link.recv(1000)
            OTHERS[answer](link)

        served = pool.submit(serve)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"ray_init.address={address}: nothing answers there \(.*{answer}"):
            Connection({"address": address}, Request(1, 1, gpu=False))
        served.result()
        links[0].close()


@pytest.mark.parametrize(("address", "variable"), [("local", "127.0.0.1:6379"), (None, "local"), (None, "")])
def test_a_cluster_of_this_machine_is_none_that_was_joined_whatever_the_environment_says(address, variable, monkeypatch):
    """A joined one would have no token, listen on the network and outlive a killed driver."""
    monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(ConfigError, match="a cluster started here has one node"):
        Connection({"address": address}, Request(2, 1, gpu=False))


def test_the_address_in_the_environment_is_told_in_the_same_way(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nothing answers here while it is held
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=f"{address}: nothing answers there.*RAY_ADDRESS"):
            Connection({}, Request(1, 1, gpu=False))


def test_what_is_started_meanwhile_never_gets_the_signals_that_stop_a_run():
    with stop_signals_blocked():
        program = subprocess.Popen(["sleep", "60"])
    later = subprocess.Popen(["sleep", "60"])
    for number in STOP_SIGNALS:
        program.send_signal(number)
    later.send_signal(signal.SIGTERM)
    assert later.wait(timeout=20) == -signal.SIGTERM
    assert program.poll() is None
    program.kill()
    program.wait()
    assert not STOP_SIGNALS & signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_handlers_that_are_set_meanwhile_are_taken_back():
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals_blocked():
        signal.signal(signal.SIGTERM, lambda *_: None)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def short_folder():
    """A folder whose path leaves room for sockets; pytest's own has a long one."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_sessions_of_runs_that_ended_before_yesterday_are_removed_and_no_others(tmp_path):
    kept = ["session_2026-01-01_00-00-00_000000_4194305", f"session_2026-01-01_00-00-00_000000_{os.getpid()}", "session_latest"]
    old = "session_2026-01-01_00-00-00_000000_4194304"  # no process has an id beyond 4194304
    for name in [old, *kept]:
        (tmp_path / name / "logs").mkdir(parents=True)
        os.utime(tmp_path / name, (0, 0) if name != kept[0] else None)
    remove_old_sessions(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(kept)


def test_a_start_of_ray_removes_old_sessions_first(short_folder):
    (short_folder / "session_2026-01-01_00-00-00_000000_4194304").mkdir()
    os.utime(next(short_folder.iterdir()), (0, 0))
    with pytest.raises(ConfigError, match="Ray could not start"):  # because of the argument, before any process is started
        Connection({"_temp_dir": str(short_folder), "absent": 1}, Request(1, 1, gpu=False))
    assert list(short_folder.glob("session_*_*")) == []


def test_rays_folder_belongs_to_the_user_alone_even_if_it_was_open_before(short_folder, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(short_folder))
    folder = own_folder()
    assert folder == short_folder / f"verl_memopt_{os.getuid()}"
    folder.chmod(0o777)
    assert stat.S_IMODE(own_folder().stat().st_mode) == 0o700


def test_a_folder_whose_sockets_would_have_too_long_a_path_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * SOCKET_BYTES)))
    with pytest.raises(ConfigError, match=r"RAY_TMPDIR=.*: the path is \d+ bytes too long.*RAY_TMPDIR=/tmp"):
        own_folder()


def test_a_long_folder_for_temporary_files_is_avoided(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    long = tmp_path / ("x" * SOCKET_BYTES)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert own_folder() == Path("/tmp") / f"verl_memopt_{os.getuid()}"


def test_a_folder_that_cannot_be_made_or_is_a_link_is_refused_by_name(short_folder, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/proc")
    with pytest.raises(ConfigError, match=r"RAY_TMPDIR=/proc: .* cannot be created"):
        own_folder()
    monkeypatch.setenv("RAY_TMPDIR", str(short_folder))
    (short_folder / f"verl_memopt_{os.getuid()}").symlink_to("/tmp")
    with pytest.raises(ConfigError, match="is not a folder of yours"):
        own_folder()


def test_a_start_of_ray_that_takes_too_long_is_one_error(short_folder, monkeypatch):
    def too_late(**options):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", too_late)
    with pytest.raises(WorkerError, match=r"Ray could not start: The current node timed out.* Start the command again"):
        Connection({"_temp_dir": str(short_folder)}, Request(1, 1, gpu=False))
