"""A process that has imported what a run needs, and forks a run in a second.

The runs are those of the command line: the same arguments, exit code, output and files. What is left out is the import of torch
and transformers, which would be most of a test's time.
"""

import contextlib
import ctypes
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from tests.faults.kills import KILL, kill_at

ROOT = Path(__file__).parents[1]
PR_SET_PDEATHSIG = 1


class ForkServer:
    """Starts runs, one process each. A context manager; :meth:`close` ends what still runs."""

    def __init__(self, folder, env):
        """folder: an empty one for outputs. env: all variables of the server, which its runs inherit."""
        self.folder = Path(folder)
        server = [sys.executable, "-m", "tests.forked"]
        self._process = subprocess.Popen(
            server, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        self._lock = threading.Lock()
        self._numbers = iter(range(10**6))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def fork(self, argv, env=(), apart=False):
        """Starts ``python -m verl_memopt.trainer.main_ppo`` with ``argv`` in a session of its own.

        env: variables on top of the server's. apart: errors have a file of their own, else they go where output goes.
        """
        output = self.folder / f"output-{next(self._numbers)}"
        errors = output.with_suffix(".errors") if apart else output
        asked = {"argv": argv, "env": dict(env), "output": str(output), "errors": str(errors)}
        with self._lock:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        return ForkedRun(int(answer), output, errors)


class ForkedRun:
    """A run by its process id, with the names of ``subprocess.Popen``; its end is a file that its server writes."""

    def __init__(self, pid, output, errors):
        self.pid = pid
        self._output, self._errors = output, errors
        self._ended = output.with_suffix(".ended")

    @property
    def stdout(self):
        return self._output.read_text(errors="replace")

    @property
    def stderr(self):
        return self._errors.read_text(errors="replace")

    @property
    def returncode(self):
        return self.poll()

    def poll(self):
        """Gives the exit code, negative for a signal, or None while it runs."""
        try:
            return int(self._ended.read_text())
        except FileNotFoundError:
            return None

    def wait(self, timeout=120):
        """Returns itself once it has ended. Raises TimeoutError, and kills it, when it does not."""
        waited = threading.Event()
        for _ in range(int(timeout * 50)):
            if self.poll() is not None:
                return self
            waited.wait(0.02)
        os.killpg(self.pid, signal.SIGKILL)
        raise TimeoutError(f"still running after {timeout} s:\n{self.stdout[-3000:]}")

    def communicate(self, timeout=120):
        """Gives output and errors once it has ended."""
        self.wait(timeout)
        return self.stdout, self.stderr

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


@functools.cache
def shared_server():
    """Gives the server of this test process, started when it is first asked for. It ends with the process."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": str(ROOT)}
    folder = tempfile.TemporaryDirectory(prefix="forked-")
    server = ForkServer(folder.name, {**os.environ, **quiet})
    server.outputs = folder  # removed with the server
    return server


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
            _run(**asked)
        threading.Thread(target=_reap, args=(pid, asked["output"]), daemon=True).start()
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    gc.unfreeze()


def _reap(pid, output):
    _, status = os.waitpid(pid, 0)
    aside = Path(f"{output}.part")
    aside.write_text(str(os.waitstatus_to_exitcode(status)))
    aside.rename(f"{output}.ended")


def _run(argv, env, output, errors):
    """Becomes the run."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(env)
    writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, (path, flags) in enumerate([(os.devnull, os.O_RDONLY), (output, writing), (errors, writing)]):
        os.dup2(os.open(path, flags), number)
    # What was open in the process it was forked from is not this one's.
    os.closerange(3, 256)
    sys.argv = ["verl_memopt.trainer.main_ppo", *argv]
    code = 1
    try:
        if KILL in env:
            kill_at(json.loads(env[KILL]))
        from verl_memopt.trainer.main_ppo import main

        code = main(argv)
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
