"""What an import must not bring: a command answers at once, a reward process stays small, and no logger comes unasked."""

import subprocess
import sys

LOGGERS = {"matplotlib", "tensorboard", "wandb", "vllm", "ray"}
HEAVY = {
    "verl_memopt": {"torch", "vllm", "ray", "transformers"},
    "verl_memopt.rewards.supervisor": {"torch", "vllm", "ray", "transformers"},
    "verl_memopt.rewards.runner": {"torch", "vllm", "ray", "transformers", "psutil"},
    "verl_memopt.cli": {"torch", "vllm", "ray", "transformers", "hydra"},
    "verl_memopt.config.loader": {"torch", "vllm", "ray", "transformers"},
    "verl_memopt.worker.group": {"torch", "vllm", "ray", "transformers"},
    "verl_memopt.observe.charts": LOGGERS,
    "verl_memopt.observe.loggers": LOGGERS,
    "verl_memopt.trainer.loop": {"vllm", "ray"},
}
"""Imported in this order by one process: a package that an earlier module brings would be found there."""


def test_a_light_module_brings_no_heavy_package():
    lines = (f"import {module}; print('{module}', *({heavy} & set(sys.modules)))\n" for module, heavy in HEAVY.items())
    found = subprocess.run([sys.executable, "-c", "import sys\n" + "".join(lines)], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == list(HEAVY)
