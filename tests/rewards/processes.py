"""Whether processes have ended, for tests that start some."""

import time
from pathlib import Path


def gone(pid):
    """Return whether the process has ended. One whose parent has not read its exit code counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def all_gone(pids):
    return all(wait_until(lambda pid=pid: gone(pid)) for pid in pids)


STARTS_OTHERS = """
import os, subprocess, sys, time

NOTE = "import os, time; open({folder!r} + '/' + str(os.getpid()), 'w').close(); time.sleep(300)"
DAEMON = "import os\\nif os.fork(): os._exit(0)\\nos.setsid()\\nif os.fork(): os._exit(0)\\n" + NOTE

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    plain, session, daemon = (int(part) for part in solution_str.split())
    for _ in range(plain):
        subprocess.Popen([sys.executable, "-S", "-c", NOTE])
    for _ in range(session):
        subprocess.Popen([sys.executable, "-S", "-c", NOTE], start_new_session=True)
    for _ in range(daemon):
        subprocess.Popen([sys.executable, "-S", "-c", DAEMON]).wait()
    while len(os.listdir({folder!r})) < plain + session + daemon:
        time.sleep(0.01)
    return 1.0
"""
"""A reward file whose answer says how many processes to start: plain ones, in sessions of their own, and daemons that have
forked twice. Each leaves a file with its process id in ``folder``."""
