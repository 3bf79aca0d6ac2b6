"""Files that services and editors read: they parse, and they call what a person would call."""

import configparser
import os
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
YAML = sorted([*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"])
WORKFLOW = ROOT / ".github/workflows/ci.yml"


def test_the_folder_for_github_holds_a_workflow_and_issue_templates():
    assert {"ci.yml", "bug.yml", "feature.yml"} <= {path.name for path in YAML}


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_yaml_file_parses_to_a_mapping(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_workflow_runs_the_one_ci_script_on_every_supported_python():
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["test"]
    assert job["runs-on"].startswith("ubuntu")
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    supported = re.search(r'python_requires=">=3\.(\d+),<3\.(\d+)"', (ROOT / "setup.py").read_text())
    assert job["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(*map(int, supported.groups()))]


def test_the_ci_script_can_be_run_and_is_the_whole_test():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "make test"


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.name)
def test_an_issue_form_has_what_github_asks_of_one(path):
    form = yaml.safe_load(path.read_text())
    assert form.keys() >= {"name", "description", "body"}
    identifiers = [item["id"] for item in form["body"]]
    assert len(identifiers) == len(set(identifiers))
    assert all(item["attributes"]["label"] for item in form["body"])


def test_hooks_of_this_repository_use_the_tools_of_its_environment():
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (local,) = [repository for repository in repositories if repository["repo"] == "local"]
    assert [hook["entry"].split()[0] for hook in local["hooks"]] == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/mypy"]
    assert all(repository["repo"] == "local" or repository["rev"] for repository in repositories)


def test_the_editors_line_length_is_the_linters():
    editor = configparser.ConfigParser()
    editor.read_string("[top]\n" + (ROOT / ".editorconfig").read_text())
    assert f"line-length = {editor['*.py']['max_line_length']}" in (ROOT / "pyproject.toml").read_text()


def test_every_target_of_the_makefile_is_phony_and_most_are_explained():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.M))
    assert targets - set(re.search(r"\.PHONY: (.*)", text).group(1).split()) == {"help"}
    explained = set(re.findall(r"^# make ([a-z-]+)", text, re.M))
    assert targets - explained == {"help", "setup", "lint", "types", "clean"}
