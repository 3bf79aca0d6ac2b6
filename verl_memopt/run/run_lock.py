"""A lock that allows only one writer in a run folder. The kernel releases it when the process dies.

POSIX record locks belong to a process. A child does not inherit them, so no process that outlives the run keeps the lock. A
process loses the lock when it closes any descriptor of the file, so no other code may open that file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TypedDict

from verl_memopt.errors import ConfigError
from verl_memopt.observe.files import disk_refusals
from verl_memopt.records import RecordError, read_json

logger = logging.getLogger(__name__)

LOCK = "run.lock"
"""File in the run folder. It exists while a run writes there, and remains after a run that was killed."""

LOCKED_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
RECORD_BYTES = 4096
RECORD_SECONDS = 1.0
"""Longest time from getting the lock until the file names the process that holds it."""


class RunLock:
    """The right to write in a run folder, from construction until :meth:`release` or the end of ``with``.

    ``made``: folders that were created for this lock, the innermost first. If they are empty at its release, they are removed.

    Raises:
        ConfigError: Another process holds the lock. The message names it.
    """

    def __init__(self, folder: Path, made: Sequence[Path] = ()) -> None:
        self.folder = folder
        self.path = folder / LOCK
        self._made = made
        self._pid = os.getpid()
        self._descriptor: int | None = None
        # The folder is locked too. If the file were deleted, another run could create a new file and lock that one.
        self._folder = self._lock_folder()
        try:
            while self._descriptor is None:
                with disk_refusals(self.path):
                    self._descriptor = self._lock()
        except BaseException:
            self._release_folder()
            raise
        os.register_at_fork(after_in_child=self._release_folder)

    @property
    def is_own(self) -> bool:
        # A forked process has a copy of the object, but not the lock.
        return self._pid == os.getpid()

    def release(self) -> None:
        """Release the lock and remove its file. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or not self.is_own:
            return
        _HELD.pop(self.path, None)
        # Remove the file while it is locked. Then a process that has opened it sees that the file is no longer in the folder.
        with suppress(OSError):  # the folder may have been made read-only
            self.path.unlink(missing_ok=True)
        os.close(descriptor)
        self._release_folder()
        with suppress(OSError):  # the folder is not empty
            for folder in self._made:
                folder.rmdir()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def _lock_folder(self) -> int | None:
        # Unlike the lock of the file, a forked process would share this lock, so it closes the descriptor.
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        if _locked(folder, fcntl.LOCK_EX):
            return folder
        os.close(folder)
        raise self._held()

    def _release_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            os.close(folder)

    def _held(self) -> ConfigError:
        return ConfigError(
            f"trainer.default_local_dir={self.folder}: another run writes here ({_holder(self.path)}). Wait until it "
            "ends or stop it, or give this run a folder of its own with trainer.experiment_name=..."
        )

    def _lock(self) -> int | None:
        # Return the locked descriptor, or None if the file was removed after it was opened.
        try:
            # A link is not followed, because the file that it leads to would be overwritten.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ConfigError(f"{self.path}: a link, which may lead anywhere. Delete it.") from error
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ConfigError(f"{self.path}: no regular file, and no run wrote it. A run keeps its lock there. Move it away.")
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in LOCKED_BY_ANOTHER:
                os.close(descriptor)
                raise self._held() from error
            logger.warning("%s: this file system has no locks (%s); nothing stops a second run here", self.path, error.strerror)
        if not _is_at(descriptor, self.path):
            os.close(descriptor)
            return None
        if not _is_ours(os.pread(descriptor, RECORD_BYTES, 0)):
            os.close(descriptor)
            raise ConfigError(
                f"{self.path}: it is there, and no run wrote it. A run keeps its lock under that name. Move it away, or give the "
                "run a folder of its own."
            )
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        # The file is written only after it is locked, because until then its content belongs to another run.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)
        return descriptor


def _is_ours(text: bytes) -> bool:
    # The file is new, or was written by a run that was killed.
    return not text or (text.startswith(b'{"pid": ') and text.endswith(b"}\n"))


# While a process reads a checkpoint, a run that goes on meanwhile must not remove it.


@contextmanager
def reading(folder: Path) -> Iterator[bool]:
    """Yield whether a folder exists. During the body, :func:`removing` does not allow its removal."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield os.path.lexists(folder)  # the code that reads it reports the error
        return
    try:
        deadline = time.monotonic() + REMOVAL_SECONDS
        while not _locked(descriptor, fcntl.LOCK_SH) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield _is_at(descriptor, folder)
    finally:
        os.close(descriptor)


@contextmanager
def removing(folder: Path) -> Iterator[bool]:
    """Yield whether a folder may be renamed or removed, because nobody reads it. During the body nobody can begin to read it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield True
        return
    try:
        yield _locked(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


REMOVAL_SECONDS = 2.0
"""Longest wait for a lock that another process holds only while it renames a folder."""


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in LOCKED_BY_ANOTHER  # True for a file system without such locks
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


@contextmanager
def only_run(what: str) -> Iterator[None]:
    """Allow one run or session at a time in this process, because signals, byte counters and Ray belong to the whole process.

    Raises:
        ConfigError: There is another run or session. It is not disturbed.
    """
    if not _ONLY.acquire(blocking=False):
        raise ConfigError(
            f"{what}: {_running[-1] if _running else 'another run'} is going on in this process, which allows only one. Wait "
            "until it ends (leave the body of a session), or start this one in a process of its own."
        )
    _running.append(f"{what} in the thread {threading.current_thread().name}")
    try:
        yield
    finally:
        _running.clear()
        _ONLY.release()


_ONLY = threading.Lock()
_running: list[str] = []


def _as_in_a_new_process() -> None:
    # The run of the parent does not go on in a forked process.
    global _ONLY
    _ONLY = threading.Lock()
    _running.clear()


os.register_at_fork(after_in_child=_as_in_a_new_process)

_HELD: dict[Path, RunLock] = {}
"""Path of the lock file -> lock of this process. In a forked child these are the locks of its parent."""


def hold(folder: Path) -> RunLock:
    """Return the lock of a run folder, which is created if needed. If this process already holds it, it is returned again."""
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"trainer.default_local_dir={folder}: {error.filename} is no folder. Give another one.") from error
    lock = _HELD.get(folder / LOCK)
    if lock is None or not lock.is_own:
        lock = _HELD[folder / LOCK] = RunLock(folder, made)
    return lock


class _Holder(TypedDict):
    pid: int
    host: str
    started: str


def _holder(path: Path) -> str:
    # A process that has just got the lock needs a moment to write its id.
    deadline = time.monotonic() + RECORD_SECONDS
    while time.monotonic() < deadline:
        try:
            holder = read_json(path, _Holder)
            return f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
        except FileNotFoundError:
            return f"a process whose {LOCK} is gone"
        except (OSError, RecordError):
            time.sleep(0.02)
    return "a process that did not say who it is"
