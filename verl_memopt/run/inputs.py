"""Rows, functions and models that a call from Python passes to a run.

They stay in a temporary folder until the settings are accepted, and then move to the run folder. Each file gets a name with the
checksum of its contents, so no file of an earlier start is overwritten.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from verl_memopt.errors import ConfigError
from verl_memopt.observe.files import disk_refusals, replace_text
from verl_memopt.observe.own_files import MARK, mark, with_umask
from verl_memopt.observe.run_folder import COMMAND, INPUTS, PENDING, refuse_what_is_not_ours
from verl_memopt.run.run_lock import hold

if TYPE_CHECKING:
    from verl_memopt.data.python_rows import PythonRows


class Inputs:
    """The inputs of one call.

    Attributes:
        aside: The temporary folder to which the inputs are written first.
        command: The command line of the call.
        rows: Training rows that are read only when a step needs them, so no file has them; None = there are no such rows.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._folder = run_dir, run_dir / INPUTS
        self._names: dict[str, str] = {}
        self.command = ""
        self.rows: PythonRows | None = None
        try:
            if os.path.lexists(run_dir) and not run_dir.is_dir():
                raise ConfigError(f"trainer.default_local_dir={run_dir}: this is no folder. Give another one.")
            existing = next(parent for parent in (run_dir, *run_dir.parents) if parent.is_dir())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"trainer.default_local_dir={str(run_dir)!r:.200}: {reason}. Give another folder.") from error
        try:
            # The temporary folder is on the disk of the run folder, so files can be renamed. The run folder may not exist yet.
            self.aside = Path(tempfile.mkdtemp(prefix=".inputs-", dir=existing))
        except OSError as error:
            raise ConfigError(
                f"trainer.default_local_dir={run_dir}: {existing} cannot be written to ({error.strerror}). Give another folder."
            ) from error

    def placed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        # Return the settings. Paths of files in `aside` are replaced by the paths that the files will have in the run folder.
        for path in sorted(self.aside.iterdir()):
            self._names[path.name] = f"{path.stem}-{_digest(path)[:12]}{path.suffix}"
        return {key: self._placed(value) for key, value in values.items()}

    def _placed(self, value: Any) -> Any:
        if isinstance(value, str | Path) and Path(value).is_relative_to(self.aside) and Path(value) != self.aside:
            first, *rest = Path(value).relative_to(self.aside).parts
            return str(self._folder.joinpath(self._names.get(first, first), *rest))
        if isinstance(value, Mapping):
            return {key: self._placed(item) for key, item in value.items()}
        return [self._placed(item) for item in value] if isinstance(value, list | tuple) else value

    @contextmanager
    def written(self) -> Iterator[None]:
        """Hold the lock of the run folder and move the inputs there. The body then starts the run.

        If the start is refused, the moved files are removed again.
        """
        made = [parent for parent in (self._run_dir, *self._run_dir.parents) if not parent.exists()]
        moved, pending, is_new = list[Path](), self._folder / PENDING, False
        try:
            lock = hold(self._run_dir)
            with lock:
                refuse_what_is_not_ours(self._run_dir)
                is_new = mark(self._run_dir)
                with disk_refusals(self._folder):
                    self._folder.mkdir(exist_ok=True)
                    for path in sorted(self.aside.iterdir()):
                        target = self._folder / self._names.get(path.name, path.name)
                        if path.name not in self._names or not target.exists():
                            with_umask(path)
                            moved.append(path.replace(target))
                    replace_text(pending, self.command)
                yield
            if pending.exists() and not (self._folder / COMMAND).exists():  # a run without a record in this folder
                pending.rename(self._folder / COMMAND)
        except BaseException:
            if pending.exists():
                for path in moved:
                    _remove(path)
                if is_new:
                    (self._run_dir / MARK).unlink(missing_ok=True)
            raise
        finally:
            pending.unlink(missing_ok=True)
            self.discard()
            with suppress(OSError):  # the folder is not empty
                for folder in (self._folder, *made):
                    folder.rmdir()

    def discard(self) -> None:
        _remove(self.aside)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    # For a folder, the checksum covers all its files and their names.
    if path.is_file():
        return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return blake3("".join(f"{file.relative_to(path)} {_digest(file)}\n" for file in files).encode()).hexdigest()
