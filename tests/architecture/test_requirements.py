"""setup.py asks for ranges, the requirement files name exact versions, and the two agree."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setuptools.dist import Distribution

ROOT = Path(__file__).parents[2]
FILES = (*sorted((ROOT / "requirements").glob("*.txt")), ROOT / "requirements.txt", ROOT / "benchmarks/gpu/wheels.txt")
OPTIONAL = ("gpu", "flash-attn", "torchao", "math", "wandb", "swanlab", "mlflow", "trackio")
"""Extras of setup.py with ranges. The others repeat a requirement file."""
OF_ONE_BUILD = {"apache-tvm-ffi", "triton"}
"""Packages of which torch or vLLM pins another version in its build for GPUs than the environment of the tests has."""


@pytest.fixture(scope="module")
def package():
    from distutils.core import run_setup

    return run_setup(str(ROOT / "setup.py"), stop_after="init")


def requirements(path):
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


def pins(path):
    """Returns (package, version) of each exact version that a file names."""
    for requirement in requirements(path):
        for part in requirement.specifier:
            if part.operator == "==" and not part.version.endswith("*"):
                yield canonicalize_name(requirement.name), part.version


def ranges(package):
    """Returns package -> range, for the packages that setup.py asks for itself."""
    extras = [line for name in OPTIONAL for line in package.extras_require[name]]
    asked = [Requirement(line) for line in (*package.install_requires, *extras)]
    return {canonicalize_name(requirement.name): requirement.specifier for requirement in asked}


def test_setup_py_can_be_read(package):
    assert isinstance(package, Distribution)
    assert package.get_name() == "verl-memopt"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_pinned_version_lies_in_its_range(package, path):
    asked = ranges(package)
    outside = {name: version for name, version in pins(path) if name in asked and version not in asked[name]}
    assert not outside


def test_setup_py_asks_for_what_the_requirements_install_and_nothing_else(package):
    asked = {canonicalize_name(Requirement(line).name) for line in package.install_requires}
    assert asked == {canonicalize_name(requirement.name) for requirement in requirements(ROOT / "requirements.txt")}


def test_setup_py_pins_no_version_in_its_ranges(package):
    assert not [f"{name}{asked}" for name, asked in ranges(package).items() if any(part.operator == "==" for part in asked)]


def test_every_package_with_a_range_has_an_exact_version_somewhere(package):
    known = {name for path in FILES for name, _ in pins(path)}
    assert set(ranges(package)) - known <= {"flash-attn", "wandb", "swanlab", "mlflow", "trackio"}, (
        "installed by hand, in whatever version"
    )


def test_one_package_has_one_exact_version():
    found = {}
    for path in FILES:
        for name, version in pins(path):
            found.setdefault(name, set()).add(version)
    several = {name for name, versions in found.items() if len(versions) > 1}
    assert several <= OF_ONE_BUILD


def test_a_gpu_machine_gets_every_package_of_its_files_in_an_exact_version():
    held = {name for name, _ in pins(ROOT / "requirements/constraints-gpu.txt")}
    asked = [*requirements(ROOT / "requirements.txt"), *requirements(ROOT / "requirements/gpu.txt")]
    assert {canonicalize_name(each.name) for each in asked} <= held
    assert {"nvidia-nccl-cu13", "triton", "flashinfer-python"} <= held, "what the CUDA build brings"
