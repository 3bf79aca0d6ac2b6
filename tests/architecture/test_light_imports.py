"""What an import must not bring: a command answers at once, and a reward process stays small."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("verl_memopt", {"torch", "vllm", "ray", "transformers"}),
        ("verl_memopt.cli", {"torch", "vllm", "ray", "transformers", "hydra"}),
        ("verl_memopt.rewards.process", {"torch", "vllm", "ray", "transformers", "psutil"}),
        ("verl_memopt.config.loader", {"torch", "vllm", "ray", "transformers"}),
        ("verl_memopt.worker.group", {"torch", "vllm", "ray", "transformers"}),
        ("verl_memopt.trainer.loop", {"vllm", "ray"}),
    ],
)
def test_a_light_module_brings_no_heavy_package(module, heavy):
    code = f"import sys, {module}; print(*({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
