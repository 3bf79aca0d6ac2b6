"""Groups of two workers on one small cluster, and whole drivers that end badly."""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.kills import members
from verl_memopt.distributed.device import leave_process_group
from verl_memopt.errors import ConfigError, DeviceMemoryError, RolloutError, WorkerError
from verl_memopt.run.processes import segments_of
from verl_memopt.worker.nodes import VISIBLE_DEVICES, Home, visible_devices
from verl_memopt.worker.ray_cluster import Connection, Request, _check_possible
from verl_memopt.worker.ray_group import start_ray_group

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

    def imported(self):
        import colorsys

        import mine

        return colorsys.rgb_to_hls(0, 0, 0), mine.NUMBER

    def exit_code_of_a_terminated_program(self):
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        return program.wait()

    def tell(self, *values):
        return self.placement.rank, values

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


class OwnWorker(Worker):
    """Waits, dies, or has no room, on devices of its own."""

    def call(self, phase, fault=None):
        if fault == "memory":
            raise DeviceMemoryError("update_critic: no room. Lower critic.ppo_max_token_len_per_gpu.")
        if fault == "death":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "delay":
            time.sleep(1.2)
        return phase, self.placement.world_size, os.environ["MASTER_PORT"]


def note(text):
    os.environ["NOTED"] = f"{text} with {os.environ['OMP_NUM_THREADS']} threads, rank {os.environ['RANK']}"


def reads_the_note(placement):
    raise RolloutError(os.environ["NOTED"])


def refuses(placement):
    raise RolloutError(f"rank {placement.rank} of {placement.world_size} has no engine")


def start(factory=Worker, devices=2, timeout_seconds=60):
    return start_ray_group(Request(1, devices, gpu=False), "cpu", timeout_seconds, {}, num_threads=3).build(factory)


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    from ray import cloudpickle

    # The test module has no name a worker process could import it by.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    folder = tmp_path_factory.mktemp("working")
    (folder / "colorsys.py").write_text("raise ImportError('a file of the working directory ran')")
    (folder / "mine.py").write_text("NUMBER = 7")
    with contextlib.chdir(folder):
        connection = Connection({"num_cpus": 5}, Request(1, 2, gpu=False))
    yield connection
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
    assert group.all("tell", "a", "b") == [(rank, ("a", "b")) for rank in (0, 1)]
    assert group.each("tell", [("a",), (1, 2)]) == [(0, ("a",)), (1, (1, 2))]


def test_members_are_processes_of_their_own_that_know_their_place_and_see_no_gpu(group):
    first, second = group.all("place")
    assert [(p.rank, p.world_size, p.local_rank, p.device) for p in (first, second)] == [(0, 2, 0, "cpu"), (1, 2, 1, "cpu")]
    assert (first.master_addr, first.master_port) == (second.master_addr, second.master_port)
    assert len({os.getpid(), *group.all("process")}) == 3
    assert group.all("gpus") == [("", [])] * 2


def test_a_file_of_the_working_directory_stands_for_no_module_of_python_and_is_found_all_the_same(group):
    assert group.all("imported") == [((0.0, 0.0, 0.0), 7)] * 2


def test_the_environment_is_set_before_the_factory_is_imported(group):
    port = group.all("place")[0].master_port
    for rank, (variables, threads, torch_came_first) in enumerate(group.all("environment")):
        assert variables == [str(rank), "2", str(rank), "2", "127.0.0.1", str(port), "3"]
        assert threads == "3"
        assert not torch_came_first


def test_a_member_that_a_signal_has_stopped_is_named_and_goes_on_when_it_may(group, monkeypatch, caplog):
    monkeypatch.setattr("verl_memopt.worker.ray_cluster.LOOK_SECONDS", 0.2)
    pid = group.all("process")[1]
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(2, os.kill, (pid, signal.SIGCONT))
    timer.start()
    assert [rank for rank, *_ in group.all("tell")] == [0, 1]
    timer.join()
    assert [record.getMessage() for record in caplog.records if str(pid) in record.getMessage()] == [
        f"process {pid} of this run is stopped by a signal, and the run waits for it: kill -CONT {pid}"
    ]


