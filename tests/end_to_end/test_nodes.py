"""Two machines, as network namespaces of this one: their addresses, host names, ports and a cut link are real."""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.runs import RECIPES, ROOT, environment, learned, metrics, steps_here, wait_for_step

AR = "actor_rollout_ref"
SHORT = [
    f"{AR}.rollout.name=hf", "data.train_batch_size=8", f"{AR}.actor.ppo_mini_batch_size=8", "data.max_response_length=4",
    "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.logger=[jsonl]", "trainer.track_memory_every_steps=0",
]  # fmt: skip
SLOW = pytest.mark.slow
FAULT_SECONDS = 30
"""A lost or slow machine is named within this time."""

ENTER = """#!/bin/bash
# enter a|b COMMAND...: run a command on a machine with a network, a host name and files of Ray. HIDDEN is empty on the second.
machine=$1; shift
exec nsenter --net=/var/run/netns/{name}$machine unshare --uts --mount bash -c '
    hostname node'$machine'; mount --bind {folder}/hosts_'$machine' /etc/hosts
    mkdir -p /tmp/ray {folder}/ray_'$machine'; mount --bind {folder}/ray_'$machine' /tmp/ray
    for hidden in '"$([ $machine = a ] || echo $HIDDEN)"'; do mount -t tmpfs none $hidden; done
    exec "$@"' _ "$@"
"""
SSH = """#!/bin/bash
# ssh HOST COMMAND, with the environment of a login
case $1 in {one}) machine=a ;; {other}) machine=b ;; *) exit 255 ;; esac
shift
exec env -i HOME="$HOME" PATH="$PATH" OMP_NUM_THREADS=1 HIDDEN="$HIDDEN" {folder}/enter $machine bash -c "cd /; $*"
"""
SRUN = """#!/bin/bash
# srun OPTIONS... --nodelist=HOST COMMAND..., of which Slurm passes the environment on
while [ "${{1#--}}" != "$1" ]; do case $1 in --nodelist={one}) machine=a ;; --nodelist={other}) machine=b ;; esac; shift; done
exec {folder}/enter $machine "$@"
"""
SCONTROL = '#!/bin/bash\n[ "$*" = "show hostnames two_nodes" ] && printf "%s\\n" {one} {other}\n'


