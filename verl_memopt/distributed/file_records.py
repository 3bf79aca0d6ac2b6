"""Size and checksum of each file of a checkpoint. They are computed while a file is written, and compared before it is read.

The checksum is blake3, which one core computes faster than a disk writes. vLLM needs the same package, so it is installed anyway.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from blake3 import blake3

from verl_memopt.records import opened

ALGORITHM = "blake3"
"""Name of the checksum in a checkpoint's manifest."""

HASH_BESIDE_BYTES = 2**20
"""Pieces of this size or larger are hashed in a thread while they are written. Neither operation holds Python's global lock."""

NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""Errors of file systems that cannot force a folder to disk. Such file systems keep file names safe in other ways."""


@dataclass(frozen=True)
class FileRecord:
    size: int  # bytes
    digest: str  # hexadecimal


Records = dict[str, FileRecord]
"""Path relative to a folder, with forward slashes -> the record of the file."""


class HashedFile:
    """A binary file, as a context manager, that is written from start to end. It hashes all data that it writes.

    If a write fails, the body raises the error of the disk. Torch's writer drops this error, and later reports an incomplete
    archive instead.
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
        if len(data) < HASH_BESIDE_BYTES:
            self._hash.update(data)
            written = self._write(data)
        else:
            # Wait for the hash below, because the caller may reuse the memory of ``data`` as soon as this returns.
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
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        # Flush first, so that a sync by this descriptor includes all data.
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        self._hasher.shutdown()
        self._file.close()

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._size, self._hash.hexdigest())


@contextmanager
def hashed_file(path: Path, records: Records, name: str) -> Iterator[HashedFile]:
    """Open ``path`` for writing. At the end force the file to disk and store its record as ``records[name]``.

    Raises:
        OSError: The file cannot be written.
    """
    with HashedFile(path.open("wb")) as file:
        yield file
        os.fsync(file.fileno())
    records[name] = file.record


def record_file(path: Path) -> FileRecord:
    """Force a file to disk, read it back and return its record.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return _hashed(file)


def record_folder(folder: Path, root: Path) -> Records:
    """Force every file in ``folder`` and its subfolders to disk, and return their records. Names are relative to ``root``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): record_file(path) for path in files}


def file_fault(path: Path, record: FileRecord, contents: bool = True) -> str | None:
    """Describe how a file differs from its record. None = it does not differ.

    With ``contents`` compare the checksum too, not only the size.
    """
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.size:
                return f"has {size} bytes of {record.size}"
            if contents and _hashed(file).digest != record.digest:
                return "has other contents than were written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def digest_of(path: Path) -> str:
    """Return a checksum of a file, or of the files in a model folder. It reads only 64 samples of 64 KiB of weights over 64 MiB.

    Raises:
        OSError: A file cannot be read.
    """
    digest = blake3()
    for file in [path] if path.is_file() else sorted(entry for entry in path.iterdir() if entry.suffix in MODEL_FILES):
        with opened(file, follow=True) as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(f"{file.name if file != path else ''} {size} ".encode())
            if file.suffix != ".safetensors" or size <= WHOLE_BYTES:
                digest.update(_hashed(stream).digest.encode())
                continue
            for place in range(SAMPLES):
                stream.seek(size * place // SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".py")
WHOLE_BYTES, SAMPLES, SAMPLE_BYTES = 64 * 2**20, 64, 64 * 2**10


def sync_tree(root: Path) -> None:
    """Force all files in ``root`` and its subfolders to disk, and also the file names.

    Raises:
        OSError: The disk reports an error.
    """
    for path in (path for path in root.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folders(root)


def sync_folders(root: Path) -> None:
    """Force the file names in ``root`` and in all its subfolders to disk, inner folders first.

    Raises:
        OSError: The disk reports an error.
    """
    for folder in sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True):
        sync_folder(folder)
    sync_folder(root)


def sync_folder(folder: Path) -> None:
    """Force the file names in one folder to disk, so that a rename or a new file survives a power failure.

    Raises:
        OSError: The disk reports an error.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def _hashed(file: BinaryIO) -> FileRecord:
    digest = hashlib.file_digest(file, blake3)  # type: ignore[arg-type]
    return FileRecord(file.tell(), digest.hexdigest())