def test_a_member_that_stays_stopped_ends_the_group_and_is_named_with_what_it_did(doomed, monkeypatch):
    """Only in collectives would its peers give up by themselves."""
    monkeypatch.setattr("verl_memopt.worker.ray_cluster.LOOK_SECONDS", 0.2)
    monkeypatch.setattr(doomed._connection, "_patience_seconds", 0.1)
    pid = doomed.all("process")[1]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match=rf"worker 1 \(pid {pid} on .*\) was stopped by a signal in tell, .*nccl_timeout"):
        doomed.all("tell")


def test_a_stopped_member_is_named_and_not_the_peer_that_gave_up_on_it(doomed):
    pid = doomed.all("process")[0]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match=rf"worker 0 \(pid {pid} on .*\) was stopped by a signal in rank_1_raises"):
        doomed.all("rank_1_raises", RolloutError("the checkpoint could not be written: timed out"))
    os.kill(pid, signal.SIGKILL)  # Ray would take seconds to see that it does not end by itself


def test_shared_memory_that_members_could_not_remove_goes_with_their_group(monkeypatch, tmp_path):
    monkeypatch.setattr("verl_memopt.run.processes.SHARED_MEMORY", tmp_path)
    group = start(devices=1)
    own, other = (tmp_path / f"{segments_of(port)}2-tp" for port in (group.homes[0].port, 1))
    for path in (own, other):
        path.touch()
    group.shutdown()
    assert list(tmp_path.iterdir()) == [other]


def test_the_port_where_members_meet_is_held_until_they_do(group):
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", group.all("place")[0].master_port))


def test_a_tensor_makes_the_trip_unchanged_and_writable(group):
    import torch

    sent = torch.arange(1000, dtype=torch.float32)
    for _, (received,) in group.all("tell", sent):
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


@pytest.mark.parametrize(
    "method", ["rank_0_blames_its_peer_when_rank_1_is_killed", pytest.param("rank_1_is_killed", marks=pytest.mark.slow)]
)
def test_a_death_is_named_by_rank_and_pid_before_the_broken_connection_or_the_endless_wait_it_causes(doomed, method):
    pid = doomed.all("process")[1]
    with pytest.raises(WorkerError, match=rf"worker 1 \(pid {pid} on .*\) died in {method}: Worker exit type: SYSTEM_ERROR"):
        doomed.all(method)


def test_a_factory_that_raises_for_the_user_comes_back_as_it_was_raised_and_frees_its_room():
    with pytest.raises(RolloutError, match=r"^rank 0 of 1 has no engine$"):
        start(refuses, devices=1)


def test_a_request_the_cluster_can_never_hold_fails_at_once_with_both_sides_and_the_keys():
    with pytest.raises(ConfigError) as error:
        start(devices=64, timeout_seconds=10_000)
    message = str(error.value)
    assert "trainer.n_gpus_per_node=64 needs 64 CPU on each node" in message
    assert "5 CPU and 0 GPU" in message
    assert "ray_kwargs.ray_init.num_cpus" in message
    with pytest.raises(ConfigError, match="2 CPU and 2 GPU"):
        start_ray_group(Request(1, 2, gpu=True), "gpu", 10_000, {}, 1)


def test_processes_do_what_they_are_told_ahead_before_their_workers_are_built():
    group = start_ray_group(Request(1, 1, gpu=False), "cpu", 60, {}, 3, ahead=(f"{__name__}:note", "imports"))
    with pytest.raises(RolloutError, match="imports with 3 threads, rank 0"):
        group.build(reads_the_note)


def test_a_request_for_all_that_a_node_has_is_possible_and_one_device_more_is_not():
    _check_possible(Request(1, 5, gpu=False))
    for request in (Request(1, 6, gpu=False), Request(2, 1, gpu=False), Request(1, 1, gpu=True)):
        with pytest.raises(ConfigError, match=r"the cluster's nodes have: 5 CPU and 0 GPU"):
            _check_possible(request)


def test_a_request_without_room_gives_up_after_the_timeout_and_says_what_is_free(group):
    with pytest.raises(WorkerError, match="free now: 3 CPU and 0 GPU of 5 CPU and 0 GPU"):
        start(devices=4, timeout_seconds=1)


@pytest.fixture
def pooled():
    """A group of one worker and two critics on devices of their own, and a test that may end it."""
    requests = [Request(1, 1, gpu=False), Request(1, 2, gpu=False, section="critic")]
    group = start_ray_group(requests, "cpu", 60, {}, num_threads=3).build(Worker, {"critic": OwnWorker})
    processes = [psutil.Process(home.pid) for home in group.homes]
    yield group
    group.shutdown()
    assert psutil.wait_procs(processes, timeout=GONE_SECONDS)[1] == []


