"""One writer a run folder: a lock that the living process holds and the kernel releases when it dies.

POSIX record locks belong to a process: a child does not inherit them, so a process that outlives the run does not keep them.
They are dropped when the process closes any descriptor of the file, so no other code may open it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from verl_memopt.errors import ConfigError
from verl_memopt.observe.files import disk_refusals

logger = logging.getLogger(__name__)

LOCK = "run.lock"
"""File in the run folder; it is there while a run writes, and after one that was killed."""

TAKEN = (errno.EACCES, errno.EAGAIN)
RECORD_SECONDS = 1.0
"""How long a process that has just taken the lock may need to write who it is."""


class RunLock:
    """The right to write a run folder. Taken when made; :meth:`release`, or the body of ``with``, ends it."""

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            ConfigError: another process holds it; the text names its process id and start time.
            UserError: the disk refuses the file.
        """
        self.folder = folder
        self.path = folder / LOCK
        self._pid = os.getpid()
        self._descriptor: int | None = None
        while self._descriptor is None:
            with disk_refusals(self.path):
                self._descriptor = self._take()

    @property
    def is_own(self) -> bool:
        """Whether this process took the lock, and not one that it was forked from."""
        return self._pid == os.getpid()

    def release(self) -> None:
        """Give the lock back and remove its file. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or not self.is_own:
            return
        _HELD.pop(self.path, None)
        # While the lock is held: whoever opened the file before finds that it is no longer the one in the folder.
        self.path.unlink(missing_ok=True)
        os.close(descriptor)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def _take(self) -> int | None:
        """Gives the locked descriptor, or None where the file was removed between opening and locking."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in TAKEN:
                os.close(descriptor)
                raise self._refused() from error
            logger.warning("%s: this file system has no locks (%s); nothing stops a second run here", self.path, error.strerror)
        if not _is_file(descriptor, self.path):
            os.close(descriptor)
            return None
        who = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(who) + "\n").encode(), 0)
        return descriptor

    def _refused(self) -> ConfigError:
        return ConfigError(
            f"trainer.default_local_dir={self.folder}: another run writes here ({_holder(self.path)}). Wait until it ends or "
            "stop it, or give this run a folder of its own with trainer.experiment_name=..."
        )


_HELD: dict[Path, RunLock] = {}
"""The locks of this process, and in a forked child those of its parent."""


def hold(folder: Path) -> RunLock:
    """Return the lock of a run folder, which is made if need be. A process that holds it already gets the one it has.

    Raises:
        ConfigError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = _HELD.get(folder / LOCK)
    if lock is None or not lock.is_own:
        lock = _HELD[folder / LOCK] = RunLock(folder)
    return lock


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)


def _holder(path: Path) -> str:
    """Says who holds a lock, from its file; waits a moment for one who has only just taken it."""
    deadline = time.monotonic() + RECORD_SECONDS
    while time.monotonic() < deadline:
        try:
            who = json.loads(path.read_text())
            return f"process {who['pid']} on {who['host']}, started {who['started']}"
        except FileNotFoundError:
            return "a process that has just ended"
        except (OSError, ValueError, KeyError, TypeError):
            time.sleep(0.02)
    return "a process that did not say who it is"
