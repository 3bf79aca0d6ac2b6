"""`make quick` picks the tests of what changed."""

import os
import subprocess
import sys

import pytest

from tests.quick import OTHERS, ROOT, changed_files, select_tests


def test_a_changed_file_stands_for_its_tests():
    for changed, expected in (
        ("tests/algorithms/test_kl.py", ["tests/algorithms/test_kl.py"]),
        ("verl_memopt/config/yaml/rloo_trainer.yaml", ["tests/config/test_profiles.py"]),
        ("requirements/gpu.txt", ["tests/architecture/test_requirements.py"]),
        ("README.md", []),
        ("verl_memopt/algorithms/was_removed.py", []),
        ("tests/algorithms/test_was_removed.py", []),
    ):
        assert select_tests([changed]) == expected
    assert "tests/algorithms/test_kl.py" in select_tests(["verl_memopt/algorithms/kl.py"])
    chosen = select_tests(["tests/ranks.py"])
    assert "tests/distributed/test_sharded_state.py" in chosen
    assert "tests/algorithms/test_kl.py" not in chosen


def test_the_tests_of_other_files_exist():
    assert [test for _, test in OTHERS if not (ROOT / test).is_file()] == []
    assert [start for start, _ in OTHERS if not any(ROOT.glob(f"{start.rstrip('/')}*"))] == []


@pytest.fixture
def repository(tmp_path):
    """A repository whose main branch has two files, with a branch checked out."""

    def git(*arguments):
        author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *author, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--initial-branch=main")
    for name in ("kept.py", "edited.py", "removed.py", "committed.py"):
        (tmp_path / name).write_text("1\n")
    git("add", ".")
    git("commit", "--message=first")
    git("checkout", "-b", "branch")
    return tmp_path, git


def test_changes_of_the_branch_and_of_the_working_tree_count_and_those_of_main_alone_do_not(repository):
    folder, git = repository
    assert changed_files(folder)[1] == []
    git("checkout", "main")
    (folder / "kept.py").write_text("2\n")
    git("commit", "--all", "--message=main goes on")
    git("checkout", "branch")
    (folder / "committed.py").write_text("2\n")
    git("commit", "--all", "--message=second")
    (folder / "edited.py").write_text("2\n")
    (folder / "removed.py").unlink()
    (folder / "new.py").write_text("1\n")
    assert changed_files(folder)[1] == ["committed.py", "edited.py", "new.py", "removed.py"]


def test_a_repository_without_a_main_branch_is_compared_with_its_last_commit(repository):
    folder, git = repository
    git("branch", "--delete", "--force", "main")
    (folder / "edited.py").write_text("2\n")
    assert changed_files(folder)[1] == ["edited.py"]


def quick(folder, **files):
    """Returns what the script did in a repository, to which it and further tests are added."""
    (folder / "ruff.toml").write_text('line-length = 130\nlint.select = ["F"]\n')
    (folder / "tests").mkdir()
    (folder / "tests/__init__.py").touch()
    (folder / "tests/quick.py").write_text((ROOT / "tests/quick.py").read_text())
    for name, text in files.items():
        (folder / f"tests/{name}.py").write_text(text)
    environment = {**os.environ, "VERL_MEMOPT_QUICK_SECONDS": "0.5", "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    return subprocess.run([sys.executable, "tests/quick.py"], cwd=folder, capture_output=True, text=True, env=environment)


def test_the_script_ends_well_without_changes(repository):
    folder, _ = repository
    (folder / ".git/info/exclude").write_text("tests\nruff.toml\n")
    ended = quick(folder)
    assert (ended.returncode, ended.stdout[:34]) == (0, "quick: nothing has changed since " + ended.stdout[33])


def test_a_failing_lint_fails_the_script(repository):
    folder, _ = repository
    (folder / "edited.py").write_text("import os\n")
    ended = quick(folder)
    assert ended.returncode == 1
    assert "F401" in ended.stdout


SLEEPS = "import time\n\n\ndef test_long():\n    time.sleep(1)\n{}\n\ndef test_next():\n    assert 1 == 2\n"


@pytest.mark.parametrize("fails", [False, True])
def test_no_test_begins_when_the_time_is_up_and_a_failure_before_that_counts(repository, fails):
    ended = quick(repository[0], test_sleeps=SLEEPS.format("    assert 1 == 2\n" if fails else ""))
    assert (ended.returncode != 0) == fails
    assert ("1 failed" if fails else "1 passed") in ended.stdout
    assert "quick: stopped after 0.5 seconds. The rest: make test ARGS='tests/test_sleeps.py'" in ended.stdout