def test_a_pool_is_a_group_of_its_own_that_computes_while_the_others_do(pooled, monkeypatch, caplog):
    critic = pooled.pools["critic"]
    assert (pooled.world_size, critic.world_size, len(pooled.homes)) == (1, 2, 3)
    ports = {port for phase, size, port in critic.each("call", [("values",)] * 2) if (phase, size) == ("values", 2)}
    assert len(ports) == 1
    assert ports != {str(pooled.all("place")[0].master_port)}
    begun = critic.begin("call", [("update_critic", "delay")] * 2)
    assert pooled.all("tell", "a") == [(0, ("a",))]  # long before the critics have ended
    assert [phase for phase, *_ in begun.result()] == ["update_critic"] * 2
    critic.longest["values"] = 0.1
    monkeypatch.setattr("verl_memopt.worker.ray_group.SLOW_SECONDS", 0.5)
    critic.each("call", [("values", "delay")] * 2)
    (slow,) = [text for text in caplog.messages if "values took 0.1 seconds at most so far" in text]
    assert f"critic worker 0 (pid {critic.homes[0].pid} on" in slow
    assert f"critic worker 1 (pid {critic.homes[1].pid} on" in slow


FAULTS = {
    "death": (WorkerError, r"critic worker 1 \(pid {pid} on .*\) died in update_critic: Worker exit type: SYSTEM_ERROR"),
    "memory": (DeviceMemoryError, r"critic worker 1 \(pid {pid} on .*\): update_critic: no room"),
}


@pytest.mark.parametrize("fault", [pytest.param("death", marks=pytest.mark.slow), "memory"])
def test_a_fault_in_a_pool_is_named_by_role_and_rank_while_the_driver_waits_for_other_workers(pooled, fault):
    critic, (error, text) = pooled.pools["critic"], FAULTS[fault]
    pid = critic.homes[1].pid
    critic.begin("call", [("update_critic",), ("update_critic", fault)])
    with pytest.raises(error, match=text.format(pid=pid)):
        pooled.all("rank_1_is_killed")  # no such rank, so it waits for ever


def test_pools_that_do_not_fit_beside_the_policy_are_refused_with_the_keys_of_both():
    fits = Request(1, 3, gpu=False), Request(1, 2, gpu=False, section="critic")
    _check_possible(*fits)
    with pytest.raises(ConfigError) as error:
        _check_possible(*fits, Request(1, 1, gpu=False, section="reward_model"))
    message = str(error.value)
    for key in (
        "trainer.n_gpus_per_node=3 needs 3 CPU",
        "critic.n_gpus_per_node=2 needs",
        "reward_model.n_gpus_per_node=1 needs",
    ):
        assert key in message
    assert "all at once" in message
    assert "5 CPU and 0 GPU" in message


def homes(*members):
    """Gives the homes of members: (node, what Ray gave) each."""
    return [Home(rank, node, "10.0.0.1", 1, gpus) for rank, (node, gpus) in enumerate(members)]


def test_a_member_sees_the_gpus_of_its_group_on_its_node_in_the_order_of_local_ranks():
    group = homes(("a", ("3",)), ("a", ("2",)), ("b", ("0",)), ("b", ("10",)))
    assert [visible_devices(group, rank, "cuda")[VISIBLE_DEVICES] for rank in range(4)] == ["3,2", "3,2", "0,10", "0,10"]
    group = homes(("a", ("0",)), ("b", ("0",)), ("a", ("1",)))
    assert [visible_devices(group, rank, "cuda")[VISIBLE_DEVICES] for rank in range(3)] == ["0,1", "0", "0,1"]
    assert visible_devices(homes(("a", ()), ("a", ())), 1, "cuda") == {}


@pytest.mark.parametrize("gpus", [("0", "1"), ()])
def test_a_member_that_was_given_another_number_of_gpus_than_one_is_refused_with_the_way_out(gpus):
    with pytest.raises(ConfigError, match=r"Ray gave worker 1 on 10.0.0.1 the GPUs .* instead of one. Remove CUDA_VISIBLE_DEV"):
        visible_devices(homes(("a", ("0",)), ("a", gpus)), 1, "cuda")


