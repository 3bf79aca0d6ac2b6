"""Lint what changed since the main branch and run its unit tests: `make quick`.

A changed test file stands for itself, any other file for the tests that import it.
Types, docs and the tests of whole runs are left to `make test`. So is what has not begun after 75 seconds
(`VERL_MEMOPT_QUICK_SECONDS`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MAIN = "main"
SECONDS = float(os.environ.get("VERL_MEMOPT_QUICK_SECONDS", "75"))
"""After this long no further test begins."""

OTHERS = (
    ("verl_memopt/config/yaml/", "tests/config/test_profiles.py"),
    ("docs/configuration.md", "tests/config/test_document.py"),
    ("docs/from_trl.md", "tests/config/test_trl_document.py"),
    ("docs/memory.md", "tests/plan/test_list_knobs.py"),
    ("requirements", "tests/architecture/test_requirements.py"),
    ("setup.py", "tests/architecture/test_requirements.py"),
    ("benchmarks/gpu/wheels.txt", "tests/architecture/test_requirements.py"),
)
"""Start of a path -> the tests of files that are no Python of the package."""


def select_tests(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the test files that belong to changed files.

    Args:
        changed: Paths relative to ``root``; files that no longer exist may be among them.
        root: Root of the repository.

    Returns:
        Paths of test files that exist, sorted, relative to ``root``.
    """
    found: set[str] = set()
    for name in changed:
        path = Path(name)
        if path.suffix == ".py" and path.parts[0] in ("verl_memopt", "tests"):
            found |= {name} if path.name.startswith("test_") else _importers(path, root)
        found |= {test for start, test in OTHERS if name.startswith(start)}
    return sorted(test for test in found if (root / test).is_file())


def _importers(helper: Path, root: Path) -> set[str]:
    """Return the test files that import a file; of a conftest.py none, for it serves a whole folder."""
    module = ".".join(helper.with_suffix("").parts)
    forms = (f"from {module} import", f"import {module}", f"from {module.rpartition('.')[0]} import {helper.stem}")
    tests = (root / "tests").rglob("test_*.py")
    return {str(test.relative_to(root)) for test in tests if any(form in test.read_text() for form in forms)}


def changed_files(root: Path = ROOT) -> tuple[str, list[str]]:
    """Return the commit that is compared with, and the paths that differ from it, those that git does not know yet included."""
    base = _git(root, "merge-base", "HEAD", MAIN) or _git(root, "rev-parse", "HEAD")
    known = _git(root, "diff", "--name-only", "--no-renames", base[0])
    return base[0], sorted({*known, *_git(root, "ls-files", "--others", "--exclude-standard")})


def _git(root: Path, *arguments: str) -> list[str]:
    answer = subprocess.run(["git", "-c", "core.quotepath=off", *arguments], cwd=root, capture_output=True, text=True)
    return answer.stdout.splitlines() if answer.returncode == 0 else []


def main(arguments: list[str]) -> int:
    """Lint and test what changed; arguments go to pytest. Return the exit status of the first that fails."""
    base, changed = changed_files()
    if not changed:
        print(f"quick: nothing has changed since {base[:9]}.")
        return 0
    python = [name for name in changed if name.endswith(".py") and (ROOT / name).is_file()]
    tests = select_tests(changed)
    print(f"quick: {len(changed)} changed files since {base[:9]}; tests: {' '.join(tests) or 'none'}", flush=True)
    for verb in (("check",), ("format", "--check")) if python else ():
        if status := subprocess.run([sys.executable, "-m", "ruff", *verb, *python], cwd=ROOT).returncode:
            return status
    return run_tests(tests, arguments) if tests else 0


class Limit:
    """A plugin of pytest that begins no further test once the time is up."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.stopped = False
        self.failures = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        """Run one test, and ask for the end of the session when it has taken the last of the time."""
        answer = yield
        self.failures = item.session.testsfailed
        if nextitem is not None and time.monotonic() > self.end and not item.session.shouldstop:
            self.stopped = True
            item.session.shouldstop = "the time is up"
        return answer


def run_tests(tests: list[str], arguments: list[str]) -> int:
    """Run test files for at most ``SECONDS``. Return 0 when no test that ran has failed, else pytest's exit status."""
    os.chdir(ROOT)
    limit = Limit(SECONDS)
    status = int(pytest.main([*tests, *arguments], plugins=[limit]))
    if limit.stopped:
        print(f"quick: stopped after {SECONDS:g} seconds. The rest: make test ARGS='{' '.join(tests)}'")
        return int(limit.failures > 0)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
