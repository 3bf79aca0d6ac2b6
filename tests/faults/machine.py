"""A process that has imported everything a run needs, and forks a run in a second; its disk fills up or fails when told to.

The runs are those of the command line: the same arguments, exit code, output and files. What is left out is the import of torch
and transformers, which would be most of a test's time.
"""

import contextlib
import ctypes
import gc
import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import psutil

from tests.end_to_end.runs import ROOT, arguments, environment, survivors
from tests.faults.kills import KILL, kill_at

SOURCE = Path(__file__).with_name("disk.c")
BUILD = ROOT / "build" / "faults"
COMMAND = ["-m", "verl_memopt.trainer.main_ppo"]
PR_SET_PDEATHSIG = 1
MARK = "FAULT_RUN"
"""Variable that every process of a run inherits, however far it goes away from it."""


class Machine:
    """Starts runs, one process each, and says how they ended. A context manager; :meth:`close` ends what still runs."""

    def __init__(self, folder):
        """folder: an empty one for outputs. The disk's faults are in ``folder / "disk"``: give runs folders in there."""
        self.folder = Path(folder)
        self.disk = self.folder / "disk"
        self.disk.mkdir(parents=True)
        self._state = self.folder / "state"
        self.fill_after(0)
        env = environment(LD_PRELOAD=str(compiled()), FAULT_FOLDER=str(self.disk), FAULT_STATE=str(self._state))
        server = [sys.executable, "-m", "tests.faults.machine"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(server, cwd=ROOT, env=env, **pipes)
        self._lock = threading.Lock()
        self._numbers = iter(range(10**6))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def start(self, toy, run_dir, *overrides, **env):
        """Starts a training run of the toy task in a session of its own."""
        given = arguments(toy, run_dir, *overrides)
        return self._ask(given[given.index(COMMAND[-1]) + 1 :], env)

    def train(self, toy, run_dir, *overrides, **env):
        """Gives a training run that has ended."""
        return self.start(toy, run_dir, *overrides, **env).wait()

    def fill_after(self, changes):
        """Lets the disk take so many more changes (writes, files, folders, renames, syncs) and then none; 0 = no end."""
        self._state.write_bytes(struct.pack("qqq", 0, changes, 0))

    def refuse_reads(self, refused):
        """Lets the file that the variable FAULT_UNREADABLE names be read, or not."""
        self._state.write_bytes(struct.pack("qqq", 0, 0, int(refused)))

    def changes(self):
        """Gives how many changes the disk has been asked for since :meth:`fill_after`."""
        return struct.unpack("qqq", self._state.read_bytes())[0]

    def _ask(self, argv, env):
        output = self.folder / f"output-{next(self._numbers)}"
        asked = {"argv": argv, "env": {**env, MARK: str(output)}, "output": str(output)}
        with self._lock:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        return Run(int(answer), output)


class Run:
    """A run by its process id; its end is a file that the process it was forked from writes."""

    def __init__(self, pid, output):
        self.pid = pid
        self._output = output
        self._ended = output.with_suffix(".ended")

    @property
    def output(self):
        return self._output.read_text(errors="replace")

    def left(self, seconds=20):
        """Gives the processes of the run that are still there after a while: all of its session, and all that carry its mark."""
        return survivors([process for process in psutil.process_iter() if self._has(process)], seconds)

    def _has(self, process):
        try:
            return os.getsid(process.pid) == self.pid or process.environ().get(MARK) == str(self._output)
        except (psutil.Error, OSError):
            return False

    def poll(self):
        """Gives the exit code, negative for a signal, or None while it runs."""
        try:
            return int(self._ended.read_text())
        except (FileNotFoundError, ValueError):
            return None

    def wait(self, timeout=120):
        """Returns once it has ended. Raises TimeoutError, and kills it, when it does not."""
        waited = threading.Event()
        for _ in range(int(timeout * 50)):
            if self.poll() is not None:
                return self
            waited.wait(0.02)
        os.killpg(self.pid, signal.SIGKILL)
        raise TimeoutError(f"still running after {timeout} s:\n{self.output[-3000:]}")

    @property
    def returncode(self):
        return self.poll()


def compiled():
    """Gives the path of ``disk.c`` compiled, once for each version of it."""
    target = BUILD / f"disk-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as aside:
            made = Path(aside) / target.name
            subprocess.run(["gcc", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(made), "-ldl"], check=True, timeout=120)
            os.replace(made, target)
    return target


def serve():
    """Forks a run for each line of standard input and answers its process id; ends, with all runs, when the input does."""
    import verl_memopt.rollout.hf_engine
    import verl_memopt.trainer.run
    import verl_memopt.workers.worker  # noqa: F401

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if not pid:
            _run(asked)
        threading.Thread(target=_reap, args=(pid, asked["output"]), daemon=True).start()
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    gc.unfreeze()


def _reap(pid, output):
    _, status = os.waitpid(pid, 0)
    aside = Path(f"{output}.part")
    aside.write_text(str(os.waitstatus_to_exitcode(status)))
    aside.rename(f"{output}.ended")


def _run(asked):
    """Becomes the run."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(asked["env"])
    written = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, fd in ((0, nothing), (1, written), (2, written)):
        os.dup2(fd, number)
    # What was open in the process it was forked from is not this one's.
    os.closerange(3, 256)
    sys.argv = [COMMAND[-1], *asked["argv"]]
    code = 1
    try:
        if KILL in asked["env"]:
            kill_at(json.loads(asked["env"][KILL]))
        from verl_memopt.trainer.main_ppo import main

        code = main(asked["argv"])
    except SystemExit as error:
        code = error.code or 0
    except BaseException:  # noqa: BLE001 - told as the interpreter would
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