DRIVER = """
import json, os, signal, sys, time
from verl_memopt.worker.ray_group import start_ray_group
from verl_memopt.worker.ray_cluster import Request

class Worker:
    def __init__(self, placement):
        self.placement = placement
        self.at_start = os.environ["CUDA_VISIBLE_DEVICES"], "torch" in sys.modules
    def see(self):
        place = self.placement
        visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        started_with, torch_came_first = self.at_start
        assert started_with == ",".join(visible) and not torch_came_first
        return [place.rank, place.local_rank, int(os.environ["LOCAL_RANK"]), visible, visible[place.local_rank]]
    def process(self):
        return os.getpid()
    def wait(self):
        time.sleep(1000)
    def fail(self):
        if self.placement.rank == 1:
            raise ValueError("no luck")
        time.sleep(1000)

interrupts = []
signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
some = [start_ray_group(Request(1, 2, gpu=True), "cuda", 60, {"num_cpus": 6, "num_gpus": 4}, 1) for _ in range(2)]
groups = [group.build(Worker) for group in some]
print(json.dumps([group.all("see") for group in groups]), flush=True)
while not interrupts:
    time.sleep(0.01)
time.sleep(0.5)
print("after", *(pid for group in groups for pid in group.all("process")), flush=True)
groups[0].all(sys.argv[1])
"""

