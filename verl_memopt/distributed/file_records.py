"""Size and checksum of each file of a checkpoint: taken while the file is written, compared before it is read.

Why blake3: it is a dependency of vLLM, so both builds have it, and one core hashes faster than a disk writes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from blake3 import blake3

ALGORITHM = "blake3"
"""Name of the checksum, as a manifest records it."""

CHUNK_BYTES = 8 * 2**20
"""Bytes read at once when a file on disk is hashed."""

HASH_BESIDE_BYTES = 2**20
"""From this many bytes on, a piece is hashed in a thread while it is written: neither holds Python's lock."""

NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""How a file system says that a folder cannot be forced to disk on its own; it keeps names by other means."""


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its size in bytes and the checksum of its contents in hexadecimal."""

    size: int
    digest: str


Records = dict[str, FileRecord]
"""Path relative to a folder, with forward slashes, -> the record of the file."""


class HashedFile:
    """A binary file for writing from start to end. What is written is hashed on its way to the file.

    A context manager that closes the file. When the disk has refused a write, the body ends with the disk's own error: torch's
    writer drops it, and complains later that its archive is not whole.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = blake3()
        self._size = 0
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        self._refusal: OSError | None = None

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        finally:
            if self._refusal is not None and error is not self._refusal:
                raise self._refusal

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of ``data`` and return the number of its bytes."""
        if len(data) < HASH_BESIDE_BYTES:
            self._hash.update(data)
            written = self._write(data)
        else:
            # The caller may reuse the memory of ``data`` as soon as this returns.
            hashed = self._hasher.submit(self._hash.update, data)
            try:
                written = self._write(data)
            finally:
                hashed.result()
        self._size += written
        return written

    def _write(self, data: bytes | bytearray | memoryview) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self._refusal = self._refusal or error
            raise

    def tell(self) -> int:
        """Return the bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Hand what is written to the operating system."""
        self._file.flush()

    def fileno(self) -> int:
        """Return the file's descriptor, after handing over what is written, so that a sync by descriptor has all of it."""
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Close the file and end the thread."""
        self._hasher.shutdown()
        self._file.close()

    @property
    def record(self) -> FileRecord:
        """Size and checksum of what was written so far."""
        return FileRecord(self._size, self._hash.hexdigest())


@contextmanager
def hashed_file(path: Path, records: Records, name: str) -> Iterator[HashedFile]:
    """Open ``path`` for writing; at the end force it to disk and keep its record as ``records[name]``.

    Raises:
        OSError: the disk refuses.
    """
    with HashedFile(path.open("wb")) as file:
        yield file
        os.fsync(file.fileno())
    records[name] = file.record


def record_file(path: Path) -> FileRecord:
    """Force a file to disk and return its record, read back.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return _hashed(file)


def record_folder(folder: Path, root: Path) -> Records:
    """Return the record of every file below ``folder``, each forced to disk; names are relative to ``root``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): record_file(path) for path in files}


def file_fault(path: Path, record: FileRecord, contents: bool = True) -> str | None:
    """Return what is wrong with a file, or None where it is what its record says.

    Args:
        path: of the file.
        record: what it must be.
        contents: compare the checksum too, and not the size alone.
    """
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"has {size} bytes of {record.size}"
        if contents:
            with path.open("rb") as file:
                if _hashed(file).digest != record.digest:
                    return "has other contents than were written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def sync_folders(root: Path) -> None:
    """Force the names in ``root`` and in every folder below it to disk, inner folders first.

    Raises:
        OSError: the disk refuses.
    """
    for folder in sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True):
        sync_folder(folder)
    sync_folder(root)


def sync_folder(folder: Path) -> None:
    """Force the names in one folder to disk, so that a rename or a new file outlives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def _hashed(file: BinaryIO) -> FileRecord:
    digest, size, chunk = blake3(), 0, memoryview(bytearray(CHUNK_BYTES))
    while got := file.readinto(chunk):  # type: ignore[attr-defined]
        digest.update(chunk[:got])
        size += got
    return FileRecord(size, digest.hexdigest())
