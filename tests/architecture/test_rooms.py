"""The shape of the package: rooms in one order, optional packages behind one door each."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "verl_memopt"
ORDER = (
    "errors", "knobs", "config", "distributed", "observe", "ops", "memory", "models", "data", "rollout", "rewards", "algorithms",
    "sync", "workers", "trainer", "ladder", "cli", "__main__",
)  # fmt: skip
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
DOORS = {
    "vllm": {"rollout/vllm_engine.py"},
    "ray": {"workers/ray_group.py", "workers/ray_cluster.py"},
    "hydra": {"config/loader.py"},
    "flash_attn": {"models/attention.py"},
    "wandb": {"observe/loggers.py"},
    "math_verify": {"rewards/rules.py"},
}


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    """Gives the dotted name of every module a file imports, at its top or inside a function, but for those of types alone."""
    tree = ast.parse(path.read_text())
    for_types = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    of_types = {each for block in for_types for each in ast.walk(block)}
    for node in (node for node in ast.walk(tree) if node not in of_types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def name(path):
    return str(path.relative_to(PACKAGE))


def test_every_room_is_in_the_order():
    assert {room(path) for path in FILES} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_room_imports_only_rooms_before_it(path):
    reached = {module.split(".")[1] for module in imports(path) if module.startswith("verl_memopt.")}
    later = {other for other in reached if other in ORDER and ORDER.index(other) > ORDER.index(room(path))}
    assert not later


@pytest.mark.parametrize("package", DOORS)
def test_an_optional_package_is_imported_behind_its_door_only(package):
    assert {name(path) for path in FILES if package in {module.split(".")[0] for module in imports(path)}} <= DOORS[package]


def attributes(path):
    """Gives the names that code uses, without its texts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def test_only_the_device_file_names_the_accelerators_api():
    assert {name(path) for path in FILES if "cuda" in set(attributes(path))} <= {"distributed/device.py"}


def test_no_room_is_a_place_for_whatever():
    assert not {"utils", "common", "core", "helpers", "misc"} & {
        part for path in FILES for part in path.relative_to(PACKAGE).parts
    }


@pytest.mark.parametrize("module", ["verl_memopt", "verl_memopt.cli", "verl_memopt.rewards.process", "verl_memopt.trainer.run"])
def test_a_light_module_brings_no_heavy_package(module):
    code = f"import sys, {module}; print(*({{'torch', 'vllm', 'ray', 'transformers'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_importing_the_trainer_brings_neither_ray_nor_vllm():
    code = "import sys, verl_memopt.trainer.loop; print(*({'vllm', 'ray'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