OWN_ORDER = "a node where the user shows four of eight in an order of their own"
NODES = {
    "a node whose GPUs are all visible": ({}, ["0", "1", "2", "3"]),
    OWN_ORDER: ({VISIBLE_DEVICES: "7,5,6,4"}, ["7", "5", "6", "4"]),
    "a node that Ray is told to leave alone": (
        {VISIBLE_DEVICES: "GPU-a,GPU-b,GPU-c,GPU-d", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"},
        ["GPU-a", "GPU-b", "GPU-c", "GPU-d"],
    ),
}
"""What the environment of the node says -> the names of its four GPUs in the order of Ray's slots."""


@pytest.fixture
def driver(request, tmp_path):
    """Starts a driver with a cluster of its own in a session of its own, as a terminal would, and gives what it printed first.

    Four GPUs are declared and not there, and the home folder cannot be written.
    """
    node, then = request.param
    variables, _ = NODES[node]
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    root = Path(__file__).parents[2]
    clean = {name: value for name, value in os.environ.items() if name != VISIBLE_DEVICES and not name.startswith("RAY_")}
    process = subprocess.Popen(
        [sys.executable, str(script), then],
        cwd=root,
        env={**clean, "PYTHONPATH": str(root), "HOME": "/proc", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    first = process.stdout.readline()
    assert first, process.stderr.read()
    yield process, json.loads(first)
    process.kill()
    process.communicate()


DRIVERS = [(OWN_ORDER, "wait"), *(pytest.param((node, "fail"), marks=pytest.mark.slow) for node in NODES)]


@pytest.mark.parametrize("driver", DRIVERS, indirect=True, ids=lambda each: f"{each[0]}, {each[1]}")
def test_groups_use_gpus_of_their_own_and_ctrl_c_reaches_the_driver_alone_whose_end_leaves_nothing_behind(driver, request):
    """A worker's device is the one of its local rank among those it sees. A driver ends by a kill or by a worker's error."""
    process, (first, second) = driver
    node, then = request.node.callspec.params["driver"]
    for group in (first, second):
        assert [(rank, local_rank, variable) for rank, local_rank, variable, _, _ in group] == [(0, 0, 0), (1, 1, 1)]
        assert group[0][3] == group[1][3] == [device for *_, device in group]
    assert sorted(device for group in (first, second) for *_, device in group) == sorted(NODES[node][1])

    descendants = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    word, *pids = process.stdout.readline().split()
    assert word == "after"
    assert len(pids) == 4
    assert {int(pid) for pid in pids} <= {child.pid for child in descendants}
    if then == "wait":
        process.kill()
    _, errors = process.communicate(timeout=60)
    if then == "fail":
        assert process.returncode == 1
        assert "WorkerError: worker 1 (pid" in errors
        assert "ValueError: no luck" in errors
    else:
        assert "Traceback" not in errors
    assert psutil.wait_procs(descendants, timeout=GONE_SECONDS)[1] == []


@pytest.fixture
def vllm_peers(monkeypatch, tmp_path):
    """vLLM's own check of peer access for two ranks, in a process that sees ``visible``; all GPUs are connected.

    Stand-ins: its CUDA platform (the part that maps devices is its own), the driver's answer for a pair of devices, and the
    child process that copies between each pair.
    """
    pytest.importorskip("vllm")
    leave_process_group()  # where an earlier test has left one, vLLM asks for its own groups beside it
    import torch
    from vllm.distributed.device_communicators import all_reduce_utils, custom_all_reduce
    from vllm.platforms.interface import Platform

    def check(visible, copies):
        count = len(visible.split(","))

        def connected(device, peer):
            assert max(device, peer) < count
            return True

        def probe(command, input, capture_output):
            sources, targets, path = pickle.loads(input)
            Path(path).write_bytes(pickle.dumps([connected(*pair) for pair in zip(sources, targets, strict=True)]))
            return subprocess.CompletedProcess(command, 0)

        class CudaPlatform(Platform):
            device_control_env_var = VISIBLE_DEVICES
            device_count = staticmethod(lambda: count)

        for module in (all_reduce_utils, custom_all_reduce):
            monkeypatch.setattr(module, "current_platform", CudaPlatform)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", connected)
        monkeypatch.setattr(all_reduce_utils.subprocess, "run", probe)
        monkeypatch.setattr(all_reduce_utils, "_gpu_p2p_access_cache", None)
        monkeypatch.setenv(VISIBLE_DEVICES, visible)
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / visible))
        monkeypatch.setenv("VLLM_SKIP_P2P_CHECK", "0" if copies else "1")
        return [custom_all_reduce._can_p2p(rank, 2) for rank in (0, 1)]

    return check


CHECKS = pytest.mark.parametrize("copies", [False, True], ids=["the driver is asked", "copies are tried"])
"""vLLM asks the driver, its default, or copies between each pair of devices (VLLM_SKIP_P2P_CHECK=0)."""


@CHECKS
def test_vllm_finds_the_peer_of_each_tensor_parallel_rank_among_the_devices_it_sees(vllm_peers, copies):
    group = homes(("a", ("2",)), ("a", ("3",)))
    assert vllm_peers(visible_devices(group, 1, "cuda")[VISIBLE_DEVICES], copies) == [True, True]


@CHECKS
def test_vllm_fails_where_a_worker_sees_its_own_gpu_alone(vllm_peers, copies):
    """Why a worker must see its neighbours' GPUs. Once this no longer fails, Ray's own setting would do."""
    with pytest.raises(LookupError):
        vllm_peers("3", copies)


def listening(process):
    """Gives the addresses at which a process takes connections."""
    found = process.net_connections()
    return {connection.laddr.ip.removeprefix("::ffff:") for connection in found if connection.status == psutil.CONN_LISTEN}


def test_a_cluster_of_one_node_listens_on_the_loopback_address_only_and_keeps_its_files_to_the_user(group):
    descendants = psutil.Process().children(recursive=True)
    addresses = set().union(*map(listening, [psutil.Process(), *descendants]))
    assert addresses == {"127.0.0.1"}
    logs = Path(group._connection.logs())
    assert logs.is_dir()
    private = [
        folder for folder in logs.parents if folder.stat().st_mode & 0o777 == 0o700 and folder.stat().st_uid == os.getuid()
    ]
    assert private


def test_members_and_rays_processes_live_through_a_signal_to_all_and_what_members_start_does_not(group):
    alive = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    others = ("multiprocessing", "tests.forked")  # what other tests of this process have started
    descendants = [child for child in alive if not any(name in " ".join(child.cmdline()) for name in others)]
    for child in descendants:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            child.send_signal(number)
    assert group.all("exit_code_of_a_terminated_program") == [-signal.SIGTERM] * 2
    assert set(psutil.wait_procs(descendants, timeout=1)[1]) == set(descendants)


def test_a_guardian_that_was_killed_has_a_successor_at_once_whatever_the_driver_does(cluster):
    (guardian,) = members(os.getpid())["guardian"]
    guardian.kill()
    deadline = time.monotonic() + 20
    while members(os.getpid()).get("guardian", [guardian]) == [guardian] and time.monotonic() < deadline:
        time.sleep(0.05)
    (successor,) = members(os.getpid())["guardian"]
    assert successor != guardian
    assert cluster.lost() is None


def test_shutdown_ends_the_processes_and_may_be_called_again(group):
    processes = [psutil.Process(pid) for pid in group.all("process")]
    group.shutdown()
    assert psutil.wait_procs(processes, timeout=GONE_SECONDS)[1] == []
    group.shutdown()
