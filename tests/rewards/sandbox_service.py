"""A SandboxFusion service on this machine, of a few lines: it runs Python programs in processes, with SandboxFusion's answers."""

import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

from tests.rewards.test_judge import Judge, reply

MOST_SECONDS = 2.0
"""This service stops a program earlier than it is asked to, so that tests of endless programs end."""


def answer(status, printed="", return_code=0, run="Finished", message=""):
    ran = {"status": run, "execution_time": 0.1, "return_code": return_code, "stdout": printed, "stderr": ""}
    return {"status": status, "message": message, "compile_result": None, "run_result": ran, "files": {}}


def not_compiled(status="Finished"):
    compiled = {"status": status, "execution_time": 0.1, "return_code": 1, "stdout": "", "stderr": "error"}
    return {"status": "Failed", "message": "", "compile_result": compiled, "run_result": None, "files": {}}


FAILS_INSIDE = {"status": "SandboxError", "message": "no pod is\nfree", "compile_result": None, "run_result": None, "files": {}}


def result_of(body):
    assert body["language"] == "python"
    command = [sys.executable, "-I", "-S", "-c", body["code"]]
    try:
        done = subprocess.run(command, input=body["stdin"] or "", capture_output=True, text=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return answer("Failed", None, None, "TimeLimitExceeded")
    return answer("Failed" if done.returncode else "Success", done.stdout, done.returncode)


def runs_it(handler, body):
    reply(handler, 200, json.dumps(result_of(body)).encode())


def says(what):
    """A service that gives the same answer to every program."""
    return lambda handler, body: reply(handler, 200, json.dumps(what).encode())


class Together:
    """Waits until a number of programs run at the same time, then a moment longer, and records the largest number.

    Each program has printed 2.
    """

    def __init__(self, number):
        self._barrier = threading.Barrier(number, action=lambda: time.sleep(0.1))
        self._lock = threading.Lock()
        self._under_way = 0
        self.most = 0

    def __call__(self, handler, body):
        with self._lock:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        self._barrier.wait(60)
        with self._lock:
            self._under_way -= 1
        says(answer("Success", "2\n"))(handler, body)


@contextmanager
def sandbox_service():
    """A service that runs programs until a test sets another behaviour."""
    service = Judge()
    service.behaviours = [runs_it]
    try:
        yield service
    finally:
        service.released.set()
        service.server.shutdown()
        service.server.server_close()
