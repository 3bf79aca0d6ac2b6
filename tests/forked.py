"""A process that has imported torch and transformers, and forks a Python process from itself in place of starting one.

What it forks has the arguments, variables, folder, output and exit code of a process that was started; what is left out is the
import, which would be most of a test's time. ``tests/forked_python`` stands in for the interpreter in scripts. A second such
process has a fake GPU.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from huggingface_hub import constants

from recipe.rloo.memory_study import fake_guard
from tests.virtual_gpu.guard import load_guard

ROOT = Path(__file__).parents[1]
PYTHON = str(ROOT / "tests" / "forked_python")
"""Takes an interpreter's place where the variables of :meth:`ForkServer.variables` are set."""
ADDRESS, INTERPRETER = "FORKED_PYTHON_ADDRESS", "FORKED_PYTHON_INTERPRETER"
CHILDREN = "FORKED_PYTHON_CHILDREN"
"""A variable whose presence says that what a forked process starts by ``sys.executable`` is forked too, but no further."""
FAKE_GPU = "fake-gpu"
"""Asks for a server in which autograd takes fake ``cuda`` tensors."""
CALL = """
import pickle, sys
from recipe.rloo.memory_study.fake_guard import call_in_fake_process
with open(sys.argv[1], "rb") as request, open(sys.argv[2], "wb") as answer:
    function, arguments = pickle.load(request)
    pickle.dump(call_in_fake_process(function, *arguments), answer)
"""
PR_SET_PDEATHSIG = 1
LONGEST_REQUEST = 2**20


class ForkServer:
    """Starts Python processes that die with it. A context manager; :meth:`close` ends it and them."""

    def __init__(self, folder, env, *kind):
        """folder: an empty one. env: all variables of the server, and of what it forks where nothing else is said.

        kind: nothing, or :data:`FAKE_GPU`.
        """
        self.folder, self.env = Path(folder), dict(env)
        self._address = str(self.folder / "socket")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", self._address, *kind],
            cwd=ROOT, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._process.stdout.readline()
        self._numbers = iter(range(10**6))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def is_alive(self):
        return self._process.poll() is None

    def variables(self):
        """Return the environment that :data:`PYTHON` needs."""
        return {ADDRESS: self._address, INTERPRETER: sys.executable}

    def fork(self, arguments, env=None, apart=False):
        """Start ``python ARGUMENTS`` at the repository's root, at the head of a session of its own.

        Args:
            env: All its variables. None = the server's.
            apart: Write errors to a file of their own, instead of where output goes.
        """
        output = self.folder / f"output-{next(self._numbers)}"
        errors = output.with_suffix(".errors") if apart else output
        writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        streams = [os.open(path, flags) for path, flags in ((os.devnull, os.O_RDONLY), (output, writing), (errors, writing))]
        asked = {"arguments": arguments, "env": self.env if env is None else env, "cwd": str(ROOT), "session": True}
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self._address)
        socket.send_fds(connection, [json.dumps(asked).encode()], streams)
        for stream in streams:
            os.close(stream)
        return ForkedProcess(connection, output, errors)


class ForkedProcess:
    """A forked process with the interface of ``subprocess.Popen``."""

    def __init__(self, connection, output, errors):
        self._connection, self._output, self._errors = connection, output, errors
        self.pid = int(connection.recv(64))
        self.returncode = None

    @property
    def stdout(self):
        return self._output.read_text(errors="replace")

    @property
    def stderr(self):
        return self._errors.read_text(errors="replace")

    def poll(self):
        """Return the exit code, negative for a signal, or None while it runs."""
        with contextlib.suppress(BlockingIOError):
            self._receive(0)
        return self.returncode

    def wait(self, timeout=120):
        """Wait for the end and return the process itself. A process that does not end is killed: TimeoutError."""
        try:
            self._receive(timeout)
        except TimeoutError:
            os.killpg(self.pid, signal.SIGKILL)
            raise TimeoutError(f"still running after {timeout} s:\n{self.stdout[-3000:]}") from None
        return self

    def communicate(self, timeout=120):
        """Return output and errors once it has ended."""
        self.wait(timeout)
        return self.stdout, self.stderr

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def _receive(self, timeout):
        if self.returncode is None:
            self._connection.settimeout(timeout)
            self.returncode = int(self._connection.recv(64))
            self._connection.close()


