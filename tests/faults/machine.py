"""Forks runs whose disk fills up or fails when told to, and finds what they leave."""

import hashlib
import os
import struct
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import psutil

from tests.end_to_end.runs import ROOT, arguments, environment, survivors
from tests.faults.kills import KILL
from tests.forked import ForkServer

SOURCE = Path(__file__).with_name("disk.c")
BUILD = ROOT / "build" / "faults"
STATE = "7q"
MARK = "FAULT_RUN"
"""Variable that every process of a run inherits, however far it goes away from it."""


class Machine(ForkServer):
    """Starts each run in a process of its own, and reports how it ended."""

    def __init__(self, folder):
        """folder: an empty one for outputs. The disk's faults are in ``folder / "disk"``: give runs folders in there."""
        self.disk = Path(folder) / "disk"
        self.disk.mkdir(parents=True)
        self._state = Path(folder) / "state"
        self._marks = iter(range(10**6))
        self.fill_after(0)
        faults = {"LD_PRELOAD": str(compiled()), "FAULT_FOLDER": str(self.disk), "FAULT_STATE": str(self._state)}
        super().__init__(folder, environment(**faults))

    def start(self, toy, run_dir, *overrides, **env):
        """Start a training run of the toy task in a session of its own."""
        mark = f"{self.folder} {next(self._marks)}"
        module, *given = arguments(toy, run_dir, *overrides)[2:]
        run = self.fork(["-m", "tests.faults.kills" if KILL in env else module, *given], {**self.env, **env, MARK: mark})
        run.mark = mark
        return run

    def train(self, toy, run_dir, *overrides, **env):
        """Return a training run that has ended."""
        return self.start(toy, run_dir, *overrides, **env).wait(900)  # under Ray, on a machine that does other things

    def trained(self, toy, run_dir, *overrides, **env):
        """Return the folder of a training run that has ended well."""
        run = self.train(toy, run_dir, *overrides, **env)
        assert run.returncode == 0, run.stdout[-3000:]
        return run_dir

    def fill_after(self, changes):
        """Let the disk accept so many more changes (writes, files, folders, renames, syncs), and then none. 0 = no limit."""
        self._write(full_after=changes)

    def refuse_reads(self, refused):
        """Refuse reads of the file that the variable FAULT_UNREADABLE names, or allow them again."""
        self._write(unreadable=int(refused))

    def refuse_rename(self, number, error):
        """Let one rename fail, counted from 1."""
        self._write(number=number, error=error)

    def set_clock(self, seconds):
        """Let the wall clock be so many seconds ahead."""
        self._write(seconds=seconds)

    def _write(self, full_after=0, unreadable=0, number=0, error=0, seconds=0):
        with self._state.open("r+b" if self._state.exists() else "wb") as file:  # in place: the processes have it mapped
            file.write(struct.pack(STATE, 0, full_after, unreadable, 0, number, error, seconds))

    def changes(self):
        """Return the number of changes that the disk was asked for since :meth:`fill_after`."""
        return struct.unpack(STATE, self._state.read_bytes())[0]

    def renames(self):
        """Return the number of renames that the disk was asked for since then."""
        return struct.unpack(STATE, self._state.read_bytes())[3]


def left(run, seconds=20):
    """Return the processes of a run that still live after a while: those of its session, and those that carry its mark."""
    return survivors([process for process in psutil.process_iter() if _has(run, process)], seconds)


def held(run):
    """Return the number of processes, threads and open files of a run."""
    found = Counter()
    driver = psutil.Process(run.pid)
    for process in (driver, *driver.children(recursive=True)):
        try:
            found += Counter(processes=1, threads=process.num_threads(), files=process.num_fds())
        except psutil.NoSuchProcess:
            continue
    return found


def _has(run, process):
    try:
        return os.getsid(process.pid) == run.pid or process.environ().get(MARK) == run.mark
    except (psutil.Error, OSError):
        return False


def compiled():
    """Return the path of ``disk.c`` compiled, once for each version of it."""
    target = BUILD / f"disk-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as aside:
            made = Path(aside) / target.name
            subprocess.run(["gcc", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(made), "-ldl"], check=True, timeout=120)
            os.replace(made, target)
    return target