@dataclass(frozen=True)
class Machines:
    """Two of them, joined by a cable. Commands run on the first."""

    name: str
    folder: Path
    addresses: tuple[str, str]

    def start(self, toy, run_dir, *overrides, **variables):
        """Starts the script for several machines on the first one."""
        script = ROOT / "examples" / "memory_optimization" / "run_multi_node.sh"
        command = [self.folder / "enter", "a", "bash", script, *SHORT, f"trainer.default_local_dir={run_dir}", *overrides]
        more = {
            "PATH": f"{self.folder}:{os.environ['PATH']}", "NODES": " ".join(self.addresses), "NGPUS_PER_NODE": "1", "HIDDEN": "",
            "ROLLOUT_TP": "1", "TOY_DIR": str(toy), "DEVICE": "cpu", "RAY_WAIT_SECONDS": "100", **variables,
        }  # fmt: skip
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(**more), stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def train(self, *arguments, code=0, **variables):
        """Gives what a run of the script has printed, once it has ended with this exit code and left no process."""
        return self.output(self.start(*arguments, **variables), code)

    def output(self, process, code=0):
        text, _ = process.communicate(timeout=300)
        assert process.returncode == code, text[-4000:]
        deadline = time.monotonic() + 40
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not self.processes(), text[-4000:]
        return text

    def processes(self, machine="[ab]"):
        """Gives the processes of one machine, or of both."""
        found = []
        for one in "ab" if machine == "[ab]" else machine:
            pids = subprocess.run(["ip", "netns", "pids", f"{self.name}{one}"], capture_output=True, text=True, check=True)
            for pid in pids.stdout.split():
                with contextlib.suppress(psutil.Error):
                    found.append(psutil.Process(int(pid)))
        return found

    def cable(self, state):
        subprocess.run(["ip", "-n", f"{self.name}b", "link", "set", f"{self.name}b", state], check=True)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    if os.getuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        pytest.skip("network namespaces need root and iproute2")
    name, folder, addresses = (
        f"vm{os.getpid()}",
        tmp_path_factory.mktemp("machines"),
        (f"10.77.{os.getpid() % 250}.1", f"10.77.{os.getpid() % 250}.2"),
    )
    for program, text in (("enter", ENTER), ("ssh", SSH), ("srun", SRUN), ("scontrol", SCONTROL)):
        file = folder / program
        file.write_text(text.format(name=name, folder=folder, one=addresses[0], other=addresses[1]))
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def ip(*arguments):
        return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)

    made = [ip("netns", "add", f"{name}{machine}") for machine in "ab"]
    made.append(ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b"))
    if any(each.returncode for each in made):
        pytest.skip(f"no network namespaces here: {made[-1].stderr}")
    for machine, address in zip("ab", addresses, strict=True):
        # As Debian and Ubuntu have it: the name of the host is a loopback address.
        (folder / f"hosts_{machine}").write_text(f"127.0.0.1 localhost\n127.0.1.1 node{machine}\n")
        link = f"{name}{machine}"
        ip("link", "set", link, "netns", link)
        ip("-n", link, "addr", "add", f"{address}/24", "dev", link)
        for device in ("lo", link):
            ip("-n", link, "link", "set", device, "up")
    both = Machines(name, folder, addresses)
    yield both
    for process in both.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for machine in "ab":
        ip("netns", "del", f"{name}{machine}")


@pytest.fixture(scope="module")
def alone(toy, tmp_path_factory):
    """The rows of a run of one worker in this process, whose numbers those of two machines must have."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    steps = ["memory=large_multi_gpu", "trainer.total_training_steps=8", *SHORT]
    return steps_here(toy, run_dir, *steps, config=("toy_grpo", RECIPES))


def check_numbers(rows, alone):
    assert rows
    for step, row in rows.items():
        for name in ("critic/score/mean", "actor/loss", "actor/grad_norm"):
            assert row[name] == pytest.approx(alone[step][name], rel=1e-4, abs=1e-6), (step, name)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("workers", "steps", "first", "second"),
    [("1", 2, "rank 0", "rank 1"), pytest.param("2", 5, "ranks 0 to 1", "ranks 2 to 3", marks=SLOW)],
    ids=["a worker each", "two workers each"],
)
def test_two_machines_train_as_one(machines, toy, alone, tmp_path, workers, steps, first, second):
    text = machines.train(toy, tmp_path / "run", f"trainer.total_training_steps={steps}", NGPUS_PER_NODE=workers)
    rows = metrics(tmp_path / "run")
    assert list(rows) == list(range(1, steps + 1))
    check_numbers(rows, alone)
    assert f"{first}: {machines.addresses[0]} (this machine)" in text
    assert f"{second}: {machines.addresses[1]}\n" in text


@SLOW
@pytest.mark.timeout(400)
def test_a_job_of_slurm_trains_on_its_nodes(machines, toy, alone, tmp_path):
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "two_nodes", "NODES": ""}
    machines.train(toy, tmp_path / "run", "trainer.total_training_steps=1", **job)
    check_numbers(metrics(tmp_path / "run"), alone)


@SLOW
@pytest.mark.timeout(400)
def test_a_machine_that_does_not_see_the_runs_folder_and_the_model_is_named_with_the_way_out(machines, toy, tmp_path):
    own = tmp_path / "model"
    shutil.copytree(toy / "model", own)
    hidden = {"HIDDEN": str(tmp_path)}
    text = machines.train(toy, tmp_path / "run", f"{AR}.model.path={own}", code=2, **hidden)
    (error,) = [
        line
        for line in text.splitlines()
        if line.startswith(f"ConfigError: node {machines.addresses[1]} differs from this machine")
    ]
    assert f"it does not see trainer.default_local_dir={tmp_path / 'run'}" in error
    assert f"{AR}.model.path={own}: there is no such path" in error


class Watched:
    """A run of the script whose lines are read as they come, once it has logged some steps."""

    def __init__(self, machines, toy, run_dir, *overrides, steps=1, **variables):
        endless = "trainer.total_training_steps=100000"
        self.lines, self.process = [], machines.start(toy, run_dir, endless, *overrides, **variables)
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout))
        self._reader.start()
        wait_for_step(self, run_dir, steps - 1)

    def poll(self):
        return self.process.poll()

    def communicate(self):
        return "".join(self.lines), None

    def waits(self, holds, seconds):
        """Tell whether a line of which ``holds(line)`` has come within some seconds."""
        deadline = time.monotonic() + seconds
        while not (found := any(map(holds, self.lines))) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def ended(self):
        """Return the exit code and the lines, once it has ended."""
        code = self.process.wait(timeout=120)
        self._reader.join(timeout=60)
        return code, self.lines


def lose_machine(machines):
    for process in machines.processes("b"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


FAULTS = {"a machine that dies": lose_machine, "a cable that is cut": lambda machines: machines.cable("down")}


@SLOW
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_lost_machine_is_named_and_the_run_goes_on_with_the_other(machines, toy, alone, tmp_path, fault):
    run_dir = tmp_path / "run"
    run = Watched(machines, toy, run_dir, "trainer.save_freq=1", steps=2)
    fault(machines)
    try:
        named = run.waits(
            lambda line: machines.addresses[1] in line and ("does not answer" in line or line.startswith("WorkerError: ")),
            FAULT_SECONDS,
        )
        code, lines = run.ended()
    finally:
        machines.cable("up")
    text = "".join(lines)
    assert named, text[-3000:]
    assert code == 1, text[-3000:]
    assert any(line.startswith("WorkerError: ") and machines.addresses[1] in line for line in lines), text[-3000:]
    assert "Traceback" not in text.partition("WorkerError: ")[0]  # after it Ray itself may say why it cannot drain a node
    lose_machine(machines)
    last = max(metrics(run_dir))
    rest = f"trainer.total_training_steps={last + 1}"
    machines.train(toy, run_dir, rest, "trainer.n_gpus_per_node=1", "trainer.nnodes=1", NODES=machines.addresses[0])
    rows = metrics(run_dir)
    assert max(rows) == last + 1
    check_numbers({step: row for step, row in rows.items() if step in alone}, alone)


@SLOW
@pytest.mark.timeout(400)
def test_a_machine_that_is_slowed_to_a_tenth_is_named(machines, toy, tmp_path):
    run_dir = tmp_path / "run"
    long = [f"{AR}.rollout.n=64", f"{AR}.rollout.ignore_eos=true", "data.max_response_length=64"]
    run = Watched(machines, toy, run_dir, *long)
    (worker,) = [each for each in machines.processes("b") if each.name().startswith("ray::Member")]
    deadline, named = time.monotonic() + FAULT_SECONDS, False
    while not named and time.monotonic() < deadline:
        worker.suspend()
        time.sleep(0.9)
        worker.resume()
        named = run.waits(lambda line: "wait for worker 1 (" in line and machines.addresses[1] in line, 0.1)
    os.killpg(run.process.pid, signal.SIGINT)
    _, lines = run.ended()
    assert named, "".join(lines)[-3000:]
    assert learned(metrics(run_dir)[1])


@SLOW
@pytest.mark.timeout(600)
def test_a_policy_on_one_machine_and_its_critic_on_the_other_train_as_one_and_a_lost_critic_is_named(machines, toy, tmp_path):
    steps = ["trainer.total_training_steps=3", *SHORT]
    profile = ["memory=large_multi_gpu", *steps]
    alone = steps_here(toy, tmp_path / "alone", *profile, config=("toy", ROOT / "recipe" / "ppo"))
    own = ["trainer.nnodes=1", "critic.enable_resource_pool=true", "critic.nnodes=1", "critic.n_gpus_per_node=1"]
    run_dir = tmp_path / "run"
    text = machines.train(toy, run_dir, "trainer.total_training_steps=3", *own, ALGORITHM="ppo")
    rows = metrics(run_dir)
    assert list(rows) == [1, 2, 3]
    for step, row in rows.items():
        for name in ("critic/score/mean", "critic/vf_loss", "critic/grad_norm", "actor/loss", "actor/grad_norm"):
            assert row[name] == pytest.approx(alone[step][name], rel=1e-4, abs=1e-6), (step, name)
    first, second = machines.addresses
    assert f"policy, rank 0: {first} (this machine)" in text
    assert f"critic, rank 0: {second}\n" in text
    lost = Watched(machines, toy, tmp_path / "lost", *own, ALGORITHM="ppo")
    begun = time.monotonic()
    (worker,) = [each for each in machines.processes("b") if each.name().startswith("ray::Member")]
    worker.kill()
    code, lines = lost.ended()
    took = time.monotonic() - begun
    errors = [line for line in lines if line.startswith("WorkerError: critic worker 0 (pid ")]
    assert errors, "".join(lines)[-3000:]
    assert second in errors[0]
    assert code == 1
    assert took < 2 * FAULT_SECONDS, "with the end of Ray on both machines"