def shared_server(*kind):
    """Return the server of this test process, started on first use. It ends with the process.

    ``kind`` is as in :class:`ForkServer`.
    """
    if kind not in _started or not _started[kind].is_alive():
        _started[kind] = _start_server(*kind)
    return _started[kind]


_started = {}


def _start_server(*kind):
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": str(ROOT)}
    folder = tempfile.TemporaryDirectory(prefix="forked-")
    server = ForkServer(folder.name, {**os.environ, **quiet}, *kind)
    server.outputs = folder  # removed with the server
    return server


def call_on_fake_gpu(function, *arguments):
    """Return the result of ``call_in_fake_process``, from a process that need not import torch.

    ``function`` is ``module:name``. Raises NoCompilerError, or an assertion with the traceback of the function's error.
    """
    fake_guard.compiled_guard()  # a machine without a compiler has no such server
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request", Path(folder) / "answer"
        request.write_bytes(pickle.dumps((function, arguments)))
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = shared_server(FAKE_GPU).fork(["-c", CALL, str(request), str(answer)], env, apart=True).wait(300)
        assert process.returncode == 0, f"{function} failed on the fake device:\n{process.stderr[-3000:]}"
        return pickle.loads(answer.read_bytes())


def serve(address, *kind):
    """Fork a process for each connection, and send it the process id and then the exit code. Ends with standard input."""
    if kind:
        load_guard()  # before torch
        fake_guard._loaded = True
    import pyarrow.dataset  # noqa: F401
    import transformers.models.auto.tokenization_auto
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import verl_memopt.cli
    import verl_memopt.rollout.hf_engine
    import verl_memopt.trainer.loop
    import verl_memopt.worker.worker  # noqa: F401

    if kind:
        import benchmarks.gpu_cost.one_copy  # noqa: F401
    _prepare_settings_and_charts()
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    threading.Thread(target=_end_with_input, daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        connection, _ = listener.accept()
        message, streams, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, 3)
        if not message:  # who asked was killed before it had
            connection.close()
            continue
        # From this thread and no other: what is forked dies with the thread that did it.
        pid = os.fork()
        if not pid:
            _become(json.loads(message), streams)
        for stream in streams:
            os.close(stream)
        try:
            connection.send(str(pid).encode())
        except BrokenPipeError:  # who asked was killed, and nobody else would end it
            os.kill(pid, signal.SIGKILL)
        threading.Thread(target=_tell_end, args=(pid, connection), daemon=True).start()


def _prepare_settings_and_charts():
    """Do once what each run would repeat: parse the packaged settings, import the plotting library and find its fonts."""
    from verl_memopt.config.loader import compose_mapping
    from verl_memopt.observe.charts import draw_reward

    compose_mapping("rloo_trainer", ["data.train_files=train.parquet"])
    with tempfile.TemporaryDirectory() as folder:
        draw_reward([{"step": 1, "critic/score/mean": 0.5}], Path(folder) / "chart.png")


def _end_with_input():
    sys.stdin.buffer.read()
    os._exit(0)


def _tell_end(pid, connection):
    _, status = os.waitpid(pid, 0)
    with connection, contextlib.suppress(BrokenPipeError):
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(asked, streams):
    """Turn this process into the requested one. Never returns."""
    if asked["session"]:
        os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    # What was open in the process it was forked from is not this one's.
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(asked["env"])
    constants.HF_HUB_CACHE = os.environ.get("HF_HUB_CACHE", constants.HF_HUB_CACHE)  # read when it was imported
    os.chdir(asked["cwd"])
    if os.environ.pop(CHILDREN, None):
        sys.executable = PYTHON
    sys.stdin = open(0)  # noqa: SIM115 - as the interpreter's, for as long as the process lives
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    code = 1
    try:
        _interpret(asked["arguments"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(error.code + "\n")
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:  # noqa: BLE001 - told as the interpreter would
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _interpret(arguments):
    """Run what ``python ARGUMENTS`` would: a module, a program, standard input or a file."""
    how, *rest = arguments
    if how == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how in ("-c", "-"):
        text, sys.argv = (rest[0], ["-c", *rest[1:]]) if how == "-c" else (sys.stdin.read(), ["-", *rest])
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(how).resolve().parent))
        runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    serve(*sys.argv[1:])
